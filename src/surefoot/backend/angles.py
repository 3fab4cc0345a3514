"""Rotary angles by the framework's own operators, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rotary_angles(
    frequencies: Tensor, factor: float, passing: int, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """See Backend.pack_angles."""
    angles = positions.double()[:, None] * frequencies.to(positions.device)
    cos = F.pad(angles.cos() * factor, (0, passing), value=1.0)
    sin = F.pad(angles.sin() * factor, (0, passing))
    both = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return both[0].float()[:, None], both[1].float()[:, None]
