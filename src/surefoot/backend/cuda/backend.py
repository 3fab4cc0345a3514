"""CUDA, eagerly and untuned: the blockwise forms with the library's own products."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.backend.blockwise.attention import Widths
from surefoot.backend.blockwise.backend import BlockwiseBackend
from surefoot.backend.blockwise.linear import PlainGated, PlainLinear
from surefoot.backend.operands import Int8Weight, Weight
from surefoot.backend.protocol import Capabilities, Linear
from surefoot.errors import SettingError


class CudaBackend(BlockwiseBackend):
    """Operators on the current CUDA device; not bitwise: its products choose kernels by size."""

    def __init__(self) -> None:
        """Use the current device.

        Raises:
            SettingError: there is none.
        """
        if not torch.cuda.is_available():
            raise SettingError(
                "device", "'cuda' was asked for, and this machine has no CUDA device"
            )
        self.capabilities = Capabilities(
            name="cuda",
            bitwise=False,
            dtypes=("bfloat16", "float32"),
            page_tokens=32,
            max_draft_tokens=16,
            recordings=0,
        )
        super().__init__(torch.device("cuda", torch.cuda.current_device()), _ANY)

    def free_memory(self) -> int:
        """See Backend."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def prepare(self, progress: Callable[[str], None]) -> None:
        """See Backend: there is nothing to do."""

    def pack_linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """See Backend."""
        assert not isinstance(weight, Int8Weight), "not offered, as the capabilities say"
        moved = None if bias is None else bias.to(self.device)
        return PlainLinear(weight.to(self.device), moved)

    def pack_gated(
        self, weight: Weight, bias: Tensor | None, limit: float = math.inf
    ) -> Callable[[Tensor], Tensor]:
        """See Backend."""
        return PlainGated(self.pack_linear(weight, bias), limit)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See Backend."""
        first, second = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((second, first), dim=-1) * sin).to(x.dtype)


def _any_width(shape: object) -> int:
    """Tiles of any width will do where no bits are promised."""
    return 1


_ANY = Widths(_any_width, _any_width)
