"""Recurrent state and a draft head: the tokens are those of a plain run, and so is every cache."""

from typing import Any

import pytest

from surefoot.testing.strategies import missing_pairs, pairwise
from tests.lossless.harness import HYBRIDS, SAMPLING, Bench, Case, Counts, Run

DRAFTERS = ("none", "ngram", "mtp", "draft-model", "right", "wrong", "random")
FACTORS: dict[str, tuple[object, ...]] = {
    "drafter": DRAFTERS,
    "depth": (1, 3, 8),
    "model": tuple(HYBRIDS),
    "sampling": ("greedy", "top-p", "penalties", "logprobs"),
    "page": (16, 32),
    "chunk": (3, 16, 256),
    "batch": (1, 4),
    "preempt": ("never", "forced", "scarce"),
    "poison": ("none", "nan", "garbage"),
    "cache": (True, False),
}


ALL_FACTORS = {
    **FACTORS,
    "depth": tuple(range(9)),
    "sampling": tuple(SAMPLING),
    "batch": (1, 3, 8),
}


def make_cases(factors: dict[str, tuple[object, ...]], seed: int, at_least: int) -> list[Case]:
    chosen: list[dict[str, Any]] = pairwise(factors, seed=seed, at_least=at_least)
    assert missing_pairs(factors, chosen) == []
    return [Case(**choice) for choice in chosen]


def run_all(bench: Bench, cases: list[Case]) -> Counts:
    """Nothing may differ; returns what was exercised."""
    differences: list[str] = []
    counts = Counts()
    for case in cases:
        run = Run(bench, case)
        differences += run.finish()
        counts.add(run.requests)
    assert not differences, "\n".join(differences)
    return counts


CASES = make_cases(FACTORS, seed=5, at_least=0)


@pytest.mark.parametrize("model", HYBRIDS)
def test_tokens_and_logprobs_equal_the_plain_run(model: str, bench: Bench) -> None:
    counts = run_all(bench, [case for case in CASES if case.model == model])
    # What is not exercised is not tested.
    assert counts.accepted > 100
    assert counts.partial > 5
    assert counts.cached > 1
    assert counts.preemptions > 5


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4))
def test_every_depth_meets_every_other_choice(seed: int, bench: Bench) -> None:
    run_all(bench, make_cases(ALL_FACTORS, seed=seed, at_least=0))
