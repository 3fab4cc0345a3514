"""A million tokens into a context: angles are exact, and attention by them is right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.backend.operands import Compression, Entries, Latents, RowLayout
from surefoot.backend.protocol import Backend
from surefoot.backend.reference import ReferenceBackend
from surefoot.model.deepseek_v4 import RotaryKinds
from surefoot.model.deepseek_v4_config import HEAVY, SPARSE, WINDOW, LatentConfig, read_config
from surefoot.model.layers.attention import Angles
from surefoot.model.layers.rotary import Rotary, make_partial_rotary
from surefoot.testing.tiny_latents import TinyLatentSizes, make_latent_config
from tests.unit.backend.conformance import TOLERANCE
from tests.unit.backend.tiled import KERNELS, TILED
from tests.unit.flash import FLASH

POSITIONS = (999_931, 1_000_000, (1 << 20) - 129, (1 << 20) - 1)
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
HALF_A_BIT = 2.0**-25 + 1e-9
"""What is lost where a cosine becomes a float32, and where its angle is a float64."""
TURNING = 64
YARN = {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original": 65536}

backends = pytest.mark.parametrize(
    "backend", [KERNELS, TILED, ReferenceBackend()], ids=["kernels", "tiled", "reference"]
)


def exact_frequencies(theta: int, yarn: Mapping[str, int] | None) -> list[Decimal]:
    """Angle a position of each pair, to many digits."""
    base = Decimal(theta)
    plain = [base ** (Decimal(-2 * i) / TURNING) for i in range(TURNING // 2)]
    if yarn is None:
        return plain
    low, high = (
        TURNING * (Decimal(yarn["original"]) / (yarn[turns] * 2 * PI)).ln() / (2 * base.ln())
        for turns in ("beta_fast", "beta_slow")
    )
    first, last = max(math.floor(low), 0), min(math.ceil(high), TURNING - 1)
    places = (Decimal(i - first) / (last - first) for i in range(TURNING // 2))
    ramps = [min(max(place, Decimal(0)), Decimal(1)) for place in places]
    return [
        value / yarn["factor"] * ramp + value * (1 - ramp)
        for value, ramp in zip(plain, ramps, strict=True)
    ]


def exact_angles(
    positions: Sequence[int], theta: int, yarn: Mapping[str, int] | None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, pairs] in float64 of angles that are reduced with many digits."""
    with localcontext(prec=60):
        frequencies = exact_frequencies(theta, yarn)
        turns = [[p * f / (2 * PI) for f in frequencies] for p in positions]
        rest = [[float((x - x.to_integral_value()) * 2 * PI) for x in row] for row in turns]
    angles = torch.tensor(rest, dtype=torch.float64)
    return angles.cos(), angles.sin()


def assert_exact(angles: Angles, want: tuple[Tensor, Tensor], size: int) -> None:
    """Angles [T, 1, size] turn the pairs at the front by `want`, and leave the others alone."""
    (cos, sin), half, pairs = angles, size // 2, TURNING // 2
    assert cos.shape == sin.shape == (len(want[0]), 1, size)
    for begin, sign in ((0, -1), (half, 1)):
        turned = slice(begin, begin + pairs)
        assert float((cos[:, 0, turned].double() - want[0]).abs().max()) < HALF_A_BIT
        assert float((sin[:, 0, turned].double() - sign * want[1]).abs().max()) < HALF_A_BIT
        still = slice(begin + pairs, begin + half)
        assert bool((cos[:, 0, still] == 1).all())
        assert not sin[:, 0, still].any()


@backends
@pytest.mark.parametrize("yarn", [YARN, None], ids=["yarn", "plain"])
def test_angles_of_v4_flash_are_exact_at_a_million(
    yarn: Mapping[str, int] | None, backend: Backend
) -> None:
    """Windows have a base of their own; entries turn as the first token of their window."""
    config = read_config(FLASH if yarn else {**FLASH, "rope_scaling": None})
    kinds = RotaryKinds.make(config, backend)
    positions = torch.tensor(POSITIONS)
    window = exact_angles(POSITIONS, 10_000, None)
    assert_exact(kinds.of(WINDOW, positions).own, window, 512)
    entered = exact_angles(POSITIONS, 160_000, yarn)
    for kind, ratio in ((SPARSE, 4), (HEAVY, 128)):
        begins = exact_angles([p // ratio * ratio for p in POSITIONS], 160_000, yarn)
        angles = kinds.of(kind, positions)
        assert_exact(angles.own, entered, 512)
        assert_exact(angles.begin, begins, 512)
        if kind == SPARSE:
            assert_exact(angles.index, entered, 128)
            assert_exact(angles.index_begin, begins, 128)


def test_angles_in_float32_would_be_seen() -> None:
    want = exact_angles(POSITIONS, 10_000, None)
    rotary = make_partial_rotary(512, TURNING, 10_000.0, {})
    angle = torch.tensor(POSITIONS).float()[:, None] * rotary.frequencies.float()
    assert float((angle.cos() - want[0]).abs().max()) > 1e-3


SIZE, HEADS, FIRST, TOKENS, PAGE, SEEN = 32, 4, 1_000_003, 66, 128, 20
"""The step closes one window of 128 tokens, at position 1,000,063, and sixteen of 4."""


@dataclass(frozen=True)
class Row:
    """A row a million tokens into its context, in float64; nothing is rotated yet.

    Attributes:
        kind: of the layer.
        q: [T, H, D].
        latents: [window + T, D] of the positions from FIRST - window on.
        raw: [window + T, 2 width] likewise, values and scores.
        norm: [D] of the entries.
        sinks: [H].
        chosen: [T, SEEN] entries that tokens look at, or None for all that they see.
        older: entries by number that were there before the step, normed.
    """

    kind: str
    q: Tensor
    latents: Tensor
    raw: Tensor
    norm: Tensor
    sinks: Tensor
    chosen: Tensor | None
    older: Mapping[int, Tensor]

    @property
    def ratio(self) -> int:
        return 4 if self.kind == SPARSE else 128

    @property
    def halves(self) -> int:
        return 2 if self.kind == SPARSE else 1

    @property
    def new(self) -> range:
        """Entries that the step makes."""
        return range(FIRST // self.ratio, (FIRST + TOKENS) // self.ratio)

    @staticmethod
    def of(kind: str) -> Row:
        draws = torch.Generator().manual_seed(1)

        def numbers(*shape: int) -> Tensor:
            # What float32 can hold, so that both sides begin alike.
            return torch.randn(shape, generator=draws).double()

        chosen, ratio = None, 4 if kind == SPARSE else 128
        numbered = list(range(FIRST // ratio))
        if kind == SPARSE:
            some = torch.randint(0, FIRST // ratio, (SEEN,), generator=draws).unique()
            numbered = [int(number) for number in some]
            chosen = torch.full((TOKENS, SEEN + 3), -1)
            for i in range(TOKENS):
                # And the last two, of which the step may have made one or both.
                last = (FIRST + i + 1) // ratio
                newest = [n for n in (last - 2, last - 1) if n >= FIRST // ratio]
                chosen[i, : len(numbered) + len(newest)] = torch.tensor([*numbered, *newest])
        halves, length = 2 if kind == SPARSE else 1, PAGE + TOKENS
        return Row(
            kind=kind,
            q=numbers(TOKENS, HEADS, SIZE),
            latents=numbers(length, SIZE),
            raw=numbers(length, 2 * halves * SIZE),
            norm=numbers(SIZE),
            sinks=numbers(HEADS),
            chosen=chosen,
            older={number: numbers(SIZE) for number in numbered},
        )

    def layout(self) -> RowLayout:
        last = FIRST + TOKENS
        return RowLayout(
            starts=(0, TOKENS),
            first=(FIRST,),
            tables=(range(1, 1 + -(-last // PAGE)),),
            slots=(1,),
            visible_from=(0,),
            settled=(FIRST,),
            settles=(last,),
            page_tokens=PAGE,
        )


def turned(x: Tensor, positions: Sequence[int], rotary: Rotary, sign: int = 1) -> Tensor:
    """Vectors [T, ..., D] rotated in float64."""
    angles = torch.tensor(positions).double()[:, None] * rotary.frequencies * sign
    angles = F.pad(angles, (0, rotary.passing)).view(-1, *[1] * (x.dim() - 2), SIZE // 2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def plain_entry(row: Row, number: int, rotary: Rotary) -> Tensor:
    """An entry that the step makes, in float64."""
    begin = number * row.ratio
    at = begin - (FIRST - PAGE)
    values, scores = row.raw[at - (row.halves - 1) * row.ratio : at + row.ratio].chunk(2, dim=1)
    if row.halves == 2:
        values, scores = (
            torch.cat((part[: row.ratio, :SIZE], part[row.ratio :, SIZE:]))
            for part in (values, scores)
        )
    entry = (scores.softmax(0) * values).sum(0)
    entry = entry * torch.rsqrt(entry.pow(2).mean() + 1e-6) * row.norm
    return turned(entry[None], [begin], rotary)[0]


def plain_entries(row: Row, rotary: Rotary) -> dict[int, Tensor]:
    """All entries that are looked at, by number, in float64."""
    begins = [number * row.ratio for number in row.older]
    older = turned(torch.stack(list(row.older.values())), begins, rotary)
    new = {number: plain_entry(row, number, rotary) for number in row.new}
    return dict(zip(row.older, older, strict=True)) | new


def plain_attention(row: Row, rotary: Rotary) -> Tensor:
    """[T, H, D] in float64."""
    ratio, made = row.ratio, plain_entries(row, rotary)
    latents = turned(row.latents, range(FIRST - PAGE, FIRST + TOKENS), rotary)
    q, outputs = turned(row.q, range(FIRST, FIRST + TOKENS), rotary), []
    for i in range(TOKENS):
        seen = range((FIRST + i + 1) // ratio)
        numbers = seen if row.chosen is None else [n for n in row.chosen[i].tolist() if n >= 0]
        keys = torch.cat((latents[i + 1 : i + 1 + PAGE], torch.stack([made[n] for n in numbers])))
        scores = torch.cat((q[i] @ keys.T * SIZE**-0.5, row.sinks[:, None]), dim=1)
        outputs.append(scores.softmax(1)[:, :-1] @ keys)
    return turned(torch.stack(outputs), range(FIRST, FIRST + TOKENS), rotary, sign=-1)


def attention(row: Row, kinds: RotaryKinds, backend: Backend) -> tuple[Tensor, Tensor]:
    """The same by the operators of a backend, as a layer calls them; and the new entries."""
    rows, own = backend.rows(row.layout()), torch.arange(FIRST, FIRST + TOKENS)
    angles, older = kinds.of(row.kind, own), torch.arange(FIRST - PAGE, FIRST)
    rings = [torch.zeros(2, PAGE + 9, width) for width in (SIZE, 2 * row.halves * SIZE)]
    latents = row.latents.float()[:, None]
    before = backend.rotary(latents[:PAGE], *kinds.of(row.kind, older).own)[:, 0]
    for ring, past in zip(rings, (before, row.raw[:PAGE].float()), strict=True):
        ring[1, older % ring.shape[1]] = past
    pool = torch.zeros(2 + (FIRST + TOKENS) // PAGE, PAGE // row.ratio, SIZE)
    numbers = torch.tensor(list(row.older))
    there = torch.stack(list(row.older.values())).float()[:, None]
    placed = backend.rotary(there, *kinds.of(row.kind, numbers * row.ratio).own)[:, 0]
    by_number = pool[1:].view(-1, SIZE)
    by_number[numbers] = placed
    form = Compression(row.ratio, row.halves == 2, row.norm.float(), 1e-6, *angles.begin)
    rows.compress(row.raw[PAGE:].float(), rings[1], pool, form)
    q = backend.rotary(row.q.float(), *angles.own)
    latent = backend.rotary(latents[PAGE:], *angles.own)[:, 0]
    entries = Entries(pool, row.ratio, row.chosen)
    seen = Latents(latent, rings[0], PAGE)
    mixed = rows.attend_latents(q, seen, entries, row.sinks.float(), SIZE**-0.5)
    cos, sin = angles.own
    return backend.rotary(mixed, cos, -sin), by_number[list(row.new)]


def errors(row: Row, kinds: RotaryKinds, rotary: Rotary, backend: Backend) -> tuple[float, float]:
    """Greatest error of outputs and of new entries, where `rotary` tells the truth."""
    out, new = attention(row, kinds, backend)
    exact = torch.stack([plain_entry(row, number, rotary) for number in row.new])
    parts = (out.double() - plain_attention(row, rotary), new.double() - exact)
    return float(parts[0].abs().max()), float(parts[1].abs().max())


@dataclass(frozen=True)
class Coarse(Rotary):
    """Planted: angles are computed in float32."""

    def __call__(self, positions: Tensor) -> Angles:
        angles = positions.float()[:, None] * self.frequencies.float()
        cos, sin = (
            F.pad(x, (0, self.passing), value=v)
            for x, v in ((angles.cos(), 1.0), (angles.sin(), 0.0))
        )
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def far_config() -> LatentConfig:
    size = TinyLatentSizes(head_dim=SIZE, rotary=16, index_dim=16)
    wide = {"compress_rate_hca": 128, "rope_scaling": FLASH["rope_scaling"]}
    return read_config({**make_latent_config(size), **wide})


def far_kinds(backend: Backend) -> RotaryKinds:
    return RotaryKinds.make(far_config(), backend)


def far_rotary() -> Rotary:
    """Of the layers with entries."""
    config = far_config()
    sizes = config.attention
    return make_partial_rotary(sizes.size, sizes.rotated, config.compressed_theta, config.scaling)


@backends
@pytest.mark.parametrize("kind", [SPARSE, HEAVY])
def test_attention_is_right_a_million_tokens_into_a_context(kind: str, backend: Backend) -> None:
    row, kinds = Row.of(kind), far_kinds(backend)
    assert max(errors(row, kinds, far_rotary(), backend)) < TOLERANCE


@pytest.mark.parametrize("kind", [SPARSE, HEAVY])
def test_attention_by_angles_in_float32_would_be_seen(kind: str) -> None:
    row, kinds = Row.of(kind), far_kinds(KERNELS)
    coarse = replace(kinds, compressed=Coarse(**vars(far_rotary())))
    assert min(errors(row, coarse, far_rotary(), KERNELS)) > 10 * TOLERANCE
