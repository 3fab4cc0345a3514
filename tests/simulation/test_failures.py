"""Failures at every call of a small scenario: the engine lives on, and so do its promises."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from surefoot.engine.scheduler import SchedulerLimits
from surefoot.params import SamplingParams
from surefoot.request import FinishReason
from surefoot.state.ledger import LedgerLimits
from surefoot.testing.fakes import Failures, HashModel
from surefoot.testing.scenarios import Arrival, Scenario, make_request
from surefoot.testing.simulate import Simulation

STEM = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def small(drafter: str, window: int) -> Scenario:
    """Three requests that share a prefix, in pools that hold two of them."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    arrivals = [
        Arrival(step, make_request(number, [*STEM, *tail], params, seed=number))
        for number, (step, tail) in enumerate([(0, [7]), (1, [7, 8]), (5, [8, 8, 8])])
    ]
    return Scenario(
        seed=1,
        model=HashModel(vocab=32, window=window),
        ledger=LedgerLimits(9, 3, 3, page_tokens=4, bounded=window > 0, point_every=2),
        scheduler=SchedulerLimits(max_rows=3, max_step_tokens=16, prefill_chunk=6),
        drafter=drafter,
        draft_tokens=3,
        adaptive=False,
        arrivals=tuple(arrivals),
    )


def run(scenario: Scenario, at: Collection[int]) -> tuple[Simulation, Failures]:
    failures = Failures(at)
    simulation = Simulation(scenario, failures=failures)
    simulation.run()
    return simulation, failures


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("drafter", ["none", "paged"])
def test_one_failing_call_changes_no_token(drafter: str, window: int) -> None:
    _, calm = run(small(drafter, window), at=())
    assert calm.calls > 20
    for number in range(calm.calls):
        simulation, failures = run(small(drafter, window), at={number})
        assert failures.raised == 1
        assert simulation.report.errors == 0, f"call {number}"
        assert simulation.report.tokens == 3 * 8


@pytest.mark.parametrize("window", [0, 5])
def test_two_failing_calls_change_no_token_of_those_that_go_on(window: int) -> None:
    _, calm = run(small("paged", window), at=())
    errors = 0
    for first in range(calm.calls):
        for second in range(first + 1, first + 9):
            scenario = small("paged", window)
            # The simulation checks every token, and that no failure ends a request at once.
            run(scenario, at={first, second})
            reasons = [arrival.request.finish_reason for arrival in scenario.arrivals]
            assert set(reasons) <= {FinishReason.LENGTH, FinishReason.ERROR}
            errors += reasons.count(FinishReason.ERROR)
    assert errors > 0


def test_an_engine_that_always_fails_ends_every_request_with_an_error() -> None:
    scenario = replace(small("none", 0), failure_rate=1.0)
    simulation = Simulation(scenario)
    report = simulation.run()
    assert (report.errors, report.tokens) == (3, 0)
    assert all(a.request.finish_reason is FinishReason.ERROR for a in scenario.arrivals)
    assert all("InjectedFailure" in (a.request.error or "") for a in scenario.arrivals)
