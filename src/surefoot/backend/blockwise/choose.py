"""Chooses tokens: in each row the one whose score and noise together are the highest.

Noise for a whole vocabulary is dear. A bound of it is cheap, and leaves a few tokens that can win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.noise import NoiseField, NoiseKey, gumbel_at
from surefoot.backend.order import BLOCK, argmax_rows, padded, temper
from surefoot.backend.protocol import UNCHOSEN

_SCORES_AT_ONCE = 1 << 18  # that stay in cache
_SCREENED_PEAKS = 4


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may win their rows.

    Attributes:
        owners: [n] int64, the row that each is of.
        ids: [n] int64 token ids.
        rest: [R] float32, the totals of all other tokens of a row lie below.
    """

    owners: Tensor
    ids: Tensor
    rest: Tensor


def choose(scores: Tensor, temperatures: Sequence[float], keys: Sequence[NoiseKey]) -> Tensor:
    """See Backend.choose."""
    scores = padded(scores)
    peaks = scores.amax(1)
    good = peaks.isfinite().tolist()
    tokens = [UNCHOSEN] * len(keys)
    greedy = [at for at, warmth in enumerate(temperatures) if good[at] and warmth == 0]
    if greedy:
        for at, token in zip(greedy, argmax_rows(scores[greedy]).tolist(), strict=True):
            tokens[at] = token
    drawn = [at for at, warmth in enumerate(temperatures) if good[at] and warmth != 0]
    field = NoiseField(scores.shape[1], scores.device)
    step = max(1, _SCORES_AT_ONCE // scores.shape[1])
    for begin in range(0, len(drawn), step):
        some = drawn[begin : begin + step]
        theirs = [keys[at] for at in some]
        tempered = temper(scores[some], peaks[some], [temperatures[at] for at in some])
        candidates = screen(tempered, theirs, field, _SCREENED_PEAKS)
        for at, token in zip(some, winners(tempered, theirs, candidates, field), strict=True):
            tokens[at] = token
    return torch.tensor(tokens, dtype=torch.long, device=scores.device)


def screen(scores: Tensor, keys: Sequence[NoiseKey], field: NoiseField, peaks: int) -> Candidates:
    """The few tokens with the highest ceilings of each row of scores [R, V].

    A ceiling is score + bound of the noise. Float32 addition is monotone, so no total exceeds its
    ceiling, not even by rounding.
    """
    ceilings = field.bound(keys).add_(scores).view(len(keys), -1, BLOCK)
    tops = ceilings.amax(2)
    many = tops.shape[1] >= peaks
    rest = tops.topk(peaks).values[:, -1] if many else tops.new_full((len(keys),), -torch.inf)
    row, block = (tops >= rest[:, None]).nonzero(as_tuple=True)
    place, within = (ceilings[row, block] >= rest[row][:, None]).nonzero(as_tuple=True)
    return Candidates(row[place], block[place] * BLOCK + within, rest)


def winners(
    scores: Tensor, keys: Sequence[NoiseKey], candidates: Candidates, field: NoiseField
) -> list[int]:
    """The winner of each row; all tokens are asked where the candidates may not hold it."""
    owners, ids = candidates.owners, candidates.ids
    totals = scores[owners, ids] + gumbel_at(keys, owners, ids)
    best = torch.full_like(candidates.rest, -torch.inf)
    best = best.scatter_reduce(0, owners, totals, "amax")
    losers = totals < best[owners]
    first = ids.new_full((len(keys),), scores.shape[1])
    first = first.scatter_reduce(0, owners, ids.masked_fill(losers, scores.shape[1]), "amin")
    tokens: list[int] = first.tolist()
    for at in (best < candidates.rest).nonzero()[:, 0].tolist():
        every = field.gumbel(keys[at]).add_(scores[at])
        tokens[at] = int(argmax_rows(every[None]))
    return tokens
