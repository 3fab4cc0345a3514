"""The framework's own linear layer."""

from __future__ import annotations

from dataclasses import dataclass

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
