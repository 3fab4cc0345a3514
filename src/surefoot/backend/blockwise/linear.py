"""The framework's own linear layer, and a gated pair put together from one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PlainLinear:
    """y = x W^T + b by the library's product, for devices and element types that are not packed."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        return stream + self(x)


@dataclass(frozen=True)
class PlainGated:
    """silu(gate) * up, from one product of both.

    Attributes:
        both: maps [T, inputs] to [T, 2 * outputs].
        limit: see Backend.pack_gated.
    """

    both: Callable[[Tensor], Tensor]
    limit: float = math.inf

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        return swiglu(self.both(x), self.limit)


def swiglu(gate_up: Tensor, limit: float = math.inf) -> Tensor:
    """silu(gate) * up of [T, 2 I] with the gate first; see Backend.pack_gated for the limit.

    Written out, as the library's silu may treat the end of a vector differently.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if limit < math.inf:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    divisor = torch.exp(-gate).add_(1)
    return torch.div(gate, divisor, out=divisor).mul_(up)
