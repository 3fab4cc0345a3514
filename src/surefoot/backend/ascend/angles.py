"""Rotary angles from tables, as the device has no float64.

A position is 1024 a + b, and cosine and sine of a sum come from those of its parts: two tables,
made on the host in float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_NEAR, _FAR = 1024, 2048
MOST_POSITIONS = _NEAR * _FAR


class AngleTables:
    """Cosines and sines of positions below MOST_POSITIONS; see Backend.pack_angles."""

    def __init__(
        self, frequencies: Tensor, factor: float, passing: int, device: torch.device
    ) -> None:
        """Make the tables; the factor goes into one of them."""
        near = torch.arange(_NEAR, dtype=torch.float64)[:, None] * frequencies
        far = _NEAR * torch.arange(_FAR, dtype=torch.float64)[:, None] * frequencies
        self._near = torch.stack((near.cos(), near.sin())).float().to(device)
        self._far = (torch.stack((far.cos(), far.sin())) * factor).float().to(device)
        self._passing = passing

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Angles of positions [T]."""
        cos_near, sin_near = self._near.index_select(1, positions % _NEAR).unbind()
        cos_far, sin_far = self._far.index_select(1, positions // _NEAR).unbind()
        cos = F.pad(cos_far * cos_near - sin_far * sin_near, (0, self._passing), value=1.0)
        sin = F.pad(sin_far * cos_near + cos_far * sin_near, (0, self._passing))
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
