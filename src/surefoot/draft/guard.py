"""Keeps a faulty drafter from doing more harm than costing speed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from surefoot.draft.drafter import CommittedRow, Drafter, DraftRow
from surefoot.ids import RequestId
from surefoot.state.ledger import Work

log = logging.getLogger(__name__)

MAX_FAILURES = 8


class GuardedDrafter:
    """Turns exceptions and rubbish of a drafter into "no draft".

    After MAX_FAILURES failures the drafter is not asked again: a warning says so once.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        """Guard `drafter`; token ids must lie in [0, vocab_size)."""
        self._drafter = drafter
        self._vocab_size = vocab_size
        self.failures = 0

    @property
    def name(self) -> str:
        """The drafter's own name."""
        return self._drafter.name

    @property
    def disabled(self) -> bool:
        """Whether it failed so often that it is no longer asked."""
        return self.failures >= MAX_FAILURES

    def prepare(self, work: Work) -> None:
        """See Drafter."""
        self._try("prepare", lambda: self._drafter.prepare(work))

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See Drafter; every draft that comes back is legal."""
        drafts: list[list[int]] = []
        if rows and self._try("propose", lambda: drafts.extend(self._drafter.propose(rows))):
            if len(drafts) == len(rows):
                return [self._legal(draft, row) for draft, row in zip(drafts, rows, strict=True)]
            self._fail("propose", f"{len(drafts)} drafts for {len(rows)} rows")
        return [[] for _ in rows]

    def observe(self, rows: Sequence[CommittedRow], hidden: Tensor) -> None:
        """See Drafter."""
        if rows:
            self._try("observe", lambda: self._drafter.observe(rows, hidden))

    def forget(self, request: RequestId) -> None:
        """See Drafter."""
        self._try("forget", lambda: self._drafter.forget(request))

    def _legal(self, draft: object, row: DraftRow) -> list[int]:
        """The longest usable beginning of a draft."""
        if not isinstance(draft, list):
            self._fail("propose", f"a draft of type {type(draft).__name__}")
            return []
        for place, token in enumerate(draft):
            if type(token) is not int or not 0 <= token < self._vocab_size:
                self._fail(
                    "propose", f"token {token!r} outside the vocabulary of {self._vocab_size}"
                )
                return draft[: min(place, row.limit)]
        return draft[: row.limit]

    def _try(self, act: str, call: Callable[[], object]) -> bool:
        """Whether the call went through; a drafter is foreign code, so any exception is caught."""
        if self.disabled:
            return False
        try:
            call()
        except Exception as error:
            self._fail(act, f"{type(error).__name__}: {error}")
            return False
        return True

    def _fail(self, act: str, reason: str) -> None:
        self.failures += 1
        log.warning("drafter %s failed in %s: %s", self.name, act, reason)
        if self.disabled:
            log.warning("drafter %s failed %d times and is switched off", self.name, self.failures)
