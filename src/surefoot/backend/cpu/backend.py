"""The fast backend for CPUs: prepacked linears, batched attention, bitwise by default."""

from __future__ import annotations

import sys
from collections.abc import Callable

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.backend.blockwise.attention import ProductShape, Widths, least_tile_width
from surefoot.backend.blockwise.backend import BlockwiseBackend
from surefoot.backend.blockwise.blocks import DeltaShape
from surefoot.backend.blockwise.recurrent import least_new_width
from surefoot.backend.cpu.linear import FastGated, RowInvariant, pack_fast, pack_gated
from surefoot.backend.protocol import Capabilities, Linear


class CpuBackend(BlockwiseBackend):
    """Operators in torch's CPU library, arranged so that no row's bits depend on another row."""

    def __init__(self, bitwise: bool = True) -> None:
        """Choose between forms that keep a row's bits however the work is cut, and the quickest."""
        self.capabilities = Capabilities(
            name="cpu",
            bitwise=bitwise,
            dtypes=("float32", "bfloat16"),
            page_tokens=32,
            max_draft_tokens=16,
            capture=False,
        )
        self.invariant = RowInvariant()
        self._numbers: dict[float, Tensor] = {}
        self._tile_widths: dict[ProductShape, int] = {}
        self._new_widths: dict[DeltaShape, int] = {}
        super().__init__(torch.device("cpu"), Widths(self._tile_width, self._new_width))

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """See Backend."""
        if self.capabilities.bitwise:
            return self.invariant.pack(weight, bias)
        return pack_fast(weight, bias)

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """See Backend."""
        both, width = self.pack_linear(weight, bias), weight.shape[0] // 2
        if self.capabilities.bitwise:
            return pack_gated(both, width)
        return FastGated(both, width, rows=sys.maxsize)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""
        if x.dtype != torch.float32:
            return F.rms_norm(x, weight.shape, weight, eps)
        # The library's own norm is put together from more and slower parts.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        factor = torch.addcmul(self._number(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * factor).mul_(weight)

    def _number(self, value: float) -> Tensor:
        """A tensor of one number, made once."""
        if value not in self._numbers:
            self._numbers[value] = torch.tensor(value)
        return self._numbers[value]

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See Backend."""
        turned = torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1).to(cos.dtype), sin)
        return turned.to(x.dtype)

    def free_memory(self) -> int:
        """See Backend."""
        return int(psutil.virtual_memory().available)

    def _tile_width(self, shape: ProductShape) -> int:
        """Least tokens per attention tile, measured once for each shape."""
        if not self.capabilities.bitwise:
            return 1
        if shape not in self._tile_widths:
            self._tile_widths[shape] = least_tile_width(shape)
        return self._tile_widths[shape]

    def _new_width(self, shape: DeltaShape) -> int:
        """Least new positions per block of the gated delta rule, measured once for each shape."""
        if not self.capabilities.bitwise:
            return 1
        if shape not in self._new_widths:
            self._new_widths[shape] = least_new_width(shape)
        return self._new_widths[shape]
