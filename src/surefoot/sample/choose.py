"""Which token comes next: a pure function of logits, params, history, seed and position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.backend.noise import gumbel, noise_key
from surefoot.backend.order import Blocks, temper
from surefoot.backend.protocol import LEAST_TEMPERATURE, UNCHOSEN, Backend
from surefoot.errors import NumericalError
from surefoot.sample.processors import RowContext, process, truncate


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
    tokens = backend.read(try_choose(logits, rows, backend))
    if UNCHOSEN in tokens:
        bad = [index for index, token in enumerate(tokens) if token == UNCHOSEN]
        raise NumericalError(
            f"logits must be numbers, at least one of them finite; rows {bad} are not. "
            "The weights may be damaged, or the dtype too narrow for this model"
        )
    return tokens


def try_choose(logits: Tensor, rows: Sequence[RowContext], backend: Backend) -> Tensor:
    """Like `choose`, with UNCHOSEN instead of an error: [R] int64, on the device.

    A row behind a wrong draft may hold anything. Only if the walk gets to an unchosen token does
    its request fail, exactly as it would without drafts; the other rows never notice.
    """
    assert logits.dtype == torch.float32, f"logits must be float32, not {logits.dtype}"
    assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits, {len(rows)} contexts"
    if not rows:
        return torch.empty(0, dtype=torch.long, device=logits.device)
    params = [row.params for row in rows]
    temperatures = [0.0 if p.greedy else max(p.temperature, LEAST_TEMPERATURE) for p in params]
    keys = [
        noise_key(row.seed, row.position) if temperature else (0, 0)  # nothing is drawn at 0
        for row, temperature in zip(rows, temperatures, strict=True)
    ]
    if not all(row.untouched and not row.params.cuts for row in rows):
        some = zip(logits, rows, temperatures, strict=True)
        logits = torch.stack([_left(*each) for each in some])
    return backend.choose(logits, temperatures, keys)


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
    for at, row in enumerate(rows):
        temperature = 0.0 if row.params.greedy else max(row.params.temperature, LEAST_TEMPERATURE)
        left = _left(logits[at], row, temperature, cut=cut)
        if not left.amax().isfinite():
            continue
        if temperature:
            noise = gumbel([row.seed], [row.position], logits.shape[1], logits.device)
            left = (temper(left[None], left.amax()[None], [temperature]) + noise)[0]
        result[at] = left
    return result


def _left(logits: Tensor, row: RowContext, temperature: float, *, cut: bool = True) -> Tensor:
    """Processed logits [V] of a row, -inf at tokens that top_k, top_p or min_p cut.

    They are NaN where `logits` cannot be chosen from, whatever processing would hide.
    """
    processed = process(logits, row)
    if not (logits.amax().isfinite() and processed.amax().isfinite()):
        return torch.full_like(logits, torch.nan)
    if not (cut and temperature and row.params.cuts):
        return processed
    tempered = temper(processed[None], processed.amax()[None], [temperature])[0]
    kept = truncate(Blocks.of(tempered), row.params)
    if kept is None:
        return processed
    return torch.full_like(processed, -torch.inf).index_copy_(0, kept, processed[kept])
