"""Verification: keep the draft while it equals what was chosen anyway."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.backend.protocol import UNCHOSEN


def accepted(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """How many leading drafts equal the chosen tokens.

    `chosen[i]` was chosen with drafts[:i] as history, so it is the right token as long as all
    earlier drafts were right; the first that differs is itself the right one. Where nothing could
    be chosen no draft is right.
    """
    count = 0
    while count < len(drafts) and drafts[count] == chosen[count] != UNCHOSEN:
        count += 1
    return count
