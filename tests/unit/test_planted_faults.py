"""Negative controls: each classic fault is planted, and the check that is meant for it fails."""

import pytest

from surefoot.engine.scheduler import Scheduler
from surefoot.state.ledger import Ledger
from surefoot.testing.faults import (
    BlindEarlyPublisher,
    EarlyPublisher,
    OffByOneScheduler,
    padded,
    planted,
)
from surefoot.testing.simulate import Parts, SimulationFault, simulate
from tests.lossless.harness import Bench, Case, Run, next_turns

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="surefoot")


def differences(bench: Bench, case: Case, fault: str) -> str:
    """What the lossless check says under the fault, having said nothing without it."""
    assert Run(bench, case).finish() == []
    with planted(fault):
        return "\n".join(Run(bench, case).finish())


def test_a_history_one_short_is_found_by_the_lossless_check(bench: Bench) -> None:
    case = Case("llama", "right", depth=4, batch=8, sampling="penalties")
    assert "tokens" in differences(bench, case, "history one short")


def test_penalties_counted_once_per_step_are_found_by_the_lossless_check(bench: Bench) -> None:
    case = Case("llama", "right", depth=4, batch=8, sampling="penalties")
    assert "tokens" in differences(bench, case, "penalty counted once per step")


def test_noise_keyed_by_step_is_found_by_the_lossless_check(bench: Bench) -> None:
    case = Case("llama", "random", depth=3, sampling="top-p")
    assert "tokens" in differences(bench, case, "noise keyed by step")


def test_a_commit_off_by_one_is_found_by_the_lossless_check(bench: Bench) -> None:
    case = Case("llama", "none", depth=0, chunk=3)
    assert "tokens" in differences(bench, case, "commit off by one")


def test_a_page_published_past_the_cursor_is_found_by_the_next_turn(bench: Bench) -> None:
    case = Case("llama", "none", depth=0, page=4)
    assert next_turns(bench, case) == []
    with planted("page published past the cursor"):
        assert next_turns(bench, case) != []


def test_padding_on_a_live_page_is_found_by_the_lossless_check(bench: Bench) -> None:
    case = Case("llama", "random", depth=3)
    assert "tokens" in differences(bench, case, "padding on a live page")


def test_padding_on_a_live_slot_is_found_by_the_lossless_check(bench: Bench) -> None:
    case = Case("sliding", "random", depth=3)
    assert "tokens" in differences(bench, case, "padding on a live page")


def test_padding_in_the_sink_changes_nothing(bench: Bench) -> None:
    for model in ("llama", "sliding"):
        with padded():
            assert Run(bench, Case(model, "random", depth=3, poison="nan")).finish() == []


def test_a_wrong_draft_that_is_kept_is_found_by_the_lossless_check(bench: Bench) -> None:
    case = Case("llama", "random", depth=3)
    assert "tokens" in differences(bench, case, "wrong draft kept")


def test_length_before_stop_is_found_by_the_lossless_check(bench: Bench) -> None:
    case = Case("llama", "right", depth=8, batch=8, sampling="stop at the limit")
    assert "reason" in differences(bench, case, "length before stop")


def simulate_some(parts: Parts) -> None:
    for seed in range(60):
        simulate(seed, parts)


@pytest.mark.parametrize(
    ("parts", "symptom"),
    [
        (Parts(ledger=EarlyPublisher), "published, but computed"),
        (Parts(ledger=BlindEarlyPublisher), "emits|may not write"),
        (Parts(scheduler=OffByOneScheduler), "emits|computes up to|not by"),
    ],
    ids=["early publisher", "blind early publisher", "off by one"],
)
def test_the_simulation_finds_a_faulty_part(parts: Parts, symptom: str) -> None:
    with pytest.raises(SimulationFault, match=symptom):
        simulate_some(parts)


@pytest.mark.parametrize("fault", ["wrong draft kept", "length before stop"])
def test_the_simulation_finds_a_faulty_loop(fault: str) -> None:
    with planted(fault), pytest.raises(SimulationFault, match=r"emits|ends by"):
        simulate_some(Parts())


def test_the_simulation_finds_nothing_in_the_right_parts() -> None:
    simulate_some(Parts(ledger=Ledger, scheduler=Scheduler))
