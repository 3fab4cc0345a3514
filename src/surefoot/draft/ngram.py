"""n-gram drafting (prompt lookup): what followed the last time these tokens stood here?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from surefoot.draft.drafter import CommittedRow, DraftRow
from surefoot.ids import RequestId
from surefoot.state.ledger import Work

LONGEST = 5
SHORTEST = 2


class NgramIndex:
    """Where each n-gram of one request ended last, for n = SHORTEST..LONGEST."""

    def __init__(self, longest: int, shortest: int) -> None:
        """Start empty; match suffixes of `longest` down to `shortest` tokens."""
        self._sizes = range(longest, shortest - 1, -1)
        self._last: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that have a follower: those ending before the last token."""
        for end in range(max(self._indexed, 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._last[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens))

    def lookup(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that followed the longest known suffix of `tokens`.

        When the match reaches the end of what is known, as in a loop, it goes on from the draft
        itself.
        """
        for size in self._sizes:
            if size > len(tokens):
                continue
            start = self._last.get(tuple(tokens[len(tokens) - size :]))
            if start is not None:
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(count)]
        return []


class NgramDrafter:
    """Looks the last tokens up in the request's own prompt and output. Needs no weights."""

    name = "ngram"

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        """Match suffixes of `longest` tokens first, down to `shortest`."""
        self._longest, self._shortest = longest, shortest
        self._indexes: dict[RequestId, NgramIndex] = {}

    def prepare(self, work: Work) -> None:
        """No tensors to prepare."""

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See Drafter."""
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow) -> list[int]:
        index = self._indexes.get(row.request.id)
        if index is None:
            index = self._indexes[row.request.id] = NgramIndex(self._longest, self._shortest)
        index.extend(row.request.tokens)
        return index.lookup(row.request.tokens, row.limit)

    def observe(self, rows: Sequence[CommittedRow], hidden: Tensor) -> None:
        """Nothing to do: tokens are indexed when a draft is asked for."""

    def forget(self, request: RequestId) -> None:
        """Drop the request's index."""
        self._indexes.pop(request, None)
