"""Thousands of random scenarios: nothing leaks, nobody starves, every token is the right one."""

from dataclasses import asdict

import pytest

from surefoot.testing.simulate import Report, main, simulate

PART = 500


@pytest.mark.parametrize("part", range(4))
def test_no_seed_finds_a_fault(part: int) -> None:
    total = Report(seed=part)
    for seed in range(part * PART, (part + 1) * PART):
        for name, count in asdict(simulate(seed)).items():
            setattr(total, name, getattr(total, name) + count)
    # What is not exercised is not tested.
    assert total.requests > 3 * PART
    assert total.accepted > 1000
    assert total.partial > 40
    assert total.cached > 2000
    assert total.preemptions > 500
    assert total.failures > 300
    assert total.errors > 50
    assert total.aborts > 200


@pytest.mark.deep
@pytest.mark.parametrize("part", range(4, 44))
def test_no_further_seed_finds_a_fault(part: int) -> None:
    for seed in range(part * PART, (part + 1) * PART):
        simulate(seed)


def test_a_seed_replays_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(17) == simulate(17)
    assert main(["--seed", "17"]) == 0
    assert str(simulate(17)) in capsys.readouterr().out


def test_many_seeds_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "5", "--start", "40"]) == 0
    assert capsys.readouterr().out.startswith("5 seeds, 0 faults")
