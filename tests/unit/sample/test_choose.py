from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from surefoot.backend.blockwise.choose import screen, winners
from surefoot.backend.noise import NoiseField, noise_key
from surefoot.backend.order import argmax_rows, temper
from surefoot.backend.protocol import UNCHOSEN
from surefoot.errors import NumericalError
from surefoot.params import SamplingParams
from surefoot.sample.choose import scores
from surefoot.sample.processors import HistoryCounts, RowContext
from surefoot.sample.seeds import derive_seed
from tests.unit.sample.law import ALPHA, Chooser, choose, context, law, p_value, try_choose

LOGITS = [0.4, 1.7, -0.6, 1.2, 0.0, 1.7, -2.0]
HISTORY = (0, 1, 1, 3, 5, 5)
DRAWS = 800

SETTINGS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.4),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=3),
    "top_p": SamplingParams(top_p=0.83),
    "min_p": SamplingParams(min_p=0.2),
    "all cuts": SamplingParams(temperature=1.6, top_k=5, top_p=0.9, min_p=0.25),
    "presence": SamplingParams(presence_penalty=0.8),
    "frequency": SamplingParams(frequency_penalty=0.6),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "favoured": SamplingParams(repetition_penalty=0.8, presence_penalty=-0.5),
    "bias": SamplingParams(logit_bias={6: 3.0, 1: -1.0}),
    "allowed": SamplingParams(allowed_token_ids=(2, 3, 6)),
    "min_tokens": SamplingParams(min_tokens=5),
    "everything": SamplingParams(
        temperature=1.3,
        top_k=5,
        top_p=0.95,
        min_p=0.05,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={4: 1.0},
        min_tokens=5,
    ),
}


def draws(params: SamplingParams, bad: tuple[tuple[int, ...], ...] = ()) -> list[RowContext]:
    base = context(params, HISTORY, prompt=2, ends=frozenset({3}), bad=bad)
    return [replace(base, seed=derive_seed(9, draw)) for draw in range(DRAWS)]


def tally(tokens: Sequence[int]) -> list[int]:
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)).tolist()


def many_rows() -> tuple[Tensor, list[RowContext]]:
    """Rows of every kind, of an odd vocabulary."""
    generator = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(3 * len(SETTINGS), 1003, generator=generator)
    rows = [
        context(params, HISTORY, prompt=2, ends=frozenset({3}), bad=((5, 7),), seed=seed)
        for seed in (1, 2)
        for params in SETTINGS.values()
    ]
    greedy = [replace(row, params=replace(row.params, temperature=0)) for row in rows]
    return logits, [*rows, *greedy[: len(SETTINGS)]]


# The law


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_follow_the_law(name: str) -> None:
    rows = draws(SETTINGS[name])
    logits = torch.tensor([LOGITS]).expand(DRAWS, -1)
    assert p_value(tally(choose(logits, rows)), law(LOGITS, rows[0])) > ALPHA


@pytest.mark.parametrize("bad", [((1,),), ((5, 1), (3, 5)), ((5, 5, 3), (1, 5, 5, 5))])
def test_tokens_follow_the_law_with_bad_words(bad: tuple[tuple[int, ...], ...]) -> None:
    rows = draws(SamplingParams(), bad)
    logits = torch.tensor([LOGITS]).expand(DRAWS, -1)
    assert p_value(tally(choose(logits, rows)), law(LOGITS, rows[0])) > ALPHA


def test_tokens_follow_the_law_over_positions_of_one_request() -> None:
    rows = [context(SamplingParams(), position=position) for position in range(DRAWS)]
    tokens = choose(torch.tensor([LOGITS]).expand(DRAWS, -1), rows)
    wanted = law(LOGITS, rows[0])
    assert p_value(tally(tokens), wanted) > ALPHA
    pairs = [7 * left + right for left, right in zip(tokens[::2], tokens[1::2], strict=True)]
    joint = [left * right for left in wanted for right in wanted]
    # Rare pairs are pooled: chi-square wants about five of each.
    common = [pair for pair in range(49) if joint[pair] * len(pairs) >= 5]
    counts = [pairs.count(pair) for pair in common]
    shares = [joint[pair] for pair in common]
    rest = len(pairs) - sum(counts)
    assert p_value([*counts, rest], [*shares, 1 - sum(shares)]) > ALPHA


def test_the_law_is_noticed_to_be_broken_by_a_little() -> None:
    rows = draws(SamplingParams())
    tokens = choose(torch.tensor([LOGITS]).expand(DRAWS, -1), rows)
    wrong = law([*LOGITS[:1], LOGITS[1] + 0.5, *LOGITS[2:]], rows[0])
    assert p_value(tally(tokens), wrong) < ALPHA
    assert p_value(tally(tokens), law(LOGITS, draws(SamplingParams(top_k=6))[0])) < ALPHA


# Independence of the batch


def independent_of_the_batch(chooser: Chooser) -> bool:
    logits, rows = many_rows()
    together = chooser(logits, rows)
    alone = [chooser(logits[at : at + 1], [row])[0] for at, row in enumerate(rows)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = chooser(logits[order], [rows[at] for at in order])
    return together == alone and shuffled == [together[at] for at in order]


def noise_by_row_index(logits: Tensor, rows: Sequence[RowContext]) -> list[int]:
    return choose(logits, [replace(row, seed=at) for at, row in enumerate(rows)])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    assert independent_of_the_batch(choose)


def test_noise_keyed_by_the_row_index_is_noticed() -> None:
    assert not independent_of_the_batch(noise_by_row_index)


def test_scores_have_the_same_bits_alone_and_together() -> None:
    logits, rows = many_rows()
    together = scores(logits, rows)
    for at, row in enumerate(rows):
        assert torch.equal(scores(logits[at : at + 1], [row])[0], together[at])


def test_given_counts_change_nothing() -> None:
    logits, rows = many_rows()
    counts = HistoryCounts(1003, 2)
    counts.advance(HISTORY[:4])
    assert choose(logits, [replace(row, counts=counts) for row in rows]) == choose(logits, rows)


def test_logits_are_not_written_to() -> None:
    logits, rows = many_rows()
    before = logits.clone()
    choose(logits, rows)
    assert torch.equal(logits, before)


# What is chosen is the best score


def test_the_choice_has_the_best_score() -> None:
    logits, rows = many_rows()
    assert argmax_rows(scores(logits, rows)).tolist() == choose(logits, rows)


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0, 30.0, 1e4])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("vocab", [7, 63, 64, 65, 640, 5003])
def test_screening_never_loses_the_best_token(
    spread: float, temperature: float, vocab: int
) -> None:
    logits = spread * torch.randn(60, vocab, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=temperature)
    rows = [context(params, position=position) for position in range(60)]
    assert choose(logits, rows) == argmax_rows(scores(logits, rows)).tolist()


def test_screening_that_was_too_narrow_falls_back_to_all_tokens() -> None:
    # Two tokens share nearly all probability: noise is often low, where its bound is loose.
    logits = torch.full((300, 640), -4.0)
    logits[:, [100, 500]] = torch.tensor([5.0, 4.9])
    rows = [context(SamplingParams(), position=position) for position in range(300)]
    field = NoiseField(640, "cpu")
    tempered = temper(logits, logits.amax(1), [row.params.temperature for row in rows])
    keys = [noise_key(row.seed, row.position) for row in rows]
    narrow = screen(tempered, keys, field, 1)
    trusted = replace(narrow, rest=torch.full_like(narrow.rest, -math.inf))
    assert winners(tempered, keys, trusted, field) != choose(logits, rows)
    assert winners(tempered, keys, narrow, field) == choose(logits, rows)


def test_uncut_scores_show_what_the_cuts_removed() -> None:
    logits = torch.tensor([LOGITS])
    row = context(SamplingParams(top_k=2, temperature=0.7))
    cut, uncut = scores(logits, [row])[0], scores(logits, [row], cut=False)[0]
    assert cut.isfinite().nonzero()[:, 0].tolist() == [1, 5]
    assert torch.equal(cut[[1, 5]], uncut[[1, 5]])
    difference = float(uncut[1] - uncut[3])
    noise = NoiseField(7, "cpu").gumbel(noise_key(row.seed, row.position))
    assert difference == pytest.approx((1.7 - 1.2) / 0.7 + float(noise[1] - noise[3]), abs=1e-5)


def test_greedy_scores_are_the_processed_logits() -> None:
    row = context(SamplingParams(temperature=0, logit_bias={2: 1.0}))
    assert scores(torch.tensor([[0.0, 1.0, 2.0]]), [row]).tolist() == [[0.0, 1.0, 3.0]]


# Edges


@pytest.mark.parametrize("bias", [{}, {9: 0.0}])
def test_greedy_ties_go_to_the_lowest_id(bias: dict[int, float]) -> None:
    logits = torch.zeros(1, 200)
    logits[0, [70, 64, 130, 199]] = 2.5
    row = context(SamplingParams(temperature=0, logit_bias=bias))
    assert choose(logits, [row]) == [64]


def test_greedy_does_not_read_seed_or_cuts() -> None:
    logits, _ = many_rows()
    params = SamplingParams(temperature=0, top_k=7, top_p=0.4, min_p=0.9)
    rows = [context(params, seed=seed) for seed in range(len(logits))]
    assert choose(logits, rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_a_tiny_temperature_takes_the_best(temperature: float) -> None:
    logits = 1e4 * torch.randn(20, 300, generator=torch.Generator().manual_seed(4))
    rows = [context(SamplingParams(temperature=temperature), seed=seed) for seed in range(20)]
    assert choose(logits, rows) == logits.argmax(-1).tolist()


def test_a_high_temperature_reaches_every_token() -> None:
    rows = [context(SamplingParams(temperature=100), seed=seed) for seed in range(400)]
    tokens = choose(torch.tensor([LOGITS]).expand(400, -1), rows)
    assert p_value(tally(tokens), law(LOGITS, rows[0])) > ALPHA
    assert min(tally(tokens)) > 20


def test_tokens_that_the_model_rules_out_are_never_chosen() -> None:
    logits = torch.full((200, 130), -torch.inf)
    logits[:, [3, 129]] = torch.tensor([-50.0, -50.5])
    rows = [context(SamplingParams(temperature=100), seed=seed) for seed in range(200)]
    assert set(choose(logits, rows)) == {3, 129}


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_p=0.9)])
def test_a_huge_vocabulary(params: SamplingParams) -> None:
    logits = 3 * torch.randn(2, 262_145, generator=torch.Generator().manual_seed(6))
    rows = [context(params, seed=1), context(params, seed=2)]
    assert choose(logits, rows) == argmax_rows(scores(logits, rows)).tolist()


def test_a_vocabulary_of_one_token() -> None:
    rows = [context(SamplingParams()), context(SamplingParams(temperature=0))]
    assert choose(torch.zeros(2, 1), rows) == [0, 0]


def test_no_rows() -> None:
    assert choose(torch.zeros(0, 9), []) == []


# Logits that are not numbers


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_is_reported_and_its_neighbours_are_untouched(
    name: str, temperature: float
) -> None:
    params = replace(SETTINGS[name], temperature=temperature)
    row = context(params, HISTORY, prompt=2, ends=frozenset({3}))
    logits = torch.tensor([LOGITS]).repeat(5, 1)
    logits[1, 4] = torch.nan
    logits[2, 6] = torch.inf
    logits[3] = -torch.inf
    good = choose(logits[:1], [row])[0]
    assert try_choose(logits, [row] * 5) == [good, UNCHOSEN, UNCHOSEN, UNCHOSEN, good]
    with pytest.raises(NumericalError, match=r"rows \[1, 2, 3\]"):
        choose(logits, [row] * 5)
    assert bool(scores(logits, [row] * 5)[1:4].isnan().all())


def test_allowed_tokens_that_the_model_rules_out_leave_nothing_to_choose() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    row = context(SamplingParams(allowed_token_ids=(1,)))
    assert try_choose(logits, [row]) == [UNCHOSEN]
