"""Which requests run in the next step, and how many tokens each. No tensors, no model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from surefoot.engine.rows import PlannedRow
from surefoot.request import FinishReason, Request, Status
from surefoot.state.ledger import Lease, Ledger

DepthPolicy = Callable[[Sequence[Request], int], list[int]]
"""(decoding requests, other tokens of the step) to the depth wanted for each."""


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of one step.

    Attributes:
        max_rows: requests.
        max_step_tokens: tokens, drafts included.
        prefill_chunk: known tokens of one request.
    """

    max_rows: int
    max_step_tokens: int
    prefill_chunk: int


class Scheduler:
    """First come, first served: running requests keep their order of arrival.

    When pages run out, the youngest running request is pre-empted: its committed pages go to the
    prefix cache, and it waits, first in line, to be resumed from there or recomputed. The oldest is
    never pre-empted, so something always advances.
    """

    def __init__(self, ledger: Ledger, limits: SchedulerLimits) -> None:
        """Schedule within `limits` on the pages and slots of `ledger`."""
        self._ledger = ledger
        self._limits = limits
        self._waiting: deque[Request] = deque()
        self._running: dict[Request, Lease] = {}
        self.on_leave: Callable[[Request], None] = _no_one_listens

    @property
    def waiting(self) -> int:
        """Requests that hold nothing yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold pages and a slot."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Put a new request at the end of the line."""
        self._waiting.append(request)

    def plan(self, depth: DepthPolicy) -> list[PlannedRow]:
        """Reserve capacity for the next step and say what it computes."""
        rows = self._plan_running()
        self._admit(rows)
        self._deepen(rows, depth)
        return rows

    def commit(self, row: PlannedRow, count: int) -> None:
        """Make the first `count` computed tokens of a row final."""
        self._ledger.commit(row.lease, count)

    def publish(self, row: PlannedRow) -> None:
        """Hand the row's full pages to the prefix cache."""
        self._ledger.publish(row.lease, row.request.tokens)

    def finish(self, request: Request, reason: FinishReason, publish: bool = True) -> None:
        """End a request, wherever it is, and give back what it holds.

        Its last pages go to the prefix cache if `publish` says so and it did not end by an error.
        """
        if request in self._running:
            self._leave(request, publish and reason is not FinishReason.ERROR)
        elif request.status is Status.WAITING:
            self._waiting.remove(request)
        request.status, request.finish_reason = Status.FINISHED, reason

    def retry(self, request: Request) -> None:
        """Release a running request without publishing anything and compute it anew."""
        self._leave(request, publish=False)
        self._requeue(request)

    def preempt(self, request: Request) -> None:
        """Release a running request; it goes on later from what the prefix cache kept."""
        self._leave(request, publish=True)
        self._requeue(request)
        request.preemptions += 1

    def preempt_all(self) -> None:
        """Pre-empt every running request, the youngest first so that the line keeps its order."""
        for request in reversed(list(self._running)):
            self.preempt(request)

    def _requeue(self, request: Request) -> None:
        request.status = Status.WAITING
        self._waiting.appendleft(request)

    def _leave(self, request: Request, publish: bool) -> None:
        self._ledger.release(self._running.pop(request), request.tokens, publish)
        self.on_leave(request)

    def _plan_running(self) -> list[PlannedRow]:
        """Rows of the running requests, oldest first; may pre-empt the youngest."""
        rows: list[PlannedRow] = []
        room = self._limits.max_step_tokens - len(self._running)
        for request in list(self._running):
            lease = self._running.get(request)
            if lease is None:
                break
            known = len(request.tokens) - lease.computed
            count = 1 if known == 1 else self._chunk(lease, known, room + 1)
            if not self._reserve(request, lease, count):
                break
            room -= count - 1
            rows.append(PlannedRow(request, lease, lease.computed, count, count == known))
        return rows

    def _chunk(self, lease: Lease, known: int, room: int) -> int:
        count = min(known, self._limits.prefill_chunk, room)
        return self._ledger.chunk(lease, count)

    def _reserve(self, request: Request, lease: Lease, count: int) -> bool:
        """Capacity for `count` tokens, pre-empting younger requests as needed.

        Returns:
            False if the request itself had to be pre-empted.
        """
        while not self._ledger.reserve(lease, count):
            youngest = next(reversed(self._running))
            self.preempt(youngest)
            if youngest is request:
                return False
        return True

    def _deepen(self, rows: Sequence[PlannedRow], depth: DepthPolicy) -> None:
        """Give decoding rows room for drafts, which never evict, pre-empt or delay anybody."""
        decoding = [
            row for row in rows if row.final and row.count == 1 and row.request.params.speculate
        ]
        if not decoding:
            return
        used = sum(row.count for row in rows)
        room = self._limits.max_step_tokens - used
        depths = depth([row.request for row in decoding], used - len(decoding))
        for row, wanted in zip(decoding, depths, strict=True):
            left = row.request.length_limit - len(row.request.tokens) - 1
            row.depth = self._fit(row.lease, min(wanted, room, left))
            room -= row.depth

    def _fit(self, lease: Lease, depth: int) -> int:
        """The greatest depth up to `depth` for which pages are free."""
        while depth > 0 and not self._ledger.reserve(lease, 1 + depth, evict=False):
            depth -= 1
        return max(depth, 0)

    def _admit(self, rows: list[PlannedRow]) -> None:
        """Start waiting requests in order while there is room for them."""
        room = self._limits.max_step_tokens - sum(row.count for row in rows)
        while self._waiting and len(self._running) < self._limits.max_rows and room > 0:
            row = self._start(self._waiting[0], room)
            if row is None:
                return
            self._waiting.popleft()
            self._running[row.request] = row.lease
            row.request.status = Status.RUNNING
            room -= row.count
            rows.append(row)

    def _start(self, request: Request, room: int) -> PlannedRow | None:
        """Admit one request with its first chunk, or leave everything as it was."""
        length = len(request.tokens)
        if not self._fits(length + 1):
            return None
        reuse = request.params.prompt_logprobs is None
        lease = self._ledger.admit(request.tokens, 1, reuse)
        if lease is None:
            return None
        known = length - lease.computed
        count = self._chunk(lease, known, room)
        if not self._ledger.reserve(lease, count):
            self._ledger.release(lease, request.tokens, publish=False)
            return None
        if request.preemptions == request.retries == 0:
            request.cached_tokens = lease.cached
        return PlannedRow(request, lease, lease.computed, count, count == known)

    def _fits(self, tokens: int) -> bool:
        """Whether the pages that are free or only cached could hold this many tokens."""
        ledger = self._ledger
        pages = -(-tokens // ledger.limits.page_tokens)
        return pages <= ledger.free_pages + ledger.cached_pages


def _no_one_listens(request: Request) -> None:
    """Stand in until somebody wants to know that a request gave its pages back."""
    del request
