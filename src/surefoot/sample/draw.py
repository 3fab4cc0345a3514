"""Draws tokens: in each row the one whose score and noise together are the highest.

Noise for a whole vocabulary is dear. A bound of it is cheap, and leaves a few tokens that can win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.sample.noise import NoiseField, gumbel_at
from surefoot.sample.order import BLOCK, Blocks, argmax_rows, padded
from surefoot.sample.processors import RowContext, truncate

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


def draw(scores: Tensor, rows: Sequence[RowContext]) -> list[int]:
    """The winners, the lowest id among equals.

    Args:
        scores: [R, V] float32, tempered, the best score of each row 0.
        rows: the R rows' contexts.
    """
    scores = padded(scores)
    field = NoiseField(scores.shape[1], scores.device)
    cut = {at: truncate(Blocks.of(scores[at]), row.params) for at, row in _cut(rows)}
    kept = {at: ids for at, ids in cut.items() if ids is not None}
    whole = [at for at in range(len(rows)) if at not in kept]
    candidates = screen(scores, rows, whole, field, _SCREENED_PEAKS)
    return winners(scores, rows, _joined(candidates, kept), field)


def with_noise(tempered: Tensor, row: RowContext, cut: bool) -> Tensor:
    """The totals of one row [V], written out in full; if `cut`, -inf where `truncate` cuts."""
    totals = tempered + NoiseField(len(tempered), tempered.device).gumbel(row.seed, row.position)
    kept = truncate(Blocks.of(tempered), row.params) if cut else None
    if kept is None:
        return totals
    return torch.full_like(totals, -torch.inf).index_copy_(0, kept, totals[kept])


def screen(
    scores: Tensor, rows: Sequence[RowContext], at: list[int], field: NoiseField, peaks: int
) -> Candidates:
    """The few tokens with the highest ceilings of the rows `at`, among scores [R, V].

    A ceiling is score + bound of the noise. Float32 addition is monotone, so no total exceeds its
    ceiling, not even by rounding.
    """
    rest = scores.new_full((len(scores),), -torch.inf)
    if not at:
        nobody = torch.empty(0, dtype=torch.int64, device=scores.device)
        return Candidates(nobody, nobody, rest)
    seeds, positions = [rows[index].seed for index in at], [rows[index].position for index in at]
    some = scores if len(at) == len(scores) else scores[at]
    ceilings = field.bound(seeds, positions).add_(some).view(len(at), -1, BLOCK)
    tops = ceilings.amax(2)
    many = tops.shape[1] >= peaks
    limits = tops.topk(peaks).values[:, -1] if many else tops.new_full((len(at),), -torch.inf)
    row, block = (tops >= limits[:, None]).nonzero(as_tuple=True)
    place, within = (ceilings[row, block] >= limits[row][:, None]).nonzero(as_tuple=True)
    owners = torch.tensor(at, device=scores.device)
    rest[owners] = limits
    return Candidates(owners[row[place]], block[place] * BLOCK + within, rest)


def winners(
    scores: Tensor, rows: Sequence[RowContext], candidates: Candidates, field: NoiseField
) -> list[int]:
    """The winner of each row; all tokens are asked where the candidates may not hold it."""
    owners, ids = candidates.owners, candidates.ids
    seeds, positions = [row.seed for row in rows], [row.position for row in rows]
    totals = scores[owners, ids] + gumbel_at(seeds, positions, owners, ids)
    best = torch.full_like(candidates.rest, -torch.inf)
    best = best.scatter_reduce(0, owners, totals, "amax")
    losers = totals < best[owners]
    first = ids.new_full((len(rows),), scores.shape[1])
    first = first.scatter_reduce(0, owners, ids.masked_fill(losers, scores.shape[1]), "amin")
    tokens: list[int] = first.tolist()
    for at in (best < candidates.rest).nonzero()[:, 0].tolist():
        every = field.gumbel(seeds[at], positions[at]).add_(scores[at])
        tokens[at] = int(argmax_rows(every[None]))
    return tokens


def _cut(rows: Sequence[RowContext]) -> list[tuple[int, RowContext]]:
    """Rows that may not take any token."""
    return [
        (at, row)
        for at, row in enumerate(rows)
        if row.params.top_k > 0 or row.params.top_p < 1 or row.params.min_p > 0
    ]


def _joined(candidates: Candidates, kept: dict[int, Tensor]) -> Candidates:
    """Candidates, and the tokens that truncation left to other rows."""
    if not kept:
        return candidates
    owners = [torch.full_like(ids, at) for at, ids in kept.items()]
    return Candidates(
        torch.cat([candidates.owners, *owners]),
        torch.cat([candidates.ids, *kept.values()]),
        candidates.rest,
    )
