"""The suites of this folder notice the faults that they are there for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from surefoot.backend import make_backend
from surefoot.backend.operands import RowLayout, Weight
from surefoot.backend.protocol import Backend
from surefoot.backend.reference import ReferenceBackend
from surefoot.backend.row_operators import RowOperators
from surefoot.ids import SINK_PAGE
from surefoot.state.spec import Held, Ring
from surefoot.step import Batch, Row, Step
from tests.unit.backend.conformance import OPERATORS, differing
from tests.unit.backend.cuts import (
    Computes,
    Machine,
    Pad,
    Script,
    Setting,
    alone,
    assert_row_invariant,
    padded,
    rejecting,
    same_bits,
    sequences_of,
    together,
    unpadded,
)
from tests.unit.backend.small import VOCAB, PagedAttention, Vectors, WindowAttention

SOME_CASES = range(16)
VECTORS = Vectors.of(1, (4, 2), 16)
SETTING = Setting(sequences_of(4, VOCAB, (21, 9)), page_tokens=4)


@dataclass(frozen=True)
class StaleStep(Step):
    """Planted: the layout was built before padding."""

    before: Step

    def build(self, backend: Backend, room: tuple[int, int] = (0, 0)) -> Batch:
        built = super().build(backend, room)
        return replace(built, rows=self.before.build(backend).rows)


def padded_after_layout(step: Step) -> Step:
    grown = padded(step)
    return StaleStep(grown.rows, grown.live, grown.page_tokens, grown.guesses, step)


def padded_on_live_rows(step: Step) -> Step:
    """Planted: padding rows write to the first page and the slot of a live row."""
    live = step.rows[0]
    row = Row([0] * 3, 0, 3, [live.table[0]], live.slot, 0, 0, 0)
    return Step((*step.rows, row), step.live, step.page_tokens, step.guesses)


@dataclass(frozen=True)
class NarrowRing(Ring):
    """A ring with as many columns as it is told."""

    columns: int

    def capacity(self, draft_tokens: int) -> int:
        return self.columns


def window_model(window: int, columns: int | None = None) -> WindowAttention:
    held = Held(window)
    if columns is None:
        return WindowAttention(VECTORS, Ring("window", 1, VECTORS.parts, window, held))
    return WindowAttention(VECTORS, NarrowRing("window", 1, VECTORS.parts, window, held, columns))


def survives(model: Computes, script: Script, pad: Pad) -> bool:
    """Whether the bitwise suite would let this pass."""
    backend = make_backend("cpu", True)
    want = Machine(model, backend, SETTING).play(alone(SETTING.lengths))
    try:
        got = Machine(model, backend, SETTING).play(script, pad)
    except (AssertionError, IndexError, RuntimeError):
        return False
    return same_bits(got, want)


@pytest.mark.parametrize(
    "model", [PagedAttention(VECTORS), window_model(8)], ids=["paged", "window"]
)
@pytest.mark.parametrize("fault", [padded_after_layout, padded_on_live_rows])
def test_faulty_padding_is_caught(model: Computes, fault: Pad) -> None:
    script = rejecting(SETTING.lengths, SETTING.depth)
    assert survives(model, script, unpadded)
    assert survives(model, script, padded)
    assert not survives(model, script, fault)
    assert not survives(model, together(SETTING.lengths), padded_after_layout)


def test_a_ring_one_column_short_is_caught() -> None:
    """A rejected draft's last column must still lie outside the window of the row that follows."""
    window, depth = 8, SETTING.depth
    least = window + depth - 1
    script = rejecting(SETTING.lengths, depth)
    assert survives(window_model(window, least), script, unpadded)
    assert not survives(window_model(window, least - 1), script, unpadded)
    assert window_model(window).ring.capacity(depth) >= least


class Misled(ReferenceBackend):
    """The reference, told something wrong about the step."""

    def __init__(self, fault: Callable[[RowLayout], RowLayout]) -> None:
        super().__init__()
        self._fault = fault

    def rows(self, layout: RowLayout) -> RowOperators:
        return super().rows(self._fault(layout))


def sees_all(layout: RowLayout) -> RowLayout:
    return replace(layout, visible_from=(0,) * len(layout.first))


def late(layout: RowLayout) -> RowLayout:
    first = tuple(max(0, start - 1) for start in layout.first)
    visible = tuple(map(min, layout.visible_from, first))
    return replace(layout, first=first, visible_from=visible)


def foreign_page(layout: RowLayout) -> RowLayout:
    tables = tuple([SINK_PAGE, *table[1:]] for table in layout.tables)
    return replace(layout, tables=tables)


def next_slot(layout: RowLayout) -> RowLayout:
    return replace(layout, slots=(*layout.slots[1:], *layout.slots[:1]))


@pytest.mark.parametrize(
    ("fault", "operator"),
    [
        (sees_all, "paged_attention"),
        (sees_all, "window_attention"),
        (sees_all, "choose_entries"),
        (sees_all, "attend_chosen"),
        (late, "attend_chosen"),
        (foreign_page, "attend_chosen"),
        (late, "paged_write"),
        (late, "paged_attention"),
        (late, "ring_write"),
        (late, "window_attention"),
        (foreign_page, "paged_write"),
        (foreign_page, "paged_attention"),
        (next_slot, "ring_write"),
        (next_slot, "window_attention"),
    ],
)
def test_a_misled_backend_does_not_conform(
    fault: Callable[[RowLayout], RowLayout], operator: str
) -> None:
    run = OPERATORS[operator]
    caught = [
        seed
        for seed in SOME_CASES
        if differing(run(Misled(fault), seed), run(ReferenceBackend(), seed))
    ]
    assert len(caught) > 1


class Careless(ReferenceBackend):
    """The reference with slips that are small, or show in few places."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + eps) * weight

    def pack_gated(
        self, weight: Weight, bias: Tensor | None, limit: float = math.inf
    ) -> Callable[[Tensor], Tensor]:
        assert isinstance(weight, Tensor)
        up, gate = weight.chunk(2)
        return super().pack_gated(torch.cat((gate, up)), bias, limit)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rotary(x, cos, -sin)


@pytest.mark.parametrize("operator", ["rms_norm", "pack_gated", "rotary"])
def test_a_careless_backend_does_not_conform(operator: str) -> None:
    run = OPERATORS[operator]
    caught = [
        seed
        for seed in SOME_CASES
        if differing(run(Careless(), seed), run(ReferenceBackend(), seed))
    ]
    assert len(caught) > 1


def test_bits_that_depend_on_the_row_count_are_caught() -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    assert_row_invariant(lambda part: part * 2, x)
    with pytest.raises(AssertionError):
        assert_row_invariant(lambda part: part + 1e-6 * (len(part) == 2), x)
    with pytest.raises(AssertionError):
        assert_row_invariant(lambda part: part + 1e-6 * torch.arange(len(part))[:, None], x)
