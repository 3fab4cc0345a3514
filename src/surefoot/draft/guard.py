"""Keeps a faulty drafter from doing more harm than costing speed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from surefoot.draft.drafter import CommittedRow, Drafter, DraftRow
from surefoot.draft.guesses import Guessed
from surefoot.ids import RequestId
from surefoot.state.ledger import Lease, Work

log = logging.getLogger(__name__)

MAX_FAILURES = 8
FORGIVEN_AFTER = 64
"""Calls that went well and make up for one failure."""


class GuardedDrafter:
    """Turns exceptions and rubbish of a drafter into "no draft".

    What a failed call has left half-way does not count: its rows start anew at the cursor. A
    drafter that keeps failing is not asked again: a warning says so once.

    Attributes:
        failures: how many there were so far.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        """Guard `drafter`; token ids must lie in [0, vocab_size)."""
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._undone: deque[Work] = deque()
        self.failures = 0
        self._unforgiven = 0
        self._good = 0

    @property
    def name(self) -> str:
        """The drafter's own name."""
        return self._drafter.name

    @property
    def disabled(self) -> bool:
        """Whether it failed so often that it is no longer asked."""
        return self._unforgiven >= MAX_FAILURES

    def prepare(self, work: Work) -> None:
        """See Drafter; what fails is done before the drafter is asked again, nothing twice."""
        if self.disabled:
            return
        self._undone.append(Work(work.clear_pages, []))
        self._undone.extend(Work([], [move]) for move in work.moves)
        self._try("prepare", self._prepare_undone)

    def _prepare_undone(self) -> None:
        while self._undone:
            self._drafter.prepare(self._undone[0])
            self._undone.popleft()

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int]]:
        """See Drafter; every draft that comes back is legal."""
        drafts: list[Sequence[int]] = []

        def call() -> None:
            drafts.extend(self._drafter.propose(rows))

        if rows and self._ask("propose", call):
            if len(drafts) == len(rows):
                return [self._legal(draft, row) for draft, row in zip(drafts, rows, strict=True)]
            self._fail("propose", f"{len(drafts)} drafts for {len(rows)} rows")
        # A cursor past the bonus token says that only guesses were left to write.
        _lose(row.lease for row in rows if row.lease.drafted <= row.lease.computed)
        return [[] for _ in rows]

    def observe(self, rows: Sequence[CommittedRow], hidden: Tensor) -> None:
        """See Drafter."""
        if rows and not self._ask("observe", lambda: self._drafter.observe(rows, hidden)):
            _lose(row.lease for row in rows)

    def forget(self, request: RequestId) -> None:
        """See Drafter."""
        self._try("forget", lambda: self._drafter.forget(request))

    def _ask(self, act: str, call: Callable[[], object]) -> bool:
        """Whether the call went through; none does before all is prepared."""
        return not self._undone and self._try(act, call)

    def _legal(self, draft: object, row: DraftRow) -> Sequence[int]:
        """The longest usable beginning of a draft; what was chosen on the device is in range."""
        if isinstance(draft, Guessed):
            return draft[: row.limit]
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
        self._good += 1
        if self._good % FORGIVEN_AFTER == 0:
            self._unforgiven = max(0, self._unforgiven - 1)
        return True

    def _fail(self, act: str, reason: str) -> None:
        self.failures += 1
        self._unforgiven += 1
        log.warning("drafter %s failed in %s: %s", self.name, act, reason)
        if self._unforgiven == MAX_FAILURES:
            log.warning("drafter %s failed %d times and is switched off", self.name, self.failures)


def _lose(leases: Iterable[Lease]) -> None:
    """Nobody knows what the drafter has of these."""
    for lease in leases:
        lease.undraft()
