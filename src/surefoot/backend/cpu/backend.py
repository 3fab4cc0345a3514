"""The fast backend for CPUs: prepacked linears, batched attention, bitwise by default."""

from __future__ import annotations

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.backend.blockwise.attention import BlockwiseRows, ProductShape, least_tile_width
from surefoot.backend.cpu.linear import RowInvariant, pack_fast
from surefoot.backend.protocol import Capabilities, Linear, RowLayout, RowOperators


class CpuBackend:
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
        self.device = torch.device("cpu")
        self.invariant = RowInvariant()
        self._widths: dict[ProductShape, int] = {}

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """See Backend."""
        if self.capabilities.bitwise:
            return self.invariant.pack(weight, bias)
        return pack_fast(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""
        if x.dtype != torch.float32:
            return F.rms_norm(x, weight.shape, weight, eps)
        # The library's own norm is put together from more and slower parts.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        factor = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        return (x * weight).mul_(factor)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See Backend; written out, as the library's silu treats a vector's end differently."""
        gate, up = gate_up.chunk(2, dim=-1)
        divisor = torch.exp(-gate).add_(1)
        return torch.div(gate, divisor, out=divisor).mul_(up)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See Backend."""
        swapped = torch.roll(x, x.shape[-1] // 2, -1).float()
        return torch.addcmul(x * cos, swapped, sin).to(x.dtype)

    def free_memory(self) -> int:
        """See Backend."""
        return int(psutil.virtual_memory().available)

    def rows(self, layout: RowLayout) -> RowOperators:
        """See Backend."""
        return BlockwiseRows(layout, self._tile_width, self.device)

    def _tile_width(self, shape: ProductShape) -> int:
        """Least tokens per attention tile, measured once for each shape."""
        if not self.capabilities.bitwise:
            return 1
        if shape not in self._widths:
            self._widths[shape] = least_tile_width(shape)
        return self._widths[shape]
