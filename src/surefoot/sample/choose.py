"""Which token comes next: a pure function of logits, params, history, seed and position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.backend.noise import gumbel, noise_key
from surefoot.backend.order import Blocks, argmax_rows
from surefoot.backend.protocol import Backend
from surefoot.errors import NumericalError
from surefoot.sample.processors import RowContext, process, temper, truncate

UNCHOSEN = -1
"""Stands for the token of a row whose logits are not numbers; equals no draft."""


def choose(logits: Tensor, rows: Sequence[RowContext], backend: Backend) -> list[int]:
    """Choose one token per row: the best processed score, the lowest id among equals.

    Args:
        logits: [R, V] float32, the model's own; not written to.
        rows: the R rows' contexts.
        backend: draws.

    Returns:
        R token ids.

    Raises:
        NumericalError: a row holds NaN or +inf, or no token that may be chosen is above -inf.
    """
    tokens = try_choose(logits, rows, backend)
    if UNCHOSEN in tokens:
        bad = [index for index, token in enumerate(tokens) if token == UNCHOSEN]
        raise NumericalError(
            f"logits must be numbers, at least one of them finite; rows {bad} are not. "
            "The weights may be damaged, or the dtype too narrow for this model"
        )
    return tokens


def try_choose(logits: Tensor, rows: Sequence[RowContext], backend: Backend) -> list[int]:
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
    contexts = [rows[at] for at in others]
    processed, peaks = _processed(_rows(logits, others), contexts)
    good = peaks.isfinite().tolist()
    greedy = [i for i, row in enumerate(contexts) if good[i] and row.params.greedy]
    for i, token in zip(greedy, _best(processed, greedy), strict=True):
        tokens[others[i]] = token
    sampled = [i for i, row in enumerate(contexts) if good[i] and not row.params.greedy]
    if sampled:
        some = [contexts[i] for i in sampled]
        tempered = _tempered(_rows(processed, sampled), _rows(peaks, sampled), some)
        keys = [noise_key(row.seed, row.position) for row in some]
        for i, token in zip(sampled, backend.draw(tempered, keys), strict=True):
            tokens[others[i]] = token
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
    processed, peaks = _processed(logits, rows)
    result = torch.full_like(logits, torch.nan)
    for at in peaks.isfinite().nonzero()[:, 0].tolist():
        row, here = rows[at], slice(at, at + 1)
        result[at] = processed[at]
        if not row.params.greedy:
            tempered = _tempered(processed[here], peaks[here], [row], cut=cut)
            noise = gumbel([row.seed], [row.position], logits.shape[1], logits.device)
            result[at] = (tempered + noise)[0]
    return result


def _tempered(
    processed: Tensor, peaks: Tensor, rows: Sequence[RowContext], *, cut: bool = True
) -> Tensor:
    """Scores [n, V] before noise; -inf at tokens that top_k, top_p or min_p cut."""
    tempered = temper(processed, peaks, [row.params.temperature for row in rows])
    for scores, row in zip(tempered, rows, strict=True):
        kept = truncate(Blocks.of(scores), row.params) if cut and row.params.cuts else None
        if kept is not None:
            some = scores[kept]
            scores.fill_(-torch.inf).index_copy_(0, kept, some)
    return tempered


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
