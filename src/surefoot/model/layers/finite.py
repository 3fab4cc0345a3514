"""Keeps what a draft may bring and is not a number out of caches."""

from __future__ import annotations

from torch import Tensor


def finite_drafts(entries: Tensor, tentative: Tensor) -> Tensor:
    """Put 0 in place of NaN and infinities in the entries of drafted tokens, in place.

    Attention multiplies what it masks by zero, and only finite values vanish: a drafted token with
    damaged weights would spoil the tokens before it. The token itself still fails, as its stream
    of hidden states does not go through here. Known tokens are left alone: nothing is computed
    behind them that should not meet their damage.

    Args:
        entries: [T, ...], written to.
        tentative: [n] indices of the drafted tokens, often none.
    """
    if len(tentative) == 0:
        return entries
    cleaned = entries.index_select(0, tentative).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return entries.index_copy_(0, tentative, cleaned)
