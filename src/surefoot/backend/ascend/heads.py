"""Norms and rotations of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.vendor import Vendor
from surefoot.backend.operands import Placing


def rms_norm(vendor: Vendor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See Backend.rms_norm. The operator takes one weight for all heads."""
    if not x.shape[0]:
        return torch.empty_like(x)
    if weight.dim() == 1:
        return vendor.npu_rms_norm(x.contiguous(), weight, eps)[0]
    ones = torch.ones(x.shape[-1], dtype=torch.float32, device=x.device)
    return (vendor.npu_rms_norm(x.float(), ones, eps)[0] * weight.float()).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See Backend.rotary.

    Composed: the vendor's operator takes angles of x's own element type, within [-1, 1], and some
    scalings of positions go beyond.
    """
    first, second = x.chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((second, first), dim=-1) * sin).to(x.dtype)


def placed(vendor: Vendor, x: Tensor, placing: Placing) -> Tensor:
    """Norm and rotation of heads [T, heads, D], rounded once."""
    wide = x.float()
    if placing.norms is not None:
        wide = rms_norm(vendor, wide, placing.norms, placing.eps)
    return rotary(wide, placing.cos, placing.sin).to(x.dtype)
