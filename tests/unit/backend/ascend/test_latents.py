"""Windows, compressed entries and the choice among them, on the device."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend import latents as module
from surefoot.backend.ascend.emulate import STRICT, EmulatedVendor, RefusedError
from surefoot.backend.operands import Compression, Entries, Latents
from surefoot.backend.plain_latents import PlainLatentRows
from surefoot.backend.protocol import Backend
from surefoot.backend.reference import ReferenceBackend
from surefoot.ids import SlotId
from surefoot.model.layers.rotary import make_rotary
from surefoot.state.pool import Pools
from surefoot.state.spec import Held, Paged, Part, Ring
from surefoot.step import Batch, Row, Step
from tests.unit.backend.ascend.emulated import (
    HALF_STEP,
    NARROW,
    EmulatedBackend,
    EmulatedRows,
    Recorded,
    step_of,
)
from tests.unit.backend.conformance import TOLERANCE, differing, window_attention
from tests.unit.backend.conformance_latents import attend_latents, compress
from tests.unit.backend.cuts import Setting, differing_cuts, same_bits, sequences_of
from tests.unit.backend.layouts import Case, case_of
from tests.unit.backend.small import Vectors, WindowAttention
from tests.unit.backend.small import window_attention as windows

VOCAB = 50
NAN = float("nan")


class Chosen(EmulatedBackend):
    """Chooses as the reference does: the vendor's operator takes no float32."""

    class Rows(EmulatedRows):
        choose_entries = PlainLatentRows.choose_entries

    made = Rows


Run = Callable[[Backend, int], Sequence[Tensor]]


def entries(backend: Backend, seed: int) -> Sequence[Tensor]:
    """What `compress` makes, but for the sink."""
    return [pool[1:] for pool in compress(backend, seed)]


@pytest.mark.parametrize("run", [entries, attend_latents, window_attention])
@pytest.mark.parametrize(
    "seed", [*range(7), *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(7, 20))]
)
def test_they_are_those_of_the_reference(run: Run, seed: int) -> None:
    assert differing(run(Chosen(), seed), run(ReferenceBackend(), seed)) == []


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
    def of(seed: int, size: int) -> Choice:
        case, rng = case_of(seed), random.Random(seed)
        everything = (0,) * len(case.layout.first)
        case = replace(case, layout=replace(case.layout, visible_from=everything))
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


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_that_of_the_reference(seed: int) -> None:
    """The emulation leaves the highest of equal entries out, as the reference does."""
    choice = Choice.of(seed, 8)
    assert torch.equal(choice.by(EmulatedBackend()), choice.by(ReferenceBackend()))


def test_a_legal_block_of_entries_is_needed() -> None:
    """Pages of 64 tokens hold 16 entries of 4, of which the operator wants multiples."""
    seed = next(n for n in range(99) if case_of(n).layout.page_tokens == 64 and n)
    case, draws = case_of(seed), torch.Generator().manual_seed(1)
    rows = EmulatedBackend(EmulatedVendor(STRICT)).rows(case.layout)
    q = torch.randn(case.tokens, 8, 128, generator=draws).to(NARROW)
    weights = torch.rand(case.tokens, 8, generator=draws)
    pool = torch.randn(case.pages, 16, 128, generator=draws).to(NARROW)
    got = rows.choose_entries(q, weights, pool, 4, 512)
    want = ReferenceBackend().rows(case.layout).choose_entries(q, weights, pool, 4, 512)
    assert torch.equal(got, want)
    with pytest.raises(RefusedError, match="block size"):
        rows.choose_entries(q, weights, pool[:, :8].contiguous(), 8, 512)


@dataclass(frozen=True)
class LatentLayer:
    """All of a compressed layer; what goes in depends on the token id alone.

    Attributes:
        backend: makes angles.
        q: [VOCAB, H, D], queries of attention and of the choice.
        own: [VOCAB, D] latents.
        raw: [VOCAB, 4 D] float32 raw rows, of windows that overlap.
        all_seen: whether every entry is looked at and none is chosen.
    """

    backend: EmulatedBackend
    q: Tensor
    own: Tensor
    raw: Tensor
    all_seen: bool

    size, window, ratio, count = 16, 5, 4, 3

    @classmethod
    def of(cls, backend: EmulatedBackend, all_seen: bool) -> LatentLayer:
        draws, size = torch.Generator().manual_seed(6), cls.size
        shapes = (VOCAB, 4, size), (VOCAB, size), (VOCAB, 4 * size)
        q, own, raw = (torch.randn(*shape, generator=draws) for shape in shapes)
        return cls(backend, q.to(NARROW), own.to(NARROW), raw, all_seen)

    @property
    def caches(self) -> Sequence[Paged | Ring]:
        size, window, raw = self.size, self.window, 2 * self.ratio
        return (
            Ring("window", 1, (Part("kv", (size,), "bfloat16"),), window, Held(window)),
            Ring("raw", 1, (Part("kv", (4 * size,), "float32"),), raw, Held(raw)),
            Paged("entries", 1, (Part("kv", (size,), "bfloat16"),), self.ratio),
        )

    def compute(self, batch: Batch, pools: Pools) -> Tensor:
        names = ("window", "raw")
        ring, raw_ring = (pools.rows(name, "kv")[0] for name in names)
        pool, ratio, rows = pools.paged("entries", "kv")[0], self.ratio, batch.rows
        q, own, raw = (part[batch.tokens] for part in (self.q, self.own, self.raw))
        begins = batch.positions // ratio * ratio
        angles = make_rotary(self.size, 10000.0, None).on(self.backend)(begins)
        form = Compression(ratio, True, torch.ones(self.size), 1e-6, *angles)
        rows.compress(raw, raw_ring, pool, form)
        rows.ring_write(raw_ring, raw)
        weights = q.float().sum(-1).abs()
        chosen = rows.choose_entries(q, weights, pool, ratio, self.count)
        entries = Entries(pool, ratio, None if self.all_seen else chosen)
        latents = Latents(own, ring, self.window)
        out = rows.attend_latents(q, latents, entries, torch.zeros(q.shape[1]), self.size**-0.5)
        rows.ring_write(ring, own)
        return out


def setting(garbage: float = NAN) -> Setting:
    return Setting(sequences_of(3, VOCAB, (21, 10, 1)), page_tokens=8, garbage=garbage)


seen = pytest.mark.parametrize("all_seen", [False, True], ids=["chosen", "all seen"])


@seen
def test_every_cut_has_the_same_bits(all_seen: bool) -> None:
    backend = EmulatedBackend()
    assert differing_cuts(LatentLayer.of(backend, all_seen), backend, setting(), seed=1) == []


def test_windows_have_the_same_bits_for_every_cut() -> None:
    layer: WindowAttention = windows(Vectors.of(2, (4, 2), 16), 5)
    assert differing_cuts(layer, EmulatedBackend(), setting(), seed=1) == []


@seen
def test_long_steps_are_cut_without_a_trace(
    all_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, draws = case_of(3), torch.Generator().manual_seed(5)
    q, own = (torch.randn(case.tokens, *shape, generator=draws) for shape in ((4, 16), (16,)))
    ring = torch.randn(case.slots, 40, 16, generator=draws)
    pool = torch.randn(case.pages, case.layout.page_tokens // 2, 16, generator=draws)
    rows = Chosen().rows(case.layout)
    chosen = None if all_seen else rows.choose_entries(q, q.sum(-1), pool, 2, 150)
    latents, looked_at = Latents(own, ring, 33), Entries(pool, 2, chosen)
    whole = rows.attend_latents(q, latents, looked_at, torch.zeros(4), 0.25)
    monkeypatch.setattr(module, "_NUMBERS", 3 * 128 * 16)
    assert len(rows._slices(33, 16)) == -(-case.tokens // 3) > 2
    again = rows.attend_latents(q, latents, looked_at, torch.zeros(4), 0.25)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("seed", range(1, 9))
def test_bfloat16_is_rounded_once(seed: int) -> None:
    """Scores and sums are float32, so the output's own rounding is nearly all that is wrong."""
    case = case_of(seed)
    size, ratio = 16, 2
    q, own, ring, pool = (
        torch.randn(*shape, generator=case.draws).to(NARROW)
        for shape in (
            (case.tokens, 4, size),
            (case.tokens, size),
            (case.slots, case.window + 2, size),
            (case.pages, case.layout.page_tokens // ratio, size),
        )
    )
    sinks = torch.randn(4, generator=case.draws)
    latents, entries = Latents(own, ring, case.window), Entries(pool, ratio, None)
    got = EmulatedBackend().rows(case.layout).attend_latents(q, latents, entries, sinks, 0.25)
    wide = Latents(own.float(), ring.float(), case.window), Entries(pool.float(), ratio, None)
    want = ReferenceBackend().rows(case.layout).attend_latents(q.float(), *wide, sinks, 0.25)
    assert got.dtype == NARROW
    torch.testing.assert_close(got.float(), want, rtol=HALF_STEP, atol=TOLERANCE)


@seen
def test_recorded_steps_have_the_bits_of_eager_ones(all_seen: bool) -> None:
    """A recording looks at tables as long as they may be, and finds nothing more."""
    draws, size, tokens = torch.Generator().manual_seed(5), 16, 33
    q, own = torch.zeros(tokens, 4, size).to(NARROW), torch.zeros(tokens, size).to(NARROW)
    raw, held = torch.zeros(tokens, 4 * size), torch.zeros(12, 10, size).to(NARROW)
    raws, pool = torch.zeros(12, 11, 4 * size), torch.zeros(60, 4, size).to(NARROW)
    angles = torch.zeros(tokens, 1, size), torch.zeros(tokens, 1, size)

    def work(rows: EmulatedRows) -> Sequence[Tensor]:
        some = slice(rows.places.tokens)
        cos, sin = (part[some] for part in angles)
        form = Compression(4, True, torch.ones(size), 1e-6, cos, sin)
        rows.compress(raw[some], raws, pool, form)
        chosen = rows.choose_entries(q[some], q[some].float().sum(-1), pool, 4, 6)
        entries = Entries(pool, 4, None if all_seen else chosen)
        latents = Latents(own[some], held, 7)
        kv, rings = own[some, None].expand(-1, 2, -1), held[:, :, None].expand(-1, -1, 2, -1)
        return [
            rows.attend_latents(q[some], latents, entries, torch.zeros(4), 0.25),
            rows.window_attention(q[some], (kv, kv), (rings, rings), 7, 0.25),
        ]

    recorded, replayed = Recorded(8, 4, 16, 20, work), 0
    for seed in range(400):
        case = case_of(seed)
        lengths = [case.layout.length(row) for row in range(len(case.layout.first))]
        if case.layout.page_tokens != 16 or max(lengths, default=5) > 4 or len(lengths) > 8:
            continue
        layout = replace(case.layout, visible_from=(0,) * len(lengths))
        for part in (q, own, raw, held, raws, pool, *angles):
            part.copy_(torch.randn(part.shape, generator=draws))
        before = pool.clone()
        got = [out[: case.tokens].clone() for out in recorded.replay(step_of(layout))]
        written = pool.clone()
        pool.copy_(before)
        assert same_bits(got, work(EmulatedBackend().rows(layout)))
        assert torch.equal(written[1:], pool[1:])
        replayed += 1
    assert replayed > 3


class Early(EmulatedBackend):
    """Planted: an entry can be seen one token before it is complete."""

    class Rows(EmulatedRows):
        def reaches(self, ratio: int) -> Tensor:
            early: Tensor = self.places.position % ratio == ratio - 2
            return super().reaches(ratio) + early.long()

    made = Rows


@seen
def test_an_entry_that_is_seen_one_token_early_is_caught(all_seen: bool) -> None:
    backend = Early()
    assert differing_cuts(LatentLayer.of(backend, all_seen), backend, setting(), seed=1) != []
    if all_seen:
        run = attend_latents
        assert any(differing(run(EarlyChosen(), n), run(Chosen(), n)) for n in range(1, 9))


class EarlyChosen(Early):
    class Rows(Early.Rows, Chosen.Rows):
        pass

    made = Rows


def test_the_sink_stays_finite() -> None:
    """A token that closes no window has none, and what the ring holds there may be anything."""
    rows = EmulatedBackend().rows(step_at(5).layout())
    pool, angles = torch.ones(3, 4, 16), torch.ones(1, 1, 16)
    form = Compression(4, False, torch.ones(16), 1e-6, angles, angles)
    rows.compress(torch.ones(1, 32), torch.full((2, 6, 32), NAN), pool, form)
    assert bool(pool.isfinite().all())
    assert bool((pool[1:] == 1).all())


def step_at(position: int) -> Step:
    """A step of one token."""
    return Step.of([Row([0], position, 1, [1, 2], SlotId(1), 0, 0, position)], 16)


def test_no_tokens_make_no_entries() -> None:
    rows = EmulatedBackend().rows(Step.of([], 16).layout())
    q, pool = torch.zeros(0, 4, 16).to(NARROW), torch.full((2, 4, 16), NAN).to(NARROW)
    assert rows.choose_entries(q, torch.zeros(0, 4), pool, 4, 6).shape == (0, 6)
    angles = torch.zeros(0, 1, 16), torch.zeros(0, 1, 16)
    form = Compression(4, True, torch.ones(16), 1e-6, *angles)
    rows.compress(torch.zeros(0, 64), torch.zeros(1, 9, 64), pool, form)
    assert bool(pool.isnan().all())
