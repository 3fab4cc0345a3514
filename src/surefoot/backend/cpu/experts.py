"""Feed-forwards on a CPU: packed products, and compiled loops between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from surefoot.backend.cpu.kernels import routed
from surefoot.backend.protocol import Linear


@dataclass(frozen=True)
class CompiledGated:
    """silu(gate) * up for float32; see Backend.pack_gated.

    Attributes:
        both: maps [T, inputs] to [T, 2 * width], the gate first.
        limit: where gate and up are cut off.
    """

    both: Linear
    limit: float

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, width]."""
        return limited_gate(self.both(x), self.limit)


def limited_gate(both: Tensor, limit: float) -> Tensor:
    """silu(gate) * up of float32 [T, 2 I], cut off at the limit."""
    out = torch.empty(both.shape[0], both.shape[1] // 2)
    routed.limited_gate(both.contiguous().numpy(), np.float32(limit), out.numpy())
    return out


@dataclass(frozen=True)
class CompiledExperts:
    """See Experts; computed in float32. An expert's products see only the tokens that chose it.

    Attributes:
        gate_up: of each expert, [T, hidden] to [T, 2 I].
        down: of each expert, [T, I] to [T, hidden].
        limit: see Backend.pack_gated.
    """

    gate_up: tuple[Linear, ...]
    down: tuple[Linear, ...]
    limit: float

    def __call__(self, x: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        """See Experts."""
        ends = torch.empty(len(self.gate_up) + 1, dtype=torch.int64)
        places = np.empty(choice.shape, np.int64)
        entering = torch.empty(choice.numel(), x.shape[1])
        routed.enter_experts(
            x.float().numpy(), choice.numpy(), ends.numpy(), places, entering.numpy()
        )
        out = torch.empty(x.shape)
        bounds = ends.tolist()
        between = limited_gate(_products(self.gate_up, entering, bounds), self.limit)
        products = _products(self.down, between, bounds)
        routed.leave_experts(products.numpy(), places, weights.numpy(), out.numpy())
        return out.to(x.dtype)


def _products(linears: tuple[Linear, ...], x: Tensor, bounds: list[int]) -> Tensor:
    """Each linear of its own rows of x, one below the other."""
    parts = [
        linear(x[begin:end])
        for linear, begin, end in zip(linears, bounds[:-1], bounds[1:], strict=True)
        if end > begin
    ]
    return torch.cat(parts) if parts else linears[0](x[:0])
