"""Norms and rotations of heads, by the framework's own operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.backend.operands import Placing


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See Backend.rms_norm."""
    normed = F.rms_norm(x.float(), x.shape[-1:], None, eps)
    return (normed * weight.float()).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See Backend.rotary."""
    turned = torch.roll(x, x.shape[-1] // 2, -1).to(cos.dtype)
    return torch.addcmul(x * cos, turned, sin).to(x.dtype)


def placed(x: Tensor, placing: Placing) -> Tensor:
    """Heads [T, H + K, D], normed if they are to be, and rotated."""
    if placing.norms is not None:
        x = rms_norm(x, placing.norms, placing.eps)
    return rotary(x, placing.cos, placing.sin)
