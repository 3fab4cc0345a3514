"""What could go wrong with recurrent state on the device, planted: comparing cuts notices it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import SilentError
from surefoot.backend.operands import DeltaCaches, DeltaInputs, Fold, RowLayout
from surefoot.ids import SlotId
from surefoot.state.pool import Pools
from surefoot.step import Batch
from tests.unit.backend.ascend.emulated import EmulatedBackend, EmulatedRows
from tests.unit.backend.ascend.planted import ODD, aliased, copied
from tests.unit.backend.cuts import Pad, Piece, Setting, alone, same_bits, unpadded
from tests.unit.backend.recurrences import (
    RecurrentLayer,
    RecurrentMachine,
    machine,
    played,
    scripts,
    setting_of,
)
from tests.unit.backend.recurrent_steps import tensors

SETTING = setting_of((22, 6), depth=5)


class Misled(EmulatedBackend):
    """The backend, told something wrong about each step or each fold."""

    def __init__(
        self,
        rows: Callable[[RowLayout], RowLayout] = lambda layout: layout,
        fold: Callable[[Fold], Sequence[Fold]] = lambda fold: [fold],
    ) -> None:
        super().__init__()
        self._mislead, self._misfold = rows, fold

    def rows(self, layout: RowLayout) -> EmulatedRows:
        return super().rows(self._mislead(layout))

    def fold_delta(self, caches: DeltaCaches, folds: Sequence[Fold]) -> None:
        super().fold_delta(caches, [wrong for fold in folds for wrong in self._misfold(fold)])


def survives(
    backend: EmulatedBackend,
    layer: type[RecurrentLayer] = RecurrentLayer,
    pad: Pad = unpadded,
    setting: Setting = SETTING,
) -> bool:
    """Whether the comparison of cuts, or the emulation itself, would let this pass."""
    want = played(machine(ODD, setting, EmulatedBackend()), alone(setting.lengths))
    for script in scripts(setting, seed=3).values():
        made = layer.of(1, ODD, backend)
        faulty = layer(ODD, backend, made.table, made.weight, made.a, made.b)
        on = RecurrentMachine(faulty, backend, setting)
        try:
            same = same_bits(played(on, script, pad), want)
        except SilentError:
            return False
        if not same:
            return False
    return True


def test_nothing_planted_survives() -> None:
    """Otherwise the faults below would prove nothing."""
    assert survives(Misled())


def test_a_padded_row_that_aliases_a_live_slot_is_caught() -> None:
    assert not survives(EmulatedBackend(), pad=aliased)


def all_settle(layout: RowLayout) -> RowLayout:
    stops = (first + layout.length(row) for row, first in enumerate(layout.first))
    return replace(layout, settles=tuple(stops))


def test_a_checkpoint_written_for_drafted_tokens_is_caught() -> None:
    """Past the first block: a row that starts there reads no checkpoint."""
    assert not survives(Misled(rows=all_settle), setting=setting_of((36,), depth=5))


def test_a_checkpoint_that_is_not_written_is_caught() -> None:
    assert not survives(Misled(rows=lambda layout: replace(layout, settles=layout.settled)))


@pytest.mark.parametrize("by", [-1, 1])
def test_a_fold_one_input_short_or_one_too_many_is_caught(by: int) -> None:
    assert not survives(Misled(fold=lambda fold: [Fold(fold.slot, fold.base - by)]))


def test_a_fold_that_is_forgotten_or_done_twice_is_caught() -> None:
    assert not survives(Misled(fold=lambda fold: []))
    assert not survives(Misled(fold=lambda fold: [fold, replace(fold, base=fold.base + 16)]))


class Short(EmulatedBackend):
    """Planted: the replay leaves out the last input before a row, as if it had been a draft."""

    class Rows(EmulatedRows):
        def delta_rule(self, inputs: DeltaInputs, caches: DeltaCaches) -> Tensor:
            known = copied(caches)
            last = (self.places.first - 1) % caches.k.shape[1]
            known.beta[self.places.slot, last] = 0
            out = super().delta_rule(inputs, known)
            for part, changed in zip(tensors(caches), tensors(known), strict=True):
                part.copy_(changed)
            return out

    made = Rows


def test_a_replay_one_input_short_is_caught() -> None:
    assert not survives(Short())


@dataclass(frozen=True)
class Omits(RecurrentLayer):
    """Planted: what a verify row writes is lost in some of the caches."""

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


class OmitsRings(Omits):
    def lost(self, pools: Pools) -> list[Tensor]:
        return [pools.rows("delta", name) for name in ("k", "value", "decay", "beta")]


class OmitsOneRing(Omits):
    def lost(self, pools: Pools) -> list[Tensor]:
        return [pools.rows("delta", "value")]


class OmitsState(Omits):
    def lost(self, pools: Pools) -> list[Tensor]:
        return [pools.rows("delta", "state")]


@pytest.mark.parametrize("layer", [OmitsConv, OmitsRings, OmitsOneRing, OmitsState])
def test_a_slot_that_is_half_written_is_caught(layer: type[Omits]) -> None:
    assert not survives(EmulatedBackend(), layer)


class HalfSaved(RecurrentMachine):
    """Planted: a resume point takes one of the two caches along."""

    saved = ("conv", "x")

    def move(self, index: int, slot: SlotId) -> None:
        old, (cache, part) = self.slots[index], self.saved
        pool = self.pools.rows(cache, part)
        pool[:, slot] = pool[:, old]
        self.pools.rows("delta", "state")[:, slot].nan_to_num_(0)
        self.pools.rows("conv", "x")[:, slot].nan_to_num_(0)
        self.slots[index] = slot


class StateSaved(HalfSaved):
    saved = ("delta", "state")


@pytest.mark.parametrize("kind", [HalfSaved, StateSaved])
def test_a_saved_slot_that_lacks_a_cache_is_caught(kind: type[HalfSaved]) -> None:
    setting, backend = setting_of((30,)), EmulatedBackend()
    want = machine(ODD, setting, backend).play(alone(setting.lengths))[0]
    resumed = kind(RecurrentLayer.of(1, ODD, backend), backend, setting)
    before = resumed.play([[Piece(0, 0, 16)]])
    resumed.move(0, SlotId(1))
    after = resumed.play([[Piece(0, 16, 14)]])
    assert not torch.equal(torch.cat((*before, *after)), want)
