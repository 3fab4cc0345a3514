"""Simulates the engine without a model: real loop, scheduler, ledger and prefix cache.

    python -m surefoot.testing.simulate --seeds 2000        runs seeds 0 .. 1999
    python -m surefoot.testing.simulate --seed 17           replays one and reports it

After each step the books are audited and whatever was emitted is compared with what the model
says of the prefix alone. At the end nothing may be held and every request has ended once.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random

from surefoot.draft.curve import CostCurve
from surefoot.draft.depth import AutoDepth, Depth, FixedDepth
from surefoot.draft.drafter import Drafter, NoDrafter
from surefoot.draft.guard import GuardedDrafter
from surefoot.engine.loop import Loop
from surefoot.engine.output import NoText
from surefoot.engine.rows import Emission, PlannedRow
from surefoot.engine.runner import Runner, StepResult
from surefoot.engine.scheduler import Scheduler
from surefoot.request import FinishReason, Request, Status
from surefoot.state.ledger import Ledger
from surefoot.testing.drafters import PagedGuesser, make_test_drafter
from surefoot.testing.fakes import (
    FailingDrafter,
    FailingRunner,
    Failures,
    FakeClock,
    HashRunner,
    InjectedFailure,
)
from surefoot.testing.scenarios import Scenario, make_scenario

_PREEMPTIONS = 12


class SimulationFault(AssertionError):
    """The engine did something that it must not do; the message says when and what."""


@dataclass(frozen=True)
class Parts:
    """Which classes are put together; tests put faulty ones here."""

    ledger: type[Ledger] = Ledger
    scheduler: type[Scheduler] = Scheduler
    runner: type[HashRunner] = HashRunner
    loop: type[Loop] = Loop


@dataclass
class Report:
    """What happened in a simulation.

    Attributes:
        seed: the scenario's.
        requests: how many came.
        steps: passes of the loop.
        tokens: emitted.
        drafted: tokens verified.
        accepted: of those, kept.
        partial: verify rows of which some drafts were kept, but not all.
        cached: prompt tokens that came from the prefix cache.
        preemptions: of all requests.
        failures: calls that were made to fail.
        errors: requests that ended with an error.
        aborts: requests that were aborted.
    """

    seed: int
    requests: int = 0
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    partial: int = 0
    cached: int = 0
    preemptions: int = 0
    failures: int = 0
    errors: int = 0
    aborts: int = 0


class _Watch:
    """Looks at every batch of rows before it is run."""

    def __init__(self, runner: Runner, scenario: Scenario, clock: FakeClock) -> None:
        self._runner, self._scenario, self._clock = runner, scenario, clock
        self.rows: list[PlannedRow] = []
        self.complaints: list[str] = []
        self.prepare, self.forget = runner.prepare, runner.forget
        self.settle = runner.settle

    def run(self, rows: Sequence[PlannedRow]) -> StepResult:
        """See Runner."""
        self.rows = list(rows)
        limits = self._scenario.scheduler
        tokens = sum(row.count + len(row.drafts) for row in rows)
        self._clock.advance(1.0 + 0.3 * tokens)
        if tokens > limits.max_step_tokens:
            self.complaints.append(f"{tokens} tokens in a step of {limits.max_step_tokens}")
        if len(rows) > limits.max_rows:
            self.complaints.append(f"{len(rows)} rows in a step of {limits.max_rows}")
        for row in rows:
            self._look_at(row)
        return self._runner.run(rows)

    def _look_at(self, row: PlannedRow) -> None:
        request, end = row.request, row.first + row.count
        known, far = len(request.tokens), end + len(row.drafts)
        if not 1 <= row.count <= max(1, self._scenario.scheduler.prefill_chunk):
            self.complaints.append(f"request {request.id}: a row of {row.count} known tokens")
        if row.final != (end == known) or (row.drafts and not row.final):
            self.complaints.append(f"request {request.id}: computes up to {end} of {known}")
        if far > min(row.lease.capacity, request.length_limit - 1):
            self.complaints.append(f"request {request.id}: row reaches to {far}")
        if row.drafts and not request.params.speculate:
            self.complaints.append(f"request {request.id}: drafted for against its will")


class Simulation:
    """One scenario on its way."""

    def __init__(
        self, scenario: Scenario, parts: Parts = Parts(), failures: Failures | None = None
    ) -> None:
        """Assemble `parts`; calls fail as `failures` says, else at the scenario's rate."""
        self.scenario = scenario
        self.report = Report(scenario.seed, requests=len(scenario.arrivals))
        self.failures = failures or Failures(rate=scenario.failure_rate, seed=scenario.seed)
        self._random = Random(scenario.seed)
        self.ledger = parts.ledger(scenario.ledger)
        self.scheduler = parts.scheduler(self.ledger, scenario.scheduler)
        self._hash = parts.runner(scenario.model, scenario.ledger, scenario.draft_tokens)
        self._clock = FakeClock()
        self._watch = _Watch(FailingRunner(self._hash, self.failures), scenario, self._clock)
        self._guesser = PagedGuesser(scenario.model, scenario.ledger, scenario.seed)
        depth = _depth(scenario)
        self.loop = parts.loop(self.ledger, self.scheduler, self._watch, self._drafter(), depth)
        self.loop.clock = self._clock
        self._coming = list(scenario.arrivals)
        self._open: dict[Request, tuple[list[int], FinishReason]] = {}
        self._shown: dict[Request, int] = {}
        self._preemptions = _PREEMPTIONS

    def run(self) -> Report:
        """Drive the loop until every request has ended.

        Raises:
            SimulationFault: anything that must not happen, happened.
        """
        most = self._most_steps()
        while self._coming or not self.loop.idle:
            self._check(self.report.steps <= most, f"still busy after {most} steps")
            self._arrive()
            self._interfere()
            self._step()
            self.report.steps += 1
        self._check_end()
        return self.report

    def _drafter(self) -> Drafter:
        name, model = self.scenario.drafter, self.scenario.model
        if name == "none":
            return NoDrafter()
        if name == "paged":
            drafter: Drafter = self._guesser
        else:
            drafter = make_test_drafter(name, model.guess, model.vocab, self.scenario.seed)
        return GuardedDrafter(FailingDrafter(drafter, self.failures), model.vocab)

    def _most_steps(self) -> int:
        """A bound that any fair schedule keeps: the oldest request advances at every step.

        A failure makes it start anew once, and so may each pre-emption from outside.
        """
        work = [arrival.request.length_limit for arrival in self._coming]
        return self._coming[-1].step + 2 * sum(work) + _PREEMPTIONS * max(work)

    def _arrive(self) -> None:
        while self._coming and self._coming[0].step <= self.report.steps:
            request = self._coming.pop(0).request
            self._open[request] = self.scenario.model.answer(request)
            self._shown[request] = 0
            self.loop.add(request, NoText())

    def _interfere(self) -> None:
        """Aborts and pre-emptions from outside, between two steps."""
        random, scenario = self._random, self.scenario
        if self._open and random.random() < scenario.abort_rate:
            self._abort(random.choice(list(self._open)))
        if self._preemptions and random.random() < scenario.preempt_rate:
            self._preemptions -= 1
            running = [row.request for row in self._watch.rows]
            running = [request for request in running if request.status is Status.RUNNING]
            if random.random() < 0.5:
                self.scheduler.preempt_all()
            elif running:
                self.scheduler.preempt(running[-1])

    def _abort(self, request: Request) -> None:
        self.loop.abort(request)
        self.loop.abort(request)
        self.report.aborts += 1
        self._check(request.finish_reason is FinishReason.ABORT, "an abort was ignored")
        self._close(request)

    def _step(self) -> None:
        self._watch.rows = []
        oldest = min((request.id for request in self._open), default=None)
        raised = self.failures.raised
        emissions = self.loop.step()
        served = [row.request.id for row in self._watch.rows]
        if oldest is not None and raised == self.failures.raised:
            self._check(oldest in served, f"request {oldest} is the oldest and was not served")
        self._check(served == sorted(served), f"rows out of order of arrival: {served}")
        for emission in emissions:
            self._take(emission)
        complaints = self._watch.complaints + self._hash.complaints
        if not self.failures.raised:
            complaints += self._guesser.complaints
        self._check(not complaints, "; ".join(complaints))
        try:
            self.ledger.audit()
        except AssertionError as error:
            raise self._fault(str(error)) from error

    def _take(self, emission: Emission) -> None:
        request = emission.request
        self._check(request in self._open, f"request {request.id} emits after its end")
        expected, reason = self._open[request]
        begin = self._shown[request]
        end = self._shown[request] = begin + len(emission.token_ids)
        right = expected[begin:end]
        self._check(
            emission.token_ids == right,
            f"request {request.id} emits {emission.token_ids}, not {right}",
        )
        self._check(list(request.output) == expected[:end], "emissions and tokens disagree")
        self.report.tokens += len(emission.token_ids)
        if emission.reason is None:
            return
        if (request.error or "").startswith(InjectedFailure.__name__):
            self._check(request.retries == 1, f"request {request.id} was not tried again")
        else:
            self._check(
                (emission.reason, end) == (reason, len(expected)),
                f"request {request.id} ends by {emission.reason} after {end}, "
                f"not by {reason} after {len(expected)}",
            )
        self._close(request)

    def _close(self, request: Request) -> None:
        del self._open[request]
        counts, report = request.speculation, self.report
        self._check(request.status is Status.FINISHED, f"request {request.id} is not finished")
        self._check(counts.accepted == sum(counts.accepted_at), "accepted places do not add up")
        report.drafted += counts.drafted
        report.accepted += counts.accepted
        report.partial += 0 < counts.accepted < counts.drafted
        report.cached += request.cached_tokens
        report.preemptions += request.preemptions
        report.errors += request.finish_reason is FinishReason.ERROR

    def _check_end(self) -> None:
        ledger, limits = self.ledger, self.scenario.ledger
        self._check(not self._open, f"requests without an end: {[r.id for r in self._open]}")
        self._check(ledger.held_pages == 0, f"{ledger.held_pages} pages are still held")
        self._check(ledger.free_slots == limits.slots, "a slot is still held")
        total = ledger.free_pages + ledger.cached_pages
        self._check(total == limits.pages, f"{total} of {limits.pages} pages are left")
        self._check(self.scheduler.running == self.scheduler.waiting == 0, "requests remain")
        self.report.failures = self.failures.raised

    def _check(self, good: bool, message: str) -> None:
        if not good:
            raise self._fault(message)

    def _fault(self, message: str) -> SimulationFault:
        return SimulationFault(f"seed {self.scenario.seed}, step {self.report.steps}: {message}")


def _depth(scenario: Scenario) -> Depth:
    if scenario.adaptive and scenario.draft_tokens:
        return AutoDepth(CostCurve({1: 1.3, 2: 1.6}), scenario.draft_tokens)
    return FixedDepth(scenario.draft_tokens)


def simulate(seed: int, parts: Parts = Parts()) -> Report:
    """Run the scenario of one seed.

    Raises:
        SimulationFault: anything that must not happen, happened.
    """
    return Simulation(make_scenario(seed), parts).run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run many seeds, or replay one; the exit status is 1 if a fault was found."""
    parser = argparse.ArgumentParser(prog="python -m surefoot.testing.simulate")
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="replay this one only")
    options = parser.parse_args(arguments)
    # A simulated failure is no news.
    logging.getLogger("surefoot").setLevel(logging.CRITICAL)
    if options.seed is not None:
        sys.stdout.write(f"{make_scenario(options.seed)}\n{simulate(options.seed)}\n")
        return 0
    total = Report(seed=options.start)
    faults = 0
    for seed in range(options.start, options.start + options.seeds):
        try:
            _add(total, simulate(seed))
        except SimulationFault as fault:
            faults += 1
            sys.stdout.write(f"{fault}\n")
    sys.stdout.write(f"{options.seeds} seeds, {faults} faults; together {total}\n")
    return 1 if faults else 0


def _add(total: Report, one: Report) -> None:
    for name, count in asdict(one).items():
        if name != "seed":
            setattr(total, name, getattr(total, name) + count)


if __name__ == "__main__":
    sys.exit(main())
