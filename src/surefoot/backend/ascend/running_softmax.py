"""Attention over keys that come a block at a time, in float32.

Every block has the same width for all tokens, so the sums are cut alike wherever a step was cut:
what cannot be seen counts as zero, and a block of which nothing can be seen changes no bit.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RunningSoftmax:
    """Queries [..., M, D], and the weighted sum of what they have seen so far."""

    def __init__(self, q: Tensor, peak: Tensor, size: int) -> None:
        """Begin with one key whose value is zero.

        Args:
            q: [..., M, D] float32, times the scale.
            peak: [..., M], the score of that key; -inf where there is none, and then each query
                must see something in the first block.
            size: numbers of a value.
        """
        self._q, self._peak = q, peak
        self._total = torch.ones_like(peak)
        self._sum = torch.zeros(*peak.shape, size, dtype=q.dtype, device=q.device)

    def see(self, keys: Tensor, values: Tensor, seen: Tensor) -> None:
        """Take in keys and values [..., N, D] float32 where `seen` [..., N]; zeros elsewhere."""
        scores = (self._q @ keys.mT).masked_fill(~seen[..., None, :], -torch.inf)
        peak = torch.maximum(self._peak, scores.amax(-1))
        fade, weights = torch.exp(self._peak - peak), torch.exp(scores - peak[..., None])
        self._total = self._total * fade + weights.sum(-1)
        self._sum = self._sum * fade[..., None] + weights @ values
        self._peak = peak

    @property
    def mixed(self) -> Tensor:
        """The weighted mean of all values, [..., M, D]."""
        return self._sum / self._total[..., None]
