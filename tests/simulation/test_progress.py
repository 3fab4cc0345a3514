"""A lone request always goes on: whatever is cached, the pools hold one of the greatest length."""

import pytest

from surefoot.engine.scheduler import SchedulerLimits
from surefoot.params import SamplingParams
from surefoot.state.ledger import Ledger, LedgerLimits
from surefoot.testing.fakes import HashModel
from surefoot.testing.scenarios import Arrival, Scenario, make_request
from surefoot.testing.simulate import Simulation

P = 4


def test_a_prefix_that_is_computed_anew_needs_no_room_twice() -> None:
    """Six pages are all there are, and enough for one request of 24 tokens."""
    ledger = Ledger(LedgerLimits(pages=6, slots=1, points=1, page_tokens=P, bounded=True))
    tokens = list(range(24))
    first = ledger.admit(tokens[:15], 4)
    assert first is not None
    for _ in range(3):
        assert ledger.reserve(first, P)
        ledger.commit(first, P)
        ledger.publish(first, tokens[:15])
    ledger.release(first, tokens[:15])
    # Three pages are cached, but their resume point is lost.
    assert ledger.cached_pages == 3
    lost = ledger.tree.evict_point()
    assert lost is not None
    ledger._free_points.append(lost)
    again = ledger.admit(tokens, 1)
    assert again is not None
    assert again.computed == 0
    while again.computed < len(tokens):
        assert ledger.reserve(again, P), f"no room at {again.computed}, {ledger.free_pages} free"
        ledger.commit(again, P)
        ledger.publish(again, tokens)
        ledger.audit()
    ledger.release(again, tokens)
    assert ledger.free_pages + ledger.cached_pages == 6


@pytest.mark.parametrize("points", [1, 2, 3])
@pytest.mark.parametrize("steps", range(1, 16, 2))
def test_a_request_that_is_preempted_again_and_again_comes_to_its_end(
    points: int, steps: int
) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    request = make_request(0, list(range(12)), params)
    scenario = Scenario(
        seed=steps,
        model=HashModel(vocab=32, window=5),
        ledger=LedgerLimits(6, 2, points, P, bounded=True, point_every=1),
        scheduler=SchedulerLimits(max_rows=2, max_step_tokens=8, prefill_chunk=3),
        drafter="random",
        draft_tokens=3,
        adaptive=False,
        arrivals=(Arrival(0, request), Arrival(2, make_request(1, [5] * 9, params))),
        preempt_rate=1 / steps,
    )
    report = Simulation(scenario).run()
    assert report.tokens == 24
