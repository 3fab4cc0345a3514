"""Scores of tokens, and their total order: higher score first, then lower id.

Library sorts and arg-max calls over a whole vocabulary are slow, and top-k leaves ties open. Here
scores are laid out in blocks; the best of each block tells which few blocks need a closer look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class Blocks:
    """One row's scores, cut into blocks.

    Attributes:
        values: [B, 64] float32; token id t is at (t // 64, t % 64); padded with -inf.
        peaks: [B], the best score of each block.
        size: the number of token ids, V.
    """

    values: Tensor
    peaks: Tensor
    size: int

    @classmethod
    def of(cls, scores: Tensor) -> Blocks:
        """Cut [V] float32 scores; they are shared where V is a multiple of 64, else copied."""
        values = padded(scores).view(-1, BLOCK)
        return cls(values, values.amax(1), scores.shape[0])

    def take(self, ids: Tensor) -> Tensor:
        """The scores of [n] token ids."""
        return self.values.view(-1)[ids]

    def first(self) -> int:
        """The token id that comes first in the total order."""
        block = int(self.peaks.argmax())
        return block * BLOCK + int(self.values[block].argmax())

    def peak(self, count: int) -> float:
        """The best score of the block that comes `count`-th, -inf if there are fewer blocks."""
        if count > self.peaks.shape[0]:
            return -torch.inf
        return float(self.peaks.topk(count).values[-1])

    def at_least(self, bound: float) -> Tensor:
        """Ids with score >= bound, ascending, [n] int64; tokens at -inf never belong."""
        bound = max(bound, _LOWEST)
        blocks = (self.peaks >= bound).nonzero()[:, 0]
        within = (self.values.index_select(0, blocks) >= bound).nonzero()
        return blocks[within[:, 0]] * BLOCK + within[:, 1]

    def ranked(self, bound: float) -> Tensor:
        """Ids with score >= bound in the total order, [n] int64; never tokens at -inf."""
        ids = self.at_least(bound)
        return ids[self.take(ids).argsort(descending=True, stable=True)]

    def best(self, count: int) -> Tensor:
        """The first `count` ids of the total order, fewer if others are at -inf; [n] int64."""
        if count >= self.size:
            return self.ranked(_LOWEST)[:count]
        # `count` peaks are `count` scores: nothing below the last of them is needed.
        pool = self.peaks if count <= self.peaks.shape[0] else self.values.view(-1)
        return self.ranked(float(pool.topk(count).values[-1]))[:count]


def argmax_rows(scores: Tensor) -> Tensor:
    """For each row the id with the best score, the lowest among equals; NaN counts as best.

    Args:
        scores: [R, V] float32.

    Returns:
        [R] int64.
    """
    values = padded(scores).view(scores.shape[0], -1, BLOCK)
    block = values.amax(-1).argmax(-1)
    rows = torch.arange(scores.shape[0], device=scores.device)
    return block * BLOCK + values[rows, block].argmax(-1)


def temper(scores: Tensor, peaks: Tensor, temperatures: Sequence[float]) -> Tensor:
    """(score - peak) / temperature, so that the best score of each row is 0.

    Taking the peak away changes no choice, and keeps tiny temperatures from overflowing.

    Args:
        scores: [R, V] float32.
        peaks: [R], the largest value of each row, finite.
        temperatures: R numbers, at least LEAST_TEMPERATURE.
    """
    divisors = torch.tensor(temperatures, dtype=scores.dtype, device=scores.device)
    return torch.sub(scores, peaks[:, None]).div_(divisors[:, None])


def padded(scores: Tensor) -> Tensor:
    """Scores [..., V] filled with -inf up to whole blocks."""
    missing = -scores.shape[-1] % BLOCK
    if missing == 0:
        return scores
    padding = scores.new_full((*scores.shape[:-1], missing), -torch.inf)
    return torch.cat([scores, padding], dim=-1)
