"""Which token comes next: a pure function of logits, params, history, seed and position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.errors import NumericalError
from surefoot.sample.noise import NoiseField, gumbel_at
from surefoot.sample.order import BLOCK, Blocks, argmax_rows
from surefoot.sample.processors import RowContext, process, temper, truncate

UNCHOSEN = -1
"""Stands for the token of a row whose logits are not numbers; equals no draft."""

_SCREENED_PEAKS = 4


@dataclass(frozen=True, slots=True)
class _Contest:
    """A sampled row, narrowed down to the tokens that may win it.

    Attributes:
        row: its context.
        tempered: its scores before noise.
        ids: [n] int64, the tokens that may win.
        rest: the totals of all other tokens lie below this.
    """

    row: RowContext
    tempered: Blocks
    ids: Tensor
    rest: float


def choose(logits: Tensor, rows: Sequence[RowContext]) -> list[int]:
    """Choose one token per row: the best processed score, the lowest id among equals.

    Args:
        logits: [R, V] float32, the model's own; not written to.
        rows: the R rows' contexts.

    Returns:
        R token ids.

    Raises:
        NumericalError: a row holds NaN or +inf, or no token that may be chosen is above -inf.
    """
    tokens = try_choose(logits, rows)
    if UNCHOSEN in tokens:
        bad = [index for index, token in enumerate(tokens) if token == UNCHOSEN]
        raise NumericalError(
            f"logits must be numbers, at least one of them finite; rows {bad} are not. "
            "The weights may be damaged, or the dtype too narrow for this model"
        )
    return tokens


def try_choose(logits: Tensor, rows: Sequence[RowContext]) -> list[int]:
    """Like `choose`, with UNCHOSEN instead of an error.

    A row behind a wrong draft may hold anything. Only if the walk gets to an unchosen token does
    its request fail, exactly as it would without drafts; the other rows never notice.
    """
    assert logits.dtype == torch.float32, f"logits must be float32, not {logits.dtype}"
    assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits, {len(rows)} contexts"
    tokens = [UNCHOSEN] * len(rows)
    plain = [at for at, row in enumerate(rows) if row.params.greedy and row.untouched]
    for at, token in zip(plain, _plain_greedy(logits, plain), strict=True):
        tokens[at] = token
    others = sorted(set(range(len(rows))).difference(plain))
    if not others:
        return tokens
    field = NoiseField(-(-logits.shape[1] // BLOCK) * BLOCK, logits.device)
    contests: dict[int, _Contest] = {}
    for at in others:
        found = _processed(logits[at], rows[at])
        if found is not None and rows[at].params.greedy:
            tokens[at] = Blocks.of(found[0]).first()
        elif found is not None:
            contests[at] = _contest(*found, rows[at], field)
    for at, token in zip(contests, _decide(list(contests.values()), field), strict=True):
        tokens[at] = token
    return tokens


def scores(logits: Tensor, rows: Sequence[RowContext], *, cut: bool = True) -> Tensor:
    """The scores whose best `choose` takes, written out in full; slow, for analysis.

    Greedy rows: processed logits. Others: (processed - their peak) / temperature + noise, so
    differences between tokens are those of logits / temperature + noise.

    Args:
        logits: [R, V] float32.
        rows: the R rows' contexts.
        cut: whether tokens outside top_k, top_p or min_p are at -inf.

    Returns:
        [R, V] float32; -inf at masked tokens, NaN throughout a row that cannot be chosen from.
    """
    result = torch.full_like(logits, torch.nan)
    field = NoiseField(logits.shape[1], logits.device)
    for at, row in enumerate(rows):
        found = _processed(logits[at], row)
        if found is not None:
            result[at] = found[0] if row.params.greedy else _noisy(*found, row, field, cut)
    return result


def _plain_greedy(logits: Tensor, at: list[int]) -> list[int]:
    """One call for all greedy rows without processors, usually most of a step."""
    if not at:
        return []
    some = logits if len(at) == len(logits) else logits[at]
    best = argmax_rows(some)
    good = some.gather(1, best[:, None])[:, 0].isfinite()
    return torch.where(good, best, UNCHOSEN).tolist()


def _processed(logits: Tensor, row: RowContext) -> tuple[Tensor, float] | None:
    """Processed logits and their peak, or None if the row cannot be chosen from."""
    peak = float(logits.amax())
    if row.untouched or not math.isfinite(peak):
        return (logits, peak) if math.isfinite(peak) else None
    processed = process(logits, row)
    peak = float(processed.amax())
    return (processed, peak) if math.isfinite(peak) else None


def _contest(processed: Tensor, peak: float, row: RowContext, field: NoiseField) -> _Contest:
    tempered = Blocks.of(temper(processed, peak, row.params.temperature))
    kept = truncate(tempered, row.params)
    if kept is not None:
        return _Contest(row, tempered, kept, -math.inf)
    return _Contest(row, tempered, *_screen(tempered, row, field, _SCREENED_PEAKS))


def _screen(
    tempered: Blocks, row: RowContext, field: NoiseField, peaks: int
) -> tuple[Tensor, float]:
    """The few tokens with the highest ceilings, and a limit that the others' totals lie below.

    A ceiling is score + bound of the noise. Float32 addition is monotone, so no total exceeds its
    ceiling, not even by rounding.
    """
    bound = field.bound(row.seed, row.position)
    ceilings = Blocks.of(bound.add_(tempered.values.view(-1)))
    rest = ceilings.peak(peaks)
    return ceilings.at_least(rest), rest


def _decide(contests: list[_Contest], field: NoiseField) -> list[int]:
    """The winner of each contest; the noise of all their tokens is made in one go."""
    if not contests:
        return []
    noise = gumbel_at(
        [contest.row.seed for contest in contests],
        [contest.row.position for contest in contests],
        [contest.ids for contest in contests],
    )
    return [_winner(contest, some, field) for contest, some in zip(contests, noise, strict=True)]


def _winner(contest: _Contest, noise: Tensor, field: NoiseField) -> int:
    totals = contest.tempered.take(contest.ids) + noise
    best = totals.amax()
    if float(best) >= contest.rest:
        return int(contest.ids[totals == best].amin())
    row = contest.row
    every = field.gumbel(row.seed, row.position).add_(contest.tempered.values.view(-1))
    return Blocks.of(every).first()


def _noisy(processed: Tensor, peak: float, row: RowContext, field: NoiseField, cut: bool) -> Tensor:
    tempered = temper(processed, peak, row.params.temperature)
    totals = tempered + field.gumbel(row.seed, row.position)
    kept = truncate(Blocks.of(tempered), row.params) if cut else None
    if kept is None:
        return totals
    return torch.full_like(totals, -torch.inf).index_copy_(0, kept, totals[kept])
