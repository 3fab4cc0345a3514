"""Kernels at odd sizes: the same bits for every cut, and nothing read that is not a token's own.

Whatever no token may look at is NaN here, so that one look would show.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.unit.backend.cuts import (
    Computes,
    Machine,
    Piece,
    Script,
    Setting,
    alone,
    one_by_one,
    padded,
    same_bits,
    sequences_of,
    shuffled,
    together,
    unpadded,
)
from tests.unit.backend.recurrences import NAN, Sizes, machine, played, setting_of
from tests.unit.backend.small import VOCAB, PagedAttention, Vectors, window_attention
from tests.unit.backend.tiled import KERNELS

HEAD_SIZES = (1, 3, 7, 20, 33, 64, 80, 128)
PAGE_TOKENS = (1, 5, 16, 32)
WINDOWS = (1, 2, 5, 16, 33)
BATCHES = range(10)
PER_BATCH = 15


def some_cuts(lengths: Sequence[int], depth: int, rng: random.Random) -> list[Script]:
    return [together(lengths), *(shuffled(lengths, depth, rng) for _ in range(2))]


def random_lengths(rng: random.Random, longest: int) -> list[int]:
    return [rng.randint(1, rng.choice((2, 17, longest))) for _ in range(rng.randint(1, 4))]


@pytest.mark.parametrize("batch", BATCHES)
def test_attention_has_the_same_bits_at_odd_sizes(batch: int) -> None:
    rng = random.Random(batch)
    for case in range(PER_BATCH):
        keys, group = rng.choice((1, 1, 2, 3)), 1 + case % 7
        vectors = Vectors.of(case, (keys * group, keys), rng.choice(HEAD_SIZES))
        lengths, depth = random_lengths(rng, 50), rng.choice((1, 4, 15))
        setting = Setting(
            sequences_of(case, VOCAB, lengths), rng.choice(PAGE_TOKENS), depth, garbage=NAN
        )
        models: Sequence[Computes] = (
            PagedAttention(vectors),
            window_attention(vectors, rng.choice(WINDOWS)),
        )
        for model in models:
            want = Machine(model, KERNELS, setting).play(alone(lengths))
            assert all(bool(out.isfinite().all()) for out in want)
            for place, script in enumerate(some_cuts(lengths, depth, rng)):
                pad = padded if place % 2 else unpadded
                assert same_bits(Machine(model, KERNELS, setting).play(script, pad), want), case


@pytest.mark.parametrize("batch", BATCHES)
def test_recurrent_layers_have_the_same_bits_at_odd_sizes(batch: int) -> None:
    rng = random.Random(batch)
    for case in range(PER_BATCH):
        keys, group = rng.choice((1, 1, 2)), 1 + case % 7
        sizes = rng.choice(HEAD_SIZES), rng.choice(HEAD_SIZES)
        block, lengths = rng.choice((4, 16, 32)), random_lengths(rng, 70)
        shape, depth = Sizes(keys, keys * group, *sizes, block), min(rng.choice((1, 4, 15)), block)
        setting = replace(setting_of(lengths, depth), garbage=NAN)
        want = played(machine(shape, setting, KERNELS), alone(lengths))
        assert all(bool(part.isfinite().all()) for part in want)
        for place, script in enumerate(some_cuts(lengths, depth, rng)):
            pad = padded if place % 2 else unpadded
            assert same_bits(played(machine(shape, setting, KERNELS), script, pad), want), case


def in_chunks(length: int, size: int) -> Script:
    return [[Piece(0, at, min(size, length - at))] for at in range(0, length, size)]


@pytest.mark.parametrize("kind", ["paged", "window"])
def test_attention_has_the_same_bits_where_long_rows_make_tiles_narrow(kind: str) -> None:
    """Scores of 9 heads and 1,500 keys fill a tile after 4 tokens, those of 300 keys after 16."""
    vectors, length = Vectors.of(1, (9, 1), 3), 1500
    paged, window = PagedAttention(vectors), window_attention(vectors, 1400)
    model: Computes = paged if kind == "paged" else window
    setting = Setting(sequences_of(1, VOCAB, [length]), 16, garbage=NAN)
    want = Machine(model, KERNELS, setting).play(alone([length]))
    for size in (7, 100, 512):
        assert same_bits(Machine(model, KERNELS, setting).play(in_chunks(length, size)), want), size


def test_one_by_one_is_a_cut_like_any_other() -> None:
    vectors = Vectors.of(1, (7, 1), 33)
    setting = Setting(sequences_of(1, VOCAB, [200, 90]), 5, garbage=NAN)
    want = Machine(PagedAttention(vectors), KERNELS, setting).play(alone(setting.lengths))
    got = Machine(PagedAttention(vectors), KERNELS, setting).play(one_by_one(setting.lengths))
    assert same_bits(got, want)


def test_nan_where_a_token_may_look_is_seen() -> None:
    """Otherwise nothing above would show that nothing else is read."""
    vectors = Vectors.of(1, (4, 2), 7)
    on = Machine(PagedAttention(vectors), KERNELS, Setting([[1] * 12], 5, garbage=NAN))
    on.play([[Piece(0, 0, 11)]])
    on.pools.paged("kv", "k")[:, on.tables[0][1], :, 2] = NAN
    assert bool(torch.cat(on.play([[Piece(0, 11, 1)]])).isnan().all())
