"""Keeps what a draft may bring and is not a number out of caches."""

from __future__ import annotations

from torch import Tensor

from surefoot.backend.protocol import Backend


def finite_drafts(entries: Tensor, tentative: Tensor, backend: Backend) -> Tensor:
    """Put 0 in place of NaN and infinities in the entries of drafted tokens, in place.

    Attention multiplies what it masks by zero, and only finite values vanish: a drafted token with
    damaged weights would spoil the tokens before it. The token itself still fails, as its stream
    of hidden states does not go through here. Known tokens are left alone: nothing is computed
    behind them that should not meet their damage.

    Args:
        entries: [T, n], written to.
        tentative: [n] indices of the drafted tokens, often none.
        backend: computes.
    """
    if len(tentative):
        backend.clean(entries, tentative)
    return entries
