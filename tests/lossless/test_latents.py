"""Windows, compressed entries and chosen ones: the tokens are those of a plain run."""

import pytest

from tests.lossless.harness import LATENTS, SAMPLING, Bench
from tests.lossless.test_hybrids import ALL_FACTORS, FACTORS, make_cases, run_all

ONE = {**FACTORS, "model": (LATENTS,)}
CASES = make_cases(ONE, seed=5, at_least=30)


def test_tokens_and_logprobs_equal_the_plain_run(bench: Bench) -> None:
    counts = run_all(bench, CASES)
    # What is not exercised is not tested.
    assert counts.accepted > 100
    assert counts.partial > 5
    assert counts.cached > 1
    assert counts.preemptions > 5


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4))
def test_every_depth_meets_every_other_choice(seed: int, bench: Bench) -> None:
    factors = {**ALL_FACTORS, "model": (LATENTS,), "sampling": tuple(SAMPLING)}
    run_all(bench, make_cases(factors, seed=seed, at_least=0))
