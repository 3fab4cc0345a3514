from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.backend.order import Blocks, temper
from surefoot.backend.protocol import LEAST_TEMPERATURE, UNCHOSEN
from surefoot.errors import SettingError
from surefoot.params import SamplingParams
from surefoot.sample.processors import (
    HistoryCounts,
    RowContext,
    check_vocabulary,
    process,
    truncate,
)
from tests.unit.sample.law import context, law, try_choose

TOKENS = st.lists(st.integers(0, 9), max_size=30)
LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -2.0]


def processed(row: RowContext, logits: list[float] | None = None) -> list[float]:
    given = torch.tensor(LOGITS if logits is None else logits)
    before = given.clone()
    result: list[float] = process(given, row).tolist()
    assert torch.equal(given, before)
    return result


def masked(row: RowContext) -> list[int]:
    return [token for token, score in enumerate(processed(row)) if score == -math.inf]


def kept(scores: Tensor, params: SamplingParams) -> list[int]:
    tempered = temper(scores[None], scores.amax()[None], [params.temperature])[0]
    ids = truncate(Blocks.of(tempered), params)
    return list(range(len(scores))) if ids is None else sorted(ids.tolist())


# Penalties


def test_presence_counts_generated_tokens_once() -> None:
    row = context(SamplingParams(presence_penalty=0.5), [0, 0, 1, 1, 5], prompt=2)
    assert processed(row) == [2.0, 0.5, 0.5, 0.0, -1.0, -2.5]


def test_frequency_counts_each_generated_occurrence() -> None:
    row = context(SamplingParams(frequency_penalty=0.25), [0, 0, 1, 1, 5], prompt=2)
    assert processed(row) == [2.0, 0.5, 0.5, 0.0, -1.0, -2.25]


def test_repetition_divides_positive_and_multiplies_negative_also_for_the_prompt() -> None:
    row = context(SamplingParams(repetition_penalty=2), [0, 3, 4, 4], prompt=3)
    assert processed(row) == [1.0, 1.0, 0.5, 0.0, -2.0, -2.0]


def test_repetition_below_one_favours() -> None:
    row = context(SamplingParams(repetition_penalty=0.5), [0, 4])
    assert processed(row) == [4.0, 1.0, 0.5, 0.0, -0.5, -2.0]


def test_penalties_apply_in_the_documented_order() -> None:
    params = SamplingParams(
        repetition_penalty=2, frequency_penalty=0.5, presence_penalty=1, logit_bias={0: 8.0}
    )
    assert processed(context(params, [0, 0]))[0] == 2.0 / 2 - 2 * 0.5 - 1 + 8


def test_drafts_before_the_row_are_counted_and_those_behind_are_not() -> None:
    params = SamplingParams(frequency_penalty=0.5)
    drafts = [1, 1, 2]
    rows = [context(params, [0, *drafts[:place]], prompt=1) for place in range(4)]
    assert [processed(row)[1] for row in rows] == [1.0, 0.5, 0.0, 0.0]
    assert [processed(row)[2] for row in rows] == [0.5, 0.5, 0.5, 0.0]


@settings(max_examples=60, deadline=None)
@given(TOKENS, st.integers(0, 30), st.lists(st.integers(0, 30), max_size=4))
def test_counts_kept_token_by_token_equal_counts_from_scratch(
    history: list[int], prompt: int, cuts: list[int]
) -> None:
    counts = HistoryCounts(10, prompt)
    for cut in sorted(cut for cut in cuts if cut <= len(history)):
        counts.advance(history[:cut])
        found = counts.after(history)
        wanted = {token: history[prompt:].count(token) for token in history}
        assert dict(zip(found.ids.tolist(), found.output.tolist(), strict=True)) == wanted
        assert counts.length == cut
        assert sorted(counts.ids.tolist()) == sorted(set(history[:cut]))


@settings(max_examples=40, deadline=None)
@given(TOKENS, st.integers(0, 3), st.integers(0, 20))
def test_given_counts_never_change_the_result(history: list[int], behind: int, prompt: int) -> None:
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1)
    row = context(params, history, prompt=min(prompt, len(history)))
    counts = HistoryCounts(10, row.prompt_length)
    counts.advance(history[: len(history) - behind])
    logits = torch.linspace(-2, 2, 10)
    assert torch.equal(process(logits, row), process(logits, replace(row, counts=counts)))


def test_counts_ahead_of_the_history_are_refused() -> None:
    counts = HistoryCounts(6, 0)
    counts.advance([1, 2, 3])
    row = replace(context(SamplingParams(presence_penalty=1), [1, 2]), counts=counts)
    with pytest.raises(AssertionError, match="does not have"):
        process(torch.zeros(6), row)


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(AssertionError, match="no such token"):
        HistoryCounts(6, 0).advance([1, 6])


@pytest.mark.parametrize("lag", [-1, 1])
def test_a_history_of_the_wrong_length_is_refused(lag: int) -> None:
    row = context(SamplingParams(presence_penalty=1), [1, 2, 3], position=3 + lag)
    with pytest.raises(AssertionError, match="history"):
        process(torch.zeros(6), row)


# Bias and masks


def test_bias_is_added() -> None:
    row = context(SamplingParams(logit_bias={1: 3.0, 5: -1.0}))
    assert processed(row) == [2.0, 4.0, 0.5, 0.0, -1.0, -3.0]


def test_only_allowed_tokens_stay() -> None:
    assert masked(context(SamplingParams(allowed_token_ids=(1, 4, 1)))) == [0, 2, 3, 5]


def test_a_single_bad_word_is_always_masked() -> None:
    assert masked(context(SamplingParams(), bad=((3,), (5,)))) == [3, 5]


@pytest.mark.parametrize(
    ("output", "wanted"),
    [((1, 2), [3]), ((0, 1, 2), [3]), ((1,), []), ((2,), []), ((1, 2, 0), []), ((2, 1), [])],
)
def test_a_long_bad_word_is_masked_where_it_would_be_completed(
    output: tuple[int, ...], wanted: list[int]
) -> None:
    row = context(SamplingParams(), (4, *output), prompt=1, bad=((1, 2, 3),))
    assert masked(row) == wanted


def test_a_bad_word_is_not_matched_into_the_prompt() -> None:
    assert masked(context(SamplingParams(), (1, 2), prompt=1, bad=((1, 2, 3),))) == []
    assert masked(context(SamplingParams(), (1, 2), prompt=0, bad=((1, 2, 3),))) == [3]


@pytest.mark.parametrize(("generated", "wanted"), [(0, [2, 4]), (2, [2, 4]), (3, []), (4, [])])
def test_end_tokens_are_masked_until_min_tokens_are_there(
    generated: int, wanted: list[int]
) -> None:
    params = SamplingParams(min_tokens=3)
    row = context(params, prompt=7, position=7 + generated, ends=frozenset({2, 4}))
    assert masked(row) == wanted


def test_min_tokens_gives_way_if_nothing_else_is_left() -> None:
    params = SamplingParams(min_tokens=3, allowed_token_ids=(2, 4))
    row = context(params, ends=frozenset({2, 4}), bad=((4,),))
    assert masked(row) == [0, 1, 3, 4, 5]


def test_bad_words_give_way_next_and_allowed_tokens_never() -> None:
    params = SamplingParams(min_tokens=3, allowed_token_ids=(2, 4))
    row = context(params, ends=frozenset({2}), bad=((4,), (2,)))
    assert masked(row) == [0, 1, 3, 5]
    assert processed(row)[2] == LOGITS[2]


def test_nothing_to_do_returns_the_very_logits() -> None:
    logits = torch.tensor(LOGITS)
    for params in (SamplingParams(top_k=3, temperature=0.5), SamplingParams(temperature=0)):
        assert process(logits, context(params)) is logits


# Truncation


def test_top_k_breaks_ties_by_the_lower_id() -> None:
    scores = torch.tensor([0.0, 1.0, 1.0, 2.0, 1.0])
    assert kept(scores, SamplingParams(top_k=2)) == [1, 3]
    assert kept(scores, SamplingParams(top_k=3)) == [1, 2, 3]
    assert kept(scores, SamplingParams(top_k=9)) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_smallest_prefix_that_reaches_it() -> None:
    scores = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    for top_p, wanted in [
        (0.01, [1]),
        (0.39, [1]),
        (0.41, [1, 3]),
        (0.69, [1, 3]),
        (0.71, [1, 2, 3]),
        (0.91, [0, 1, 2, 3]),
    ]:
        assert kept(scores, SamplingParams(top_p=top_p)) == wanted


def test_top_p_works_on_what_top_k_kept() -> None:
    scores = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    # 0.4 of the whole is 0.57 of what top_k = 2 leaves.
    assert kept(scores, SamplingParams(top_k=2, top_p=0.5)) == [1]
    assert kept(scores, SamplingParams(top_p=0.5)) == [1, 3]


def test_min_p_is_relative_to_the_best() -> None:
    scores = torch.tensor([0.1, 0.4, 0.21, 0.29]).log()
    assert kept(scores, SamplingParams(min_p=0.5)) == [1, 2, 3]
    assert kept(scores, SamplingParams(min_p=0.6)) == [1, 3]
    assert kept(scores, SamplingParams(min_p=1.0)) == [1]
    assert kept(torch.zeros(3), SamplingParams(min_p=1.0)) == [0, 1, 2]


def test_top_p_of_a_flat_vocabulary_takes_the_lowest_ids() -> None:
    assert kept(torch.zeros(4000), SamplingParams(top_p=0.25)) == list(range(1000))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.1, 1.5, 4.0]), min_size=1, max_size=90),
    st.integers(0, 20),
    st.sampled_from([0.137, 0.5777, 0.9013, 0.99917, 1.0]),
    st.sampled_from([0.0, 0.0213, 0.5091]),
    st.sampled_from([0.31, 1.0, 2.7]),
)
def test_truncation_keeps_the_tokens_of_the_law(
    scores: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    wanted = [token for token, share in enumerate(law(scores, context(params))) if share]
    assert kept(torch.tensor(scores), params) == wanted


@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.9999, 0.9999999])
def test_top_p_of_a_large_vocabulary_equals_a_full_sort(spread: float, top_p: float) -> None:
    scores = spread * torch.randn(40_001, generator=torch.Generator().manual_seed(3))
    ordered = scores.sort(descending=True, stable=True)
    weight = (ordered.values - ordered.values[0]).exp().to(torch.float64)
    count = int((weight.cumsum(0) < top_p * weight.sum()).sum()) + 1
    assert kept(scores, SamplingParams(top_p=top_p)) == sorted(ordered.indices[:count].tolist())


# The rest


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-10])
def test_a_tiny_temperature_keeps_only_the_best(temperature: float) -> None:
    scores = torch.tensor([3.0, 3.1, 3.1, -9.0])
    tempered = temper(scores[None], scores[1:2], [max(temperature, LEAST_TEMPERATURE)])[0]
    assert tempered[1:3].tolist() == [0.0, 0.0]
    assert float(tempered[[0, 3]].amax()) < -1e8


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("logit_bias", SamplingParams(logit_bias={3: 1.0, 10: 1.0})),
        ("allowed_token_ids", SamplingParams(allowed_token_ids=(11,))),
        ("stop_token_ids", SamplingParams(stop_token_ids=(10,))),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(name: str, params: SamplingParams) -> None:
    with pytest.raises(SettingError, match="below 10") as caught:
        check_vocabulary(params, 10)
    assert caught.value.parameter == name
    check_vocabulary(params, 12)


EXTREMES: dict[str, list[dict[str, object]]] = {
    "repetition_penalty": [{"repetition_penalty": value} for value in (0.01, 100)],
    "presence_penalty": [{"presence_penalty": value} for value in (-2, 2)],
    "frequency_penalty": [{"frequency_penalty": value} for value in (-2, 2)],
    "logit_bias": [{"logit_bias": {0: value, 3: value, 5: -value}} for value in (-100, 100)],
    "temperature": [{"temperature": value} for value in (5e-324, 1e-320, 1e-45, 1e-38, 100)],
    "min_p": [{"min_p": value, "temperature": 1e-320} for value in (5e-324, 1)],
    "top_p": [{"top_p": value, "temperature": 1e-320} for value in (5e-324, 1 - 2**-53)],
}


@pytest.mark.parametrize("name", EXTREMES)
def test_no_legal_value_makes_scores_that_are_not_numbers(name: str) -> None:
    """Not even with scores far greater than those of a whole model."""
    logits = torch.tensor([1e30, -1e30, 0.0, 1e-40, -math.inf, 7.0])
    for values in EXTREMES[name]:
        row = context(SamplingParams(**values), [0, 1, 2, 3, 4, 5, 0, 1], prompt=3)  # type: ignore[arg-type]
        scores = process(logits, row)
        assert not scores.isnan().any()
        assert scores.amax().isfinite()
        assert float(scores[4]) == -math.inf
        (token,) = try_choose(logits[None], [row])
        assert token not in (UNCHOSEN, 4)
        if row.params.temperature < 1:
            assert token == int(scores.argmax())
