"""Causal convolution along rows, composed: the vendor's own operator does not serve these models.

`npu_fused_causal_conv1d` is published for a width of 3, without an activation, for one chip that
is not the common one. Here a few multiplications and additions do it, whatever the width; inputs
from before a row are read where they lie, so there is no second copy that could be left behind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.placed import PlacedRows


def causal_conv(rows: PlacedRows, x: Tensor, ring: Tensor, weight: Tensor) -> Tensor:
    """See RowOperators; sums are float32, in order of taps."""
    taps, position = weight.shape[1], rows.places.position[:, None]
    weight = weight.float()
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for tap in range(taps - 1):
        at = position - (taps - 1 - tap)
        entry = rows.entries_at(x, ring, at)[:, 0].float()
        total = total + torch.where(at >= 0, entry, 0) * weight[:, tap]
    total = total + x.float() * weight[:, -1]
    return (total / (1 + torch.exp(-total))).to(x.dtype)
