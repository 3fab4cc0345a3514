"""Chooses tokens without asking the host: noise for the whole vocabulary, then the best."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.backend.noise import NoiseField, NoiseKey
from surefoot.backend.order import argmax_rows, temper
from surefoot.backend.protocol import UNCHOSEN


def choose(scores: Tensor, temperatures: Sequence[float], keys: Sequence[NoiseKey]) -> Tensor:
    """See Backend.choose."""
    if not keys:
        return torch.empty(0, dtype=torch.long, device=scores.device)
    peaks = scores.amax(1)
    totals = scores
    if any(temperatures):
        field = NoiseField(scores.shape[1], scores.device)
        noise = torch.stack([field.gumbel(key) for key in keys])
        drawn = temper(scores, peaks, [warmth or 1.0 for warmth in temperatures]) + noise
        warm = torch.tensor([warmth > 0 for warmth in temperatures], device=scores.device)
        totals = torch.where(warm[:, None], drawn, scores)
    return torch.where(peaks.isfinite(), argmax_rows(totals), UNCHOSEN)
