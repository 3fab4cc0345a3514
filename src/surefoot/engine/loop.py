"""One step of the engine. Read this first.

plan rows      who runs, how many tokens each; capacity is reserved, or somebody is pre-empted
draft          the drafter guesses a few tokens ahead for each decoding row
forward        one ragged pass over prompt chunks, decode rows and verify rows alike
choose         a token for each wanted position, a function of logits, params, seed and position
accept         drafts are kept while they equal the chosen tokens
stop           the run is cut at the earliest end token, stop string or limit
commit         the cursor moves; checkpoints of blocks that drafts completed are folded; the drafter
               follows; full pages go to the prefix cache
emit           results go out
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from surefoot.draft.depth import Depth, StepCost
from surefoot.draft.drafter import CommittedRow, Drafter, DraftRow
from surefoot.engine.accept import accepted
from surefoot.engine.output import TextStream, take_run
from surefoot.engine.rows import Emission, PlannedRow, RowResult
from surefoot.engine.runner import Runner, StepResult
from surefoot.engine.scheduler import Scheduler
from surefoot.request import FinishReason, Request
from surefoot.state.ledger import Ledger, Work

log = logging.getLogger(__name__)


class Loop:
    """Drives requests from prompt to last token, one step at a time."""

    def __init__(
        self, ledger: Ledger, scheduler: Scheduler, runner: Runner, drafter: Drafter, depth: Depth
    ) -> None:
        """Join the parts; `clock` only measures costs and may be replaced."""
        self._ledger, self._scheduler, self._runner = ledger, scheduler, runner
        self._drafter, self._depth = drafter, depth
        self._streams: dict[Request, TextStream] = {}
        self._undone: deque[Work] = deque()
        self.clock: Callable[[], float] = time.perf_counter
        scheduler.on_leave = self._forget

    def add(self, request: Request, stream: TextStream) -> None:
        """Take a request in; it starts when there is room."""
        self._streams[request] = stream
        self._scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request at once, wherever it is; ended ones are left alone."""
        if not request.finished:
            self._finish(request, FinishReason.ABORT)

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self._streams

    def step(self) -> list[Emission]:
        """One pass over all running requests."""
        begun = self.clock()
        rows = self._scheduler.plan(self._depth.limits)
        if not rows:
            return []
        try:
            result, draft_s = self._compute(rows)
        except Exception as error:
            log.exception("a step failed")
            return [emission for row in reversed(rows) for emission in self._recover(row, error)]
        emissions = [
            self._take(row, outcome) for row, outcome in zip(rows, result.rows, strict=True)
        ]
        try:
            self._runner.settle(rows)
        except Exception as error:
            log.exception("checkpoints could not follow a step")
            pairs = list(zip(rows, emissions, strict=True))
            for row, emission in reversed(pairs):
                emissions += self._give_up(row, emission.reason, error)
        else:
            if self._depth.follows:
                self._drafter.observe(_committed(rows), result.hidden)
            for emission, row in zip(emissions, rows, strict=True):
                self._publish(row, emission.reason)
            self._measure(rows, draft_s, self.clock() - begun - draft_s)
        return [emission for emission in emissions if emission.token_ids or emission.reason]

    def _compute(self, rows: Sequence[PlannedRow]) -> tuple[StepResult, float]:
        """Draft, run the model over known and drafted tokens, and choose; seconds of drafting."""
        self._prepare()
        begun = self.clock()
        if drafting := [row for row in rows if row.depth > 0]:
            self._draft(drafting)
        draft_s = self.clock() - begun
        return self._runner.run(rows), draft_s

    def _prepare(self) -> None:
        """Clear, save and restore slot rows as the ledger recorded.

        A resume point exists for the ledger as soon as its save is recorded. So what a failed step
        did not get to is done before the next forward, in order and nothing twice.
        """
        work = self._ledger.take_work()
        if work.clear_pages or work.moves:
            self._drafter.prepare(work)
            self._undone.append(Work(work.clear_pages, []))
            self._undone.extend(Work([], [move]) for move in work.moves)
        while self._undone:
            self._runner.prepare(self._undone[0])
            self._undone.popleft()

    def _draft(self, rows: Sequence[PlannedRow]) -> None:
        wanted = [DraftRow(row.request, row.lease, row.depth) for row in rows]
        for row, draft in zip(rows, self._drafter.propose(wanted), strict=True):
            row.drafts = draft

    def _take(self, row: PlannedRow, outcome: RowResult) -> Emission:
        """Accept, stop and commit one row; a bug that its text meets ends its request alone."""
        request, length = row.request, len(row.request.tokens)
        try:
            return self._accept(row, outcome)
        except Exception as error:
            log.exception("the output of request %d could not be made", request.id)
            del request.tokens[length:]
            request.error = f"{type(error).__name__}: {error}"
            return Emission(request, [], "", FinishReason.ERROR)

    def _accept(self, row: PlannedRow, outcome: RowResult) -> Emission:
        request = row.request
        request.prompt_logprobs.extend(outcome.prompt_logprobs)
        if not row.final:
            self._scheduler.commit(row, row.count)
            return Emission(request, [], "", None)
        right = accepted(row.drafts, outcome.chosen)
        run = outcome.chosen[: right + 1]
        taken = take_run(request, run, self._streams[request])
        kept = len(taken.tokens)
        request.logprobs.extend(outcome.logprobs[:kept])
        request.speculation.record(len(row.drafts), min(right, kept))
        if row.depth:
            self._depth.learn(request.id, len(row.drafts), right)
        self._scheduler.commit(row, row.count + max(kept, 1) - 1)
        return Emission(request, taken.tokens, taken.text, taken.reason)

    def _publish(self, row: PlannedRow, reason: FinishReason | None) -> None:
        """Publish what a row committed, or end its request."""
        if reason is None:
            self._scheduler.publish(row)
        else:
            self._finish(row.request, reason)

    def _give_up(
        self, row: PlannedRow, reason: FinishReason | None, error: Exception
    ) -> list[Emission]:
        """What was emitted is right, but of the row's caches nobody knows: publish nothing."""
        if reason is None:
            return self._recover(row, error)
        self._finish(row.request, reason, publish=False)
        return []

    def _recover(self, row: PlannedRow, error: Exception) -> list[Emission]:
        """After a failed step: compute the row anew once, then give its request up."""
        request = row.request
        if request.retries == 0:
            request.retries = 1
            self._scheduler.retry(request)
            return []
        request.error = f"{type(error).__name__}: {error}"
        self._finish(request, FinishReason.ERROR)
        return [Emission(request, [], "", FinishReason.ERROR)]

    def _finish(self, request: Request, reason: FinishReason, publish: bool = True) -> None:
        if reason is FinishReason.ERROR:
            log.error("request %d failed: %s", request.id, request.error)
        self._scheduler.finish(request, reason, publish)
        self._depth.forget(request.id)
        del self._streams[request]

    def _forget(self, request: Request) -> None:
        """A request gave its pages back: whatever was kept by position is void."""
        self._drafter.forget(request.id)
        self._runner.forget(request.id)

    def _measure(self, rows: Sequence[PlannedRow], draft_s: float, rest_s: float) -> None:
        """Tell the depth policy what decoding cost; steps with prompt chunks would mislead it."""
        if all(row.final and row.count == 1 for row in rows):
            drafted = sum(len(row.drafts) for row in rows)
            asked = max((row.depth for row in rows), default=0)
            self._depth.measure(StepCost(len(rows) + drafted, rest_s, draft_s, drafted, asked))


def _committed(rows: Sequence[PlannedRow]) -> list[CommittedRow]:
    """What the drafter should follow: every row and where its hidden states start."""
    committed, offset = [], 0
    for row in rows:
        count, computed = row.lease.computed - row.first, row.count + len(row.drafts)
        keep_up = row.request.params.speculate
        committed.append(
            CommittedRow(row.request, row.lease, row.first, count, offset, computed, keep_up)
        )
        offset += computed
    return committed
