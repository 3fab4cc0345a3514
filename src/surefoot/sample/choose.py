"""Which token comes next: a pure function of logits, params, history, seed and position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.errors import NumericalError
from surefoot.sample.draw import draw, with_noise
from surefoot.sample.order import argmax_rows
from surefoot.sample.processors import RowContext, process, temper

UNCHOSEN = -1
"""Stands for the token of a row whose logits are not numbers; equals no draft."""

_SCORES_AT_ONCE = 1 << 18  # that stay in cache


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
    step = max(1, _SCORES_AT_ONCE // logits.shape[1])
    for begin in range(0, len(others), step):
        some = others[begin : begin + step]
        found = _choose(_rows(logits, some), [rows[at] for at in some])
        for at, token in zip(some, found, strict=True):
            tokens[at] = token
    return tokens


def _choose(logits: Tensor, rows: Sequence[RowContext]) -> list[int]:
    """One token for each row of logits [n, V]."""
    processed, peaks = _processed(logits, rows)
    good = peaks.isfinite().tolist()
    tokens = [UNCHOSEN] * len(rows)
    greedy = [at for at, row in enumerate(rows) if good[at] and row.params.greedy]
    for at, token in zip(greedy, _best(processed, greedy), strict=True):
        tokens[at] = token
    sampled = [at for at, row in enumerate(rows) if good[at] and not row.params.greedy]
    for at, token in zip(sampled, _drawn(processed, peaks, rows, sampled), strict=True):
        tokens[at] = token
    return tokens


def _drawn(
    processed: Tensor, peaks: Tensor, rows: Sequence[RowContext], at: list[int]
) -> list[int]:
    """The tokens of the sampled rows."""
    if not at:
        return []
    some, tops = _rows(processed, at), _rows(peaks, at)
    sampled = [rows[index] for index in at]
    return draw(temper(some, tops, [row.params.temperature for row in sampled]), sampled)


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
    processed, peaks = _processed(logits, rows)
    result = torch.full_like(logits, torch.nan)
    for at in peaks.isfinite().nonzero()[:, 0].tolist():
        row, some = rows[at], processed[at : at + 1]
        if not row.params.greedy:
            some = temper(some, peaks[at : at + 1], [row.params.temperature])
            some = with_noise(some[0], row, cut)[None]
        result[at] = some[0]
    return result


def _plain_greedy(logits: Tensor, at: list[int]) -> list[int]:
    """One call for all greedy rows without processors, usually most of a step."""
    if not at:
        return []
    some = _rows(logits, at)
    best = argmax_rows(some)
    good = some.gather(1, best[:, None])[:, 0].isfinite()
    return torch.where(good, best, UNCHOSEN).tolist()


def _best(processed: Tensor, at: list[int]) -> list[int]:
    return argmax_rows(_rows(processed, at)).tolist() if at else []


def _processed(logits: Tensor, rows: Sequence[RowContext]) -> tuple[Tensor, Tensor]:
    """Processed logits [n, V] and their peaks [n], which are not finite for unfit rows."""
    peaks = logits.amax(1)
    if all(row.untouched for row in rows):
        return logits, peaks
    processed = torch.stack([process(some, row) for some, row in zip(logits, rows, strict=True)])
    return processed, torch.where(peaks.isfinite(), processed.amax(1), peaks)


def _rows(x: Tensor, at: list[int]) -> Tensor:
    """Rows of x, without a copy if they are all."""
    return x if len(at) == len(x) else x[at]
