"""Whatever is turned on, the tokens are those of a plain run of each request alone."""

from typing import Any

import pytest

from surefoot.testing.strategies import missing_pairs, pairwise
from tests.lossless.harness import ARCHITECTURES, SAMPLING, Bench, Case, Counts, Run

DRAFTERS = (
    "none",
    "ngram",
    "draft-model",
    "right",
    "wrong",
    "random",
    "alternating",
    "raising",
)
FACTORS: dict[str, tuple[object, ...]] = {
    "drafter": DRAFTERS,
    "depth": tuple(range(9)),
    "model": tuple(ARCHITECTURES),
    "sampling": tuple(SAMPLING),
    "page": (4, 16, 32),
    "chunk": (3, 16, 256),
    "batch": (1, 3, 8),
    "preempt": ("never", "forced", "scarce"),
    "poison": ("none", "nan", "garbage"),
    "cache": (True, False),
}


def make_cases() -> list[Case]:
    chosen: list[dict[str, Any]] = pairwise(FACTORS, seed=3, at_least=112)
    return [Case(**choice) for choice in chosen]


CASES = make_cases()


def test_every_pair_of_choices_is_in_the_matrix() -> None:
    assert len(CASES) >= 100
    chosen = [{name: getattr(case, name) for name in FACTORS} for case in CASES]
    assert missing_pairs(FACTORS, chosen) == []


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_and_logprobs_equal_the_plain_run(drafter: str, bench: Bench) -> None:
    differences: list[str] = []
    counts = Counts()
    for case in CASES:
        if case.drafter == drafter:
            run = Run(bench, case)
            differences += run.finish()
            counts.add(run.requests)
    assert not differences, "\n".join(differences)
    check_that_something_was_tested(drafter, counts)


def check_that_something_was_tested(drafter: str, counts: Counts) -> None:
    assert counts.cached > 3
    assert counts.preemptions > 5
    if drafter == "none":
        assert counts.drafted == 0
    elif drafter == "wrong":
        assert counts.drafted > 100
        assert counts.accepted == 0
    elif drafter in ("right", "alternating"):
        assert counts.accepted > 100
    elif drafter != "raising":
        assert counts.accepted > 20
        assert counts.partial > 5
