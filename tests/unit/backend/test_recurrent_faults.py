"""What could go wrong with recurrent state, planted: the bitwise suite notices every fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from torch import Tensor

from surefoot.backend.cpu import CpuBackend
from surefoot.backend.operands import DeltaCaches, Fold, RowLayout
from surefoot.backend.row_operators import RowOperators
from surefoot.state.pool import Pools
from surefoot.step import Batch, Step
from tests.unit.backend.cuts import Pad, alone, same_bits, unpadded
from tests.unit.backend.recurrences import (
    RecurrentLayer,
    RecurrentMachine,
    Sizes,
    machine,
    played,
    scripts,
    setting_of,
)
from tests.unit.backend.tiled import KERNELS, TILED, TiledBackend, on_both

SIZES = Sizes(1, 3, 16, 16)
SETTING = setting_of((40, 21))


def survives(backend: CpuBackend, layer: type[RecurrentLayer], pad: Pad = unpadded) -> bool:
    """Whether the bitwise suite would let this pass."""
    sizes, setting = SIZES, SETTING
    honest = TILED if isinstance(backend, TiledBackend) else KERNELS
    want = played(machine(sizes, setting, honest), alone(setting.lengths))
    for script in scripts(setting, seed=3).values():
        made = layer.of(1, sizes, backend)
        faulty = layer(sizes, backend, made.table, made.weight, made.a, made.b)
        got = played(RecurrentMachine(faulty, backend, setting), script, pad)
        if not same_bits(got, want):
            return False
    return True


class Misled(CpuBackend):
    """The backend, told something wrong about each step or each fold."""

    def __init__(
        self,
        rows: Callable[[RowLayout], RowLayout] = lambda layout: layout,
        fold: Callable[[Fold], Sequence[Fold]] = lambda fold: [fold],
    ) -> None:
        super().__init__()
        self._mislead, self._misfold = rows, fold

    def rows(self, layout: RowLayout) -> RowOperators:
        return super().rows(self._mislead(layout))

    def fold_delta(self, caches: DeltaCaches, folds: Sequence[Fold]) -> None:
        super().fold_delta(caches, [wrong for fold in folds for wrong in self._misfold(fold)])


class MisledTiled(Misled, TiledBackend):
    """The tiled forms, misled likewise."""


misled = pytest.mark.parametrize("kind", [Misled, MisledTiled], ids=["kernels", "tiled"])


@misled
def test_nothing_planted_survives(kind: type[Misled]) -> None:
    """Otherwise the faults below would prove nothing."""
    assert survives(kind(), RecurrentLayer)


def aliased(step: Step) -> Step:
    """Planted: a padding row has the slot of a live row."""
    row = step.pad(len(step.rows) + 1, step.token_count + 2).rows[-1]
    return replace(step, rows=(*step.rows, replace(row, slot=step.rows[0].slot)))


@on_both
def test_a_padded_row_that_aliases_a_live_slot_is_caught(backend: CpuBackend) -> None:
    assert not survives(backend, RecurrentLayer, aliased)


def all_settle(layout: RowLayout) -> RowLayout:
    stops = (first + layout.length(row) for row, first in enumerate(layout.first))
    return replace(layout, settles=tuple(stops))


@misled
def test_a_checkpoint_written_for_drafted_tokens_is_caught(kind: type[Misled]) -> None:
    assert not survives(kind(rows=all_settle), RecurrentLayer)


def none_settles(layout: RowLayout) -> RowLayout:
    return replace(layout, settles=layout.settled)


@misled
def test_a_checkpoint_that_is_not_written_is_caught(kind: type[Misled]) -> None:
    assert not survives(kind(rows=none_settles), RecurrentLayer)


@misled
@pytest.mark.parametrize("by", [-1, 1])
def test_a_replay_one_input_short_or_one_too_many_is_caught(by: int, kind: type[Misled]) -> None:
    """A fold that begins one position late lacks one input; one early, it takes one twice."""
    assert not survives(kind(fold=lambda f: [Fold(f.slot, f.base - by)]), RecurrentLayer)


@misled
def test_a_fold_that_is_forgotten_or_done_twice_is_caught(kind: type[Misled]) -> None:
    assert not survives(kind(fold=lambda f: []), RecurrentLayer)
    assert not survives(kind(fold=lambda f: [f, f]), RecurrentLayer)


@dataclass(frozen=True)
class Omits(RecurrentLayer):
    """Planted: what a verify row writes is lost in one of the caches."""

    def lost(self, pools: Pools) -> list[Tensor]:
        raise NotImplementedError

    def compute(self, batch: Batch, pools: Pools) -> Tensor:
        kept = [pool.clone() for pool in self.lost(pools)]
        out = super().compute(batch, pools)
        if len(batch.tentative):
            for pool, before in zip(self.lost(pools), kept, strict=True):
                pool.copy_(before)
        return out


class OmitsConv(Omits):
    def lost(self, pools: Pools) -> list[Tensor]:
        return [pools.rows("conv", "x")]


class OmitsState(Omits):
    def lost(self, pools: Pools) -> list[Tensor]:
        return [pools.rows("delta", name) for name in ("state", "k", "value", "decay", "beta")]


class OmitsOneRing(Omits):
    def lost(self, pools: Pools) -> list[Tensor]:
        return [pools.rows("delta", "beta")]


@on_both
def test_a_conv_ring_not_written_while_the_state_is_is_caught(backend: CpuBackend) -> None:
    assert not survives(backend, OmitsConv)


@on_both
def test_a_state_not_written_while_the_conv_ring_is_is_caught(backend: CpuBackend) -> None:
    assert not survives(backend, OmitsState)


@on_both
def test_one_ring_of_four_not_written_is_caught(backend: CpuBackend) -> None:
    assert not survives(backend, OmitsOneRing)
