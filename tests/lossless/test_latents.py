"""Windows, compressed entries and chosen ones: the tokens are those of a plain run."""

from pathlib import Path

import pytest

from surefoot import LLM, SamplingParams
from surefoot.testing.tiny_latents import TinyLatentSizes, write_tiny_latents
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


@pytest.mark.parametrize(
    ("temperature", "count"),
    [
        (0.8, 300),
        pytest.param(0.0, 1600, marks=pytest.mark.deep),
        pytest.param(0.8, 1600, marks=pytest.mark.deep),
    ],
)
def test_long_answers_over_many_windows_equal_the_plain_one(
    temperature: float, count: int, long_model: Path
) -> None:
    """So long that entries of 128 tokens come and most entries of 4 are not chosen."""
    prompt = list(range(1, 60)) * 3
    params = SamplingParams(max_tokens=count, temperature=temperature, seed=3, ignore_eos=True)
    answers = {}
    for drafter, depth in (("none", 1), ("mtp", 3), ("ngram", 4)):
        with LLM(str(long_model), drafter=drafter, draft_tokens=depth, max_rows=2) as llm:
            result = llm.generate([prompt], params)[0]
        answers[drafter, depth] = result.outputs[0].token_ids
        if drafter == "mtp":
            assert 1.2 < result.speculation.accept_length < depth
    plain = answers.pop(("none", 1))
    assert len(plain) == count
    assert len(set(plain)) > 30
    assert all(answer == plain for answer in answers.values())


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = TinyLatentSizes(
        ratios=(0, 4, 128, 4), heavy_ratio=128, window=128, index_chosen=16, positions=4096
    )
    return write_tiny_latents(tmp_path_factory.mktemp("long"), size, dial=0.5)
