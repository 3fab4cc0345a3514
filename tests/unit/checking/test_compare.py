"""Where two runs part, and which choices the arithmetic leaves open."""

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from surefoot.checking.compare import difference_of, first_difference, possible_winners
from surefoot.checking.report import Difference
from surefoot.ids import RequestId
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.sample.choose import scores
from surefoot.sample.processors import RowContext
from tests.unit.sample.law import choose

EPSILON = 1e-3
OPTIONS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(),
    "top_k": SamplingParams(temperature=0.7, top_k=4),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8),
    "both": SamplingParams(top_k=6, top_p=0.7),
    "min_p": SamplingParams(min_p=0.2),
    "penalties": SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, min_p=0.05),
}


def context(params: SamplingParams, seed: int = 1) -> RowContext:
    return RowContext(params, [3, 1, 2], 1, frozenset(), (), seed, 3)


def winners(logits: list[float] | Tensor, params: SamplingParams, seed: int = 1) -> set[int]:
    rows = torch.as_tensor(logits, dtype=torch.float32)
    possible = possible_winners(rows, context(params, seed), EPSILON)
    return set(possible.nonzero()[:, 0].tolist())


def possible_scores(logits: Tensor, params: SamplingParams, seed: int) -> Tensor:
    return scores(logits[None], [context(params, seed)])[0]


def request(output: list[int], error: str | None = None) -> Request:
    return Request(
        id=RequestId(1),
        tokens=[9, 9, *output],
        prompt_length=2,
        params=SamplingParams(temperature=0),
        seed=0,
        length_limit=20,
        error=error,
    )


@pytest.mark.parametrize(
    ("expected", "got", "place"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1], [], 0),
    ],
)
def test_the_first_difference(expected: list[int], got: list[int], place: int | None) -> None:
    assert first_difference(expected, got) == place


def test_a_difference_names_both_tokens() -> None:
    found = difference_of("prose", request([1, 2, 3]), request([1, 4, 3]))
    assert found == Difference("prose", 1, 2, 4)


def test_a_run_that_ends_early_is_a_difference() -> None:
    found = difference_of("prose", request([1, 2]), request([1], error="it broke"))
    assert found == Difference("prose", 1, 2, None, "it broke")


def test_a_failed_plain_run_is_a_difference_even_if_both_failed() -> None:
    found = difference_of("prose", request([1], "it broke"), request([1], "it broke"))
    assert found is not None
    assert found.error == "the plain run failed: it broke"


def test_equal_runs_have_no_difference() -> None:
    assert difference_of("prose", request([1, 2]), request([1, 2])) is None


def test_a_clear_best_token_alone_may_win() -> None:
    assert winners([1.0, 3.0, 2.0], OPTIONS["greedy"]) == {1}


def test_tokens_within_epsilon_of_the_best_may_win() -> None:
    assert winners([3.0, 3.0 - 0.9 * EPSILON, 3.0 - 1.1 * EPSILON], OPTIONS["greedy"]) == {0, 1}


def test_temperature_counts_in_the_distance() -> None:
    """0.5 epsilon of logits at a temperature of 0.1 are 5 epsilon of score."""
    gap = 0.5 * EPSILON
    near = SamplingParams(temperature=1.0, seed=1)
    logits = torch.full((2,), 3.0)
    noise = possible_scores(logits, near, 1)
    logits[1] += float(noise[0] - noise[1]) - gap
    assert winners(logits, near) == {0, 1}
    cold = SamplingParams(temperature=0.1)
    level = 0.1 * float(noise[0] - noise[1])
    assert winners([3.0, 3.0 + level - gap], cold) == {0}


def test_a_token_at_the_edge_of_top_k_may_win_or_not() -> None:
    """Token 2 has the best noise; whether it is the second or the third best is open."""
    params = SamplingParams(top_k=2)
    seed = seed_won_by(2, [5.0, 4.0, 4.0])
    assert winners([5.0, 4.0 + 0.5 * EPSILON, 4.0], params, seed) >= {2}
    assert len(winners([5.0, 4.0 + 0.5 * EPSILON, 4.0], params, seed)) > 1
    assert 2 not in winners([5.0, 4.0 + 3 * EPSILON, 4.0], params, seed)


def test_a_token_at_the_edge_of_min_p_may_win_or_not() -> None:
    edge = 5.0 + math.log(0.1)
    params = SamplingParams(min_p=0.1)
    seed = seed_won_by(1, [5.0, edge])
    assert winners([5.0, edge + 0.5 * EPSILON], params, seed) == {0, 1}
    assert winners([5.0, edge - 0.5 * EPSILON], params, seed) == {0, 1}
    assert winners([5.0, edge + 3 * EPSILON], params, seed) == {1}
    assert winners([5.0, edge - 3 * EPSILON], params, seed) == {0}


def test_a_token_at_the_edge_of_top_p_may_win_or_not() -> None:
    """The first of two tokens holds p; the second is kept while p is below top_p."""
    logits = [2.0, 1.0]
    share = 1 / (1 + math.exp(-1.0))
    seed = seed_won_by(1, logits)
    assert winners(logits, SamplingParams(top_p=share + 0.5 * EPSILON), seed) == {0, 1}
    assert winners(logits, SamplingParams(top_p=share - 0.5 * EPSILON), seed) == {0, 1}
    assert winners(logits, SamplingParams(top_p=share + 3 * EPSILON), seed) == {1}
    assert winners(logits, SamplingParams(top_p=share - 3 * EPSILON), seed) == {0}


def test_with_every_kept_token_in_doubt_all_of_them_may_win() -> None:
    assert winners([3.0, 3.0 - 0.5 * EPSILON], SamplingParams(top_k=1)) == {0, 1}


def test_masked_tokens_never_win() -> None:
    params = SamplingParams(temperature=0, allowed_token_ids=(0, 2))
    assert winners([1.0, 9.0, 1.0], params) == {0, 2}


def seed_won_by(token: int, logits: list[float]) -> int:
    """A seed whose noise makes `token` win by more than a few epsilon, nothing cut off."""
    for seed in range(1000):
        totals = possible_scores(torch.tensor(logits), SamplingParams(), seed)
        if int(totals.argmax()) == token and _margin(totals) > 0.1:
            return seed
    raise AssertionError("no such seed")


def _margin(totals: Tensor) -> float:
    best = totals.sort(descending=True).values
    return float(best[0] - best[1])


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_chosen_under_small_errors_is_always_possible(name: str) -> None:
    """Logits on a coarse grid tie often; errors below half an epsilon must never surprise."""
    generator = torch.Generator().manual_seed(11)
    params = OPTIONS[name]
    # Scores move by the error over the temperature; peak and penalties add to it.
    size = 0.2 * EPSILON * (params.temperature or 1)
    surprising = 0
    several = 0
    for seed in range(60):
        logits = (torch.randn(24, generator=generator) * 3).round() / 2
        row = context(params, seed)
        possible = possible_winners(logits, row, EPSILON)
        several += int(possible.sum()) > 1
        assert bool(possible[choose(logits[None], [row])[0]])
        for _ in range(10):
            error = (torch.rand(24, generator=generator) * 2 - 1) * size
            surprising += not bool(possible[choose((logits + error)[None], [row])[0]])
    assert surprising == 0
    # And it is no empty promise: mostly one token alone may win.
    assert several < 45
