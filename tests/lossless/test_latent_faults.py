"""What could go wrong with the caches of DeepSeek V4, planted: every fault is noticed.

Beside each fault is the same run without it, since what finds faults everywhere finds nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from surefoot.backend.operands import Compression, Entries, Latents, RowLayout
from surefoot.backend.plain_latents import Token, tokens_of
from surefoot.backend.reference import ReferenceBackend
from surefoot.backend.reference_rows import ReferenceRows
from surefoot.model.deepseek_v4 import Block, LatentModel
from surefoot.model.layers.attention import Angles
from surefoot.model.layers.latent import RawRows
from surefoot.state.ledger import Save, Work
from surefoot.state.plan import MemoryPlan
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec
from surefoot.step import Batch
from tests.lossless.harness import LATENTS, PROMPTS, VOCAB, Bench, drain
from tests.lossless.poison import poison
from tests.lossless.test_hybrid_state import SCORED, RightUpTo, engine_of, plain
from tests.unit.backend.cuts import (
    Machine,
    Script,
    Setting,
    alone,
    one_by_one,
    rejecting,
    same_bits,
    sequences_of,
)
from tests.unit.model.models import Logits

DEPTH = 8
RATIOS = {"sparse": 4, "heavy": 16}
# Nothing is spoiled between steps: what is stale looks like the truth.
SETTING = Setting(sequences_of(2, VOCAB, (48, 48)), page_tokens=16, depth=DEPTH, dirty=False)
LENGTHS = SETTING.lengths
CUTS: dict[str, Script] = {
    "whole": alone(LENGTHS),
    "one by one": one_by_one(LENGTHS),
    "rejecting": rejecting(LENGTHS, DEPTH),
}
kinds = pytest.mark.parametrize("kind", RATIOS)


@pytest.fixture(scope="module")
def model(bench: Bench) -> LatentModel:
    model = bench.target(LATENTS).model
    assert isinstance(model, LatentModel)
    return model


# Entries that nobody may see yet, or any more; entries in the wrong place.


class SeesMore(ReferenceRows):
    """Tokens see more entries of one ratio than are theirs."""

    def __init__(self, layout: RowLayout, ratio: int, seen: Callable[[Token], int]) -> None:
        """Of `ratio`; `seen` says how many entries a token sees."""
        super().__init__(layout)
        self.ratio, self.seen = ratio, seen

    def choose_entries(
        self, q: Tensor, weights: Tensor, pool: Tensor, ratio: int, count: int
    ) -> Tensor:
        """See RowOperators; each token is put where it rightly sees so much."""
        if ratio != self.ratio:
            return super().choose_entries(q, weights, pool, ratio, count)
        chosen = []
        for token in tokens_of(self.layout):
            last = self.seen(token) * ratio - 1
            table = self.layout.tables[token.row]
            there = replace(self.layout, starts=(0, 1), first=(last,), tables=(table,))
            own = slice(token.place, token.place + 1)
            step = ReferenceRows(there)
            chosen.append(step.choose_entries(q[own], weights[own], pool, ratio, count))
        return torch.cat(chosen)

    def attend_latents(
        self, q: Tensor, latents: Latents, entries: Entries | None, sinks: Tensor, scale: float
    ) -> Tensor:
        """See RowOperators."""
        if entries is not None and entries.ratio == self.ratio and entries.chosen is None:
            seen = torch.tensor([self.seen(token) for token in tokens_of(self.layout)])
            numbers = torch.arange(int(seen.max()))[None]
            entries = replace(entries, chosen=numbers.where(numbers < seen[:, None], -1))
        return super().attend_latents(q, latents, entries, sinks, scale)


class Misplaces(ReferenceRows):
    """Entries of one ratio go to the page before the right one; those of the first to the last."""

    def __init__(self, layout: RowLayout, ratio: int) -> None:
        super().__init__(layout)
        self.ratio = ratio

    def compress(self, raw: Tensor, ring: Tensor, pool: Tensor, form: Compression) -> None:
        """See RowOperators."""
        tables = tuple((table[-1], *table[:-1]) for table in self.layout.tables)
        wrong = replace(self.layout, tables=tables)
        layout = wrong if form.ratio == self.ratio else self.layout
        ReferenceRows(layout).compress(raw, ring, pool, form)


Rows = Callable[[RowLayout], ReferenceRows]
Fault = Callable[[int], Rows]


class Misled(ReferenceBackend):
    """The plain row operators, or faulty ones."""

    def __init__(self, rows: Rows = ReferenceRows) -> None:
        super().__init__()
        self._rows = rows

    def rows(self, layout: RowLayout) -> ReferenceRows:
        """See Backend."""
        return self._rows(layout)


def closing(ratio: int) -> Rows:
    """No fault: a token sees the windows that have closed up to it."""
    return lambda layout: SeesMore(layout, ratio, lambda token: (token.position + 1) // ratio)


def early(ratio: int) -> Rows:
    """An entry is seen from the first position of its window on."""
    return lambda layout: SeesMore(layout, ratio, lambda token: token.position // ratio + 1)


class Stale:
    """Windows that were closed once stay visible, whatever was rejected."""

    def __init__(self, ratio: int) -> None:
        self._ratio = ratio
        self._reach: dict[int, int] = {}

    def __call__(self, layout: RowLayout) -> ReferenceRows:
        before, ratio = dict(self._reach), self._ratio
        for row, slot in enumerate(layout.slots):
            end = layout.first[row] + layout.length(row)
            self._reach[slot] = max(end, before.get(slot, 0))

        def seen(token: Token) -> int:
            return max(token.position + 1, before.get(layout.slots[token.row], 0)) // ratio

        return SeesMore(layout, ratio, seen)


def misplaced(ratio: int) -> Rows:
    """An entry goes to the page before its own."""
    return lambda layout: Misplaces(layout, ratio)


@pytest.fixture(scope="module")
def truth(model: LatentModel) -> list[Tensor]:
    """Logits with plain row operators, of each sequence alone and whole."""
    return Machine(Logits(model), Misled(), SETTING).play(CUTS["whole"])


def caught(model: LatentModel, truth: Sequence[Tensor], fault: Fault, kind: str) -> list[str]:
    """The cuts whose logits are not the true ones."""
    return [
        name
        for name, script in CUTS.items()
        if not same_bits(
            Machine(Logits(model), Misled(fault(RATIOS[kind])), SETTING).play(script), truth
        )
    ]


@kinds
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (closing, []),
        (early, ["whole", "one by one", "rejecting"]),
        # Nothing is stale where no drafts are rejected.
        (Stale, ["rejecting"]),
        (misplaced, ["whole", "one by one", "rejecting"]),
    ],
)
def test_entries_seen_early_or_late_or_written_elsewhere_are_caught(
    fault: Fault, found: list[str], kind: str, model: LatentModel, truth: list[Tensor]
) -> None:
    assert caught(model, truth, fault, kind) == found


def test_a_page_that_two_requests_share_is_caught(bench: Bench, model: LatentModel) -> None:
    def outputs(shared: bool) -> list[Tensor]:
        machine = Machine(Logits(model), bench.target(LATENTS).backend, SETTING)
        if shared:
            machine.tables[1][2] = machine.tables[0][2]
        return machine.play(CUTS["one by one"])

    want, got = outputs(shared=False), outputs(shared=True)
    assert not same_bits(got, want)
    assert same_bits([part[:35] for part in got], [part[:35] for part in want])


# A bias of another place in the window.


@dataclass(frozen=True)
class BiasByStep(RawRows):
    """Places are counted from the start of the step."""

    def __call__(
        self, x: Tensor, angles: Angles, batch: Batch, caches: tuple[Tensor, Tensor]
    ) -> None:
        """See RawRows."""
        batch = replace(batch, positions=torch.arange(len(batch.positions)))
        super().__call__(x, angles, batch, caches)


def biased_by_step(raw: RawRows) -> RawRows:
    return BiasByStep(raw.form, raw.product, raw.bias, raw.norm, raw.eps, raw.backend)


def biased_one_late(raw: RawRows) -> RawRows:
    return replace(raw, bias=raw.bias.roll(1, 0))


def unchanged(raw: RawRows) -> RawRows:
    return replace(raw)


def with_raw(model: LatentModel, change: Callable[[RawRows], RawRows], part: str) -> LatentModel:
    """The model with other raw rows of the entries, or of their keys."""

    def changed(block: Block) -> Block:
        attention = block.attention
        if part == "kv" and attention.raw is not None:
            attention = replace(attention, raw=change(attention.raw))
        if part == "index" and attention.indexer is not None:
            keys = change(attention.indexer.keys)
            attention = replace(attention, indexer=replace(attention.indexer, keys=keys))
        return replace(block, attention=attention)

    faulty = copy.copy(model)
    faulty._blocks = [changed(block) for block in model._blocks]
    return faulty


@pytest.mark.parametrize("part", ["kv", "index"])
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (unchanged, []),
        (biased_one_late, ["whole", "one by one", "rejecting"]),
        (biased_by_step, ["one by one", "rejecting"]),
    ],
)
def test_a_bias_of_the_wrong_place_is_caught(
    change: Callable[[RawRows], RawRows],
    found: list[str],
    part: str,
    bench: Bench,
    model: LatentModel,
) -> None:
    backend = bench.target(LATENTS).backend
    want = Machine(Logits(model), backend, SETTING).play(CUTS["whole"])
    faulty = Logits(with_raw(model, change, part))
    wrong = [
        name
        for name, script in CUTS.items()
        if not same_bits(Machine(faulty, backend, SETTING).play(script), want)
    ]
    assert wrong == found


# What resume points hold, and what they need not.


class LossyPools(Pools):
    """A ring of every slot row is filled with `value` when the row is cleared or restored."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        plan: MemoryPlan,
        device: torch.device,
        lost: tuple[str, str] = ("", ""),
        value: float = 0.0,
    ) -> None:
        super().__init__(specs, plan, device)
        self._lost = self._rows.get(lost)
        self._value = value

    def apply(self, work: Work) -> None:
        """See Pools; zeros are what a row holds that was cleared and not restored."""
        super().apply(Work(work.clear_pages, []))
        for move in work.moves:
            super().apply(Work([], [move]))
            if self._lost is not None and not isinstance(move, Save):
                self._lost[:, move.slot] = self._value


def next_turn_differs(bench: Bench, right: int, pools: Callable[..., Pools]) -> bool:
    """Whether a turn that resumes behind another one's tokens is not that of a plain run.

    With right drafts, the row that crosses the point's boundary goes on behind it.
    """
    params = replace(SCORED, max_tokens=32)
    known = plain(bench, LATENTS, PROMPTS[0], params)
    follow = [*known.tokens, 1, 2]
    want = plain(bench, LATENTS, follow, params)
    drafter = RightUpTo(known.output, right)
    with patch("surefoot.engine.assemble.Pools", pools):
        engine = engine_of(bench, LATENTS, drafter, DEPTH)
    [first] = engine.submit(PROMPTS[0], params)
    drain(engine)
    assert (first.output, first.logprobs) == (known.output, known.logprobs)
    drafter.answer = want.output
    # A slot that the next request finds as the last one left it may be right by chance.
    poison(engine, "nan")
    [second] = engine.submit(follow, params)
    drain(engine)
    assert second.cached_tokens == 64
    return (second.output, second.logprobs) != (want.output, want.logprobs)


drafted = pytest.mark.parametrize("right", [0, 5, DEPTH])


@drafted
@pytest.mark.parametrize("lost", [("window", "kv"), ("sparse.raw", "kv"), ("sparse.raw", "index")])
def test_a_ring_that_is_lost_on_resume_is_caught(
    lost: tuple[str, str], right: int, bench: Bench
) -> None:
    """Pages end with a window of either ratio, and yet the next entry reads the one before."""
    assert next_turn_differs(bench, right, partial(LossyPools, lost=lost))


@drafted
def test_raw_rows_without_overlap_need_not_be_saved(right: int, bench: Bench) -> None:
    assert not next_turn_differs(bench, right, LossyPools)
    lost = partial(LossyPools, lost=("heavy.raw", "kv"), value=torch.nan)
    assert not next_turn_differs(bench, right, lost)
