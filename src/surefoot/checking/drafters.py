"""Drafters that make sure that verification is put to the test on any model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from surefoot.checking.cases import TEST_DRAFTERS
from surefoot.draft.drafter import CommittedRow, DraftRow
from surefoot.ids import RequestId
from surefoot.state.ledger import Work


class ReplayDrafter:
    """Knows what the plain run brought, proposes it, and spoils some of the tokens.

    Past the end of what it knows it goes on with the last token, so that a request may end within
    an accepted run.
    """

    def __init__(self, name: str, vocab_size: int, seed: int) -> None:
        """Draft as `name`, a key of TEST_DRAFTERS, says; `seed` decides which tokens are spoilt."""
        self.name = name
        self._vocab_size = vocab_size
        self._rate = TEST_DRAFTERS[name]
        self._rng = random.Random(f"{seed}/{name}")
        self._known: dict[RequestId, list[int]] = {}

    def know(self, request: RequestId, tokens: Sequence[int]) -> None:
        """Learn prompt and plain output of a request before it runs."""
        self._known[request] = list(tokens)

    def prepare(self, work: Work) -> None:
        """No tensors to prepare."""

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See Drafter."""
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow) -> list[int]:
        known, begin = self._known[row.request.id], len(row.request.tokens)
        coming = known[begin : begin + row.limit]
        coming += known[-1:] * (row.limit - len(coming))
        return [self._spoilt(token) for token in coming]

    def _spoilt(self, token: int) -> int:
        if self._rng.random() >= self._rate:
            return token
        return (token + self._rng.randrange(1, self._vocab_size)) % self._vocab_size

    def observe(self, rows: Sequence[CommittedRow], hidden: Tensor) -> None:
        """Nothing to follow."""

    def forget(self, request: RequestId) -> None:
        """What is known stays true when the request is pre-empted."""
