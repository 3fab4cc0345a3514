"""Products with packed weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.ascend.vendor import Vendor
from surefoot.backend.protocol import Linear


@dataclass(frozen=True)
class AscendLinear:
    """y = x W^T + b."""

    weight: Tensor
    bias: Tensor | None
    vendor: Vendor

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        if not x.shape[0]:
            return x.new_empty(0, self.weight.shape[0])
        return self.vendor.npu_linear(x.contiguous(), self.weight, self.bias)

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        return stream + self(x)


@dataclass(frozen=True)
class AscendGated:
    """silu(gate) * up of one product; see Backend.pack_gated."""

    both: Linear
    limit: float
    vendor: Vendor

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        return swiglu(self.vendor, self.both(x), self.limit)


def swiglu(vendor: Vendor, gate_up: Tensor, limit: float) -> Tensor:
    """silu(gate) * up of [T, 2 I], both cut off at the limit."""
    if not gate_up.shape[0]:
        return gate_up.new_empty(0, gate_up.shape[1] // 2)
    if limit < math.inf:
        gate, up = gate_up.chunk(2, dim=-1)
        gate_up = torch.cat((gate.clamp(max=limit), up.clamp(-limit, limit)), dim=-1)
    return vendor.npu_swiglu(gate_up)
