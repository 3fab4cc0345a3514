"""The choice of entries, and attention over chosen positions, on the device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import STRICT, EmulatedVendor, RefusedError
from surefoot.backend.ascend.limits import beyond_limits
from surefoot.backend.operands import CacheShape, LatentPages, RowLayout
from surefoot.backend.protocol import Backend
from surefoot.backend.reference import ReferenceBackend
from tests.unit.backend.ascend.emulated import (
    NARROW,
    EmulatedBackend,
    EmulatedRows,
    Recorded,
    step_of,
)
from tests.unit.backend.cuts import same_bits
from tests.unit.backend.layouts import Case, case_of

NAN = float("nan")
seen = pytest.mark.parametrize("bounded", [False, True], ids=["everything", "less"])


def layout_of(case: Case, bounded: bool) -> RowLayout:
    """That of the case, whose rows see everything or what they see there."""
    layout = case.layout
    return layout if bounded else replace(layout, visible_from=(0,) * len(layout.first))


@dataclass(frozen=True)
class Choice:
    """Whole numbers and few of them, so that sums are exact and most scores are tied."""

    case: Case
    q: Tensor
    weights: Tensor
    pool: Tensor
    ratio: int
    count: int

    @staticmethod
    def of(seed: int, size: int, bounded: bool) -> Choice:
        case, rng = case_of(seed), random.Random(seed)
        case = replace(case, layout=layout_of(case, bounded))
        ratio = rng.choice([n for n in (1, 2, 4) if case.layout.page_tokens % n == 0])
        heads, draws = rng.randint(1, 9), case.draws
        shape = case.pages, case.layout.page_tokens // ratio, size
        pool = torch.randint(-2, 3, shape, generator=draws).to(NARROW)
        owned = {page for table in case.layout.tables for page in table}
        pool[[page for page in range(case.pages) if page not in owned]] = NAN
        q = torch.randint(-2, 3, (case.tokens, heads, size), generator=draws).to(NARROW)
        weights = torch.randint(-1, 2, (case.tokens, heads), generator=draws).float()
        return Choice(case, q, weights, pool, ratio, rng.randint(1, 9))

    def by(self, backend: Backend) -> Tensor:
        rows = backend.rows(self.case.layout)
        return rows.choose_entries(self.q, self.weights, self.pool, self.ratio, self.count)


CHOICES = range(20)


@seen
@pytest.mark.parametrize("seed", CHOICES)
def test_the_choice_is_that_of_the_reference(seed: int, bounded: bool) -> None:
    """The emulation leaves the highest of equal entries out, as the reference does."""
    choice = Choice.of(seed, 8, bounded)
    assert torch.equal(choice.by(EmulatedBackend()), choice.by(ReferenceBackend()))


class AllSeen(EmulatedRows):
    """Planted: there is no bound from below."""

    def _unseen(self, ratio: int) -> Tensor:
        return torch.zeros_like(super()._unseen(ratio))


class BegunEntries(EmulatedRows):
    """Planted: an entry that begins below the bound and ends above it is seen."""

    def _unseen(self, ratio: int) -> Tensor:
        unseen: Tensor = self.places.visible_from // ratio
        return unseen


class NotMoved(EmulatedRows):
    """Planted: as many entries as are seen, but the first ones."""

    def _moved_up(self, pool: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        return pool, self.derived.tables


class OnPageEdges(EmulatedRows):
    """Planted: pages are moved, and not what lies on them."""

    def _moved_up(self, pool: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        places = self.places
        from_edge = places.visible_from // places.page_tokens * places.page_tokens
        with patch.object(places, "visible_from", from_edge):
            return super()._moved_up(pool, ratio)


class MovedNone(EmulatedRows):
    """Planted: -1 is moved too, and is an entry then."""

    def choose_entries(self, *given: Any) -> Tensor:
        chosen, unseen = super().choose_entries(*given), self._unseen(given[3])
        none = self.derived.of_rows(unseen)[:, None] - 1
        return torch.where(chosen < 0, none, chosen)


FAULTS = (AllSeen, BegunEntries, NotMoved, OnPageEdges, MovedNone)


@pytest.mark.parametrize("rows", FAULTS, ids=lambda rows: rows.__name__)
def test_a_bound_that_is_not_kept_is_found(rows: type[EmulatedRows]) -> None:
    backend = EmulatedBackend()
    backend.made = rows
    choices = [Choice.of(seed, 8, True) for seed in CHOICES]
    wrong = [not torch.equal(each.by(backend), each.by(ReferenceBackend())) for each in choices]
    assert sum(wrong) > 2
    unbounded = [Choice.of(seed, 8, False) for seed in CHOICES]
    assert all(torch.equal(each.by(backend), each.by(ReferenceBackend())) for each in unbounded)


@seen
def test_a_legal_block_of_entries_is_needed(bounded: bool) -> None:
    """Pages of 64 tokens hold 16 entries of 4, of which the operator wants multiples."""
    cases = (case_of(n) for n in range(1, 99))
    case = next(each for each in cases if each.layout.page_tokens == 64 and any_bound(each))
    layout, draws = layout_of(case, bounded), torch.Generator().manual_seed(1)
    rows = EmulatedBackend(EmulatedVendor(STRICT)).rows(layout)
    q = torch.randn(case.tokens, 8, 128, generator=draws).to(NARROW)
    weights = torch.rand(case.tokens, 8, generator=draws)
    pool = torch.randn(case.pages, 16, 128, generator=draws).to(NARROW)
    got = rows.choose_entries(q, weights, pool, 4, 512)
    want = ReferenceBackend().rows(layout).choose_entries(q, weights, pool, 4, 512)
    assert torch.equal(got, want)
    with pytest.raises(RefusedError, match="block size"):
        rows.choose_entries(q, weights, pool[:, :8].contiguous(), 8, 512)


def any_bound(case: Case) -> bool:
    """Whether some row of the case sees less than all."""
    return any(case.layout.visible_from)


# Attention. What it computes is held to the reference by `test_conformance`.


def latent_pages(pages: int, page_tokens: int, sizes: tuple[int, int], seed: int) -> LatentPages:
    """Random pages, and a sink that is no number."""
    draws = torch.Generator().manual_seed(seed)
    pools = [torch.randn(pages, page_tokens, size, generator=draws).to(NARROW) for size in sizes]
    for pool in pools:
        pool[0] = NAN
    return LatentPages(*pools)


@pytest.mark.parametrize("heads", [3, 8, 128])
def test_any_number_of_heads_is_within_the_limits(heads: int) -> None:
    """The operator takes powers of two only, and one size of latents and of turned keys."""
    layout, sizes = RowLayout((0, 3), (20,), ([2, 1],), (1,), (4,), (20,), (23,), 16), (512, 64)
    draws = torch.Generator().manual_seed(2)
    q, turned = (torch.randn(3, heads, size, generator=draws).to(NARROW) for size in sizes)
    keys = latent_pages(3, 16, sizes, seed=3)
    rows = EmulatedBackend(EmulatedVendor(STRICT)).rows(layout)
    chosen = torch.tensor([[4, 9, 20], [5, -1, -1], [-1, -1, -1]])
    wide = LatentPages(keys.values.float(), keys.turned.float())
    plain = ReferenceBackend().rows(layout)
    for looked_at in (chosen, None):
        got = rows.attend_chosen(q, turned, keys, looked_at, 0.05)
        want = plain.attend_chosen(q.float(), turned.float(), wide, looked_at, 0.05)
        assert got.dtype == NARROW
        torch.testing.assert_close(got.float(), want, rtol=2**-8, atol=2**-8)
    half = LatentPages(keys.values[..., :256].contiguous(), keys.turned)
    with pytest.raises(RefusedError, match="qk_head_dim only support 512"):
        rows.attend_chosen(q[..., :256], turned, half, chosen, 0.05)


LEGAL = (("index", 128), ("turned", 64), ("values", 512))


def test_other_sizes_are_named_when_the_plan_is_made() -> None:
    legal = [CacheShape("paged", 1, part, (size,)) for part, size in LEGAL]
    assert beyond_limits(legal, 128) == []
    halves = [replace(cache, shape=(cache.shape[0] // 2,)) for cache in legal]
    assert beyond_limits(halves, 128) == [
        "index keys must have 128 numbers, not 64",
        "turned keys must have 64 numbers, not 32",
        "latents must have 512 numbers, not 256",
    ]


@pytest.mark.parametrize("count", [2, 4])
def test_a_choice_of_more_or_fewer_rows_is_an_error(count: int) -> None:
    layout = RowLayout((0, 3), (5,), ([1],), (1,), (0,), (5,), (8,), 16)
    rows, keys = EmulatedBackend().rows(layout), latent_pages(2, 16, (8, 4), seed=4)
    q, turned = torch.zeros(3, 2, 8).to(NARROW), torch.zeros(3, 2, 4).to(NARROW)
    chosen = torch.zeros(count, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=f"{count} rows of chosen positions came for 3"):
        rows.attend_chosen(q, turned, keys, chosen, 1.0)


def test_no_tokens_attend_to_nothing() -> None:
    rows = EmulatedBackend().rows(RowLayout((0,), (), (), (), (), (), (), 16))
    q, turned = torch.zeros(0, 2, 8).to(NARROW), torch.zeros(0, 2, 4).to(NARROW)
    keys = latent_pages(2, 16, (8, 4), seed=4)
    chosen = torch.zeros(0, 4, dtype=torch.long)
    for looked_at in (chosen, None):
        assert rows.attend_chosen(q, turned, keys, looked_at, 1.0).shape == (0, 2, 8)


LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_kv")
STEPS: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[int], list[int]]] = {
    "prefill": ((0, 7, 12), (0, 16), [7, 12], [7, 21]),
    "decode": ((0, 1, 2, 3), (5, 40, 0), [1, 2, 3], [6, 41, 1]),
    "verify": ((0, 4, 8, 12), (5, 40, 9), [4, 8, 12], [9, 44, 13]),
    # A row that was cut short is left out, for the running sums and for the lengths alike.
    "a row without tokens": ((0, 4, 4, 5), (5, 40, 9), [4, 5], [9, 10]),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_operator_is_told_the_true_lengths(name: str) -> None:
    """Running sums of queries, and keys up to and including what the step has written."""
    starts, first, ends, lengths = STEPS[name]
    count, tokens, told = len(first), starts[-1], dict[str, Tensor]()
    attend = EmulatedVendor.npu_sparse_flash_attention

    def noted(self: EmulatedVendor, *given: Any, **named: Any) -> Any:
        told.update({key: named[key] for key in LENGTHS})
        return attend(self, *given, **named)

    tables = tuple([3 * row + 1, 3 * row + 2, 3 * row + 3] for row in range(count))
    settles = tuple(range(count))
    zeros = (0,) * count
    layout = RowLayout(starts, first, tables, tuple(range(1, count + 1)), zeros, first, settles, 16)
    keys, chosen = latent_pages(10, 16, (8, 4), seed=5), torch.zeros(tokens, 2, dtype=torch.long)
    chosen[:, 1] = -1
    q, turned = torch.zeros(tokens, 2, 8).to(NARROW), torch.zeros(tokens, 2, 4).to(NARROW)
    with patch.object(EmulatedVendor, "npu_sparse_flash_attention", noted):
        EmulatedBackend().rows(layout).attend_chosen(q, turned, keys, chosen, 1.0)
    assert [told[key].tolist() for key in LENGTHS] == [ends, lengths]
    assert all(told[key].dtype == torch.int32 for key in LENGTHS)


@seen
def test_recorded_steps_have_the_bits_of_eager_ones(bounded: bool) -> None:
    """Padding reads nothing: what is in the sink is no number, and what comes out is zero."""
    draws, tokens, sizes = torch.Generator().manual_seed(6), 33, (16, 8)
    q, turned = (torch.zeros(tokens, 4, size).to(NARROW) for size in sizes)
    keys, index = latent_pages(60, 16, sizes, seed=7), torch.zeros(60, 16, 16).to(NARROW)

    def work(rows: EmulatedRows) -> Sequence[Tensor]:
        some = slice(rows.places.tokens)
        chosen = rows.choose_entries(q[some], q[some].float().sum(-1), index, 1, 6)
        return [
            rows.attend_chosen(q[some], turned[some], keys, looked_at, 0.25)
            for looked_at in (chosen, None)
        ]

    recorded, replayed = Recorded(8, 4, 16, 20, work, bounded), 0
    for seed in range(400):
        case = case_of(seed)
        lengths = [case.layout.length(row) for row in range(len(case.layout.first))]
        if case.layout.page_tokens != 16 or max(lengths, default=5) > 4 or len(lengths) > 8:
            continue
        layout = layout_of(case, bounded)
        for part in (q, turned, index, keys.values[1:], keys.turned[1:]):
            part.copy_(torch.randn(part.shape, generator=draws))
        outputs = recorded.replay(step_of(layout))
        assert all(not out[case.tokens :].any() for out in outputs)
        got = [out[: case.tokens].clone() for out in outputs]
        assert same_bits(got, work(EmulatedBackend().rows(layout)))
        replayed += 1
    assert replayed > 3
