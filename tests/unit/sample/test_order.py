from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.backend.order import Blocks, argmax_rows

# Few distinct values: ties everywhere.
SCORES = st.lists(st.sampled_from([-math.inf, -2.0, 0.0, 0.5, 3.0]), min_size=1, max_size=200)


def ordered(scores: list[float]) -> list[int]:
    finite = [token for token in range(len(scores)) if scores[token] > -math.inf]
    return sorted(finite, key=lambda token: (-scores[token], token))


@settings(max_examples=150, deadline=None)
@given(SCORES, st.integers(1, 210))
def test_best_is_a_prefix_of_the_total_order(scores: list[float], count: int) -> None:
    blocks = Blocks.of(torch.tensor(scores))
    assert blocks.best(count).tolist() == ordered(scores)[:count]


@settings(max_examples=100, deadline=None)
@given(SCORES, st.sampled_from([-math.inf, -2.0, 0.1, 3.0, 4.0]))
def test_at_least_and_ranked_keep_the_same_tokens(scores: list[float], bound: float) -> None:
    blocks = Blocks.of(torch.tensor(scores))
    wanted = [token for token in ordered(scores) if scores[token] >= bound]
    assert blocks.ranked(bound).tolist() == wanted
    assert blocks.at_least(bound).tolist() == sorted(wanted)


@settings(max_examples=100, deadline=None)
@given(SCORES)
def test_first_and_argmax_take_the_lowest_id_among_equals(scores: list[float]) -> None:
    wanted = max(range(len(scores)), key=lambda token: (scores[token], -token))
    assert Blocks.of(torch.tensor(scores)).first() == wanted
    assert argmax_rows(torch.tensor([scores, scores])).tolist() == [wanted, wanted]


def test_argmax_agrees_with_torch_on_every_row() -> None:
    for vocab in (5, 64, 4095, 4096):
        scores = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab))
        assert torch.equal(argmax_rows(scores), scores.argmax(-1))


def test_argmax_points_at_not_a_number() -> None:
    scores = torch.zeros(3, 130)
    scores[1, 77] = torch.nan
    scores[1, 3] = torch.inf
    assert argmax_rows(scores)[1] == 77


def test_peak_is_the_best_score_of_the_nth_block() -> None:
    blocks = Blocks.of(torch.arange(130, dtype=torch.float32))
    assert [blocks.peak(count) for count in (1, 2, 3, 4)] == [129, 127, 63, -math.inf]


@pytest.mark.parametrize("vocab", [1, 63, 64, 65])
def test_padding_is_never_kept(vocab: int) -> None:
    blocks = Blocks.of(torch.full((vocab,), -1e30))
    assert blocks.best(500).tolist() == list(range(vocab))
