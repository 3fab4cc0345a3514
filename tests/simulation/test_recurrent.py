"""Checkpoints of recurrent state: whatever is done wrong with them shows in the tokens."""

from collections.abc import Sequence

import pytest

from surefoot.backend.operands import Fold
from surefoot.engine.rows import PlannedRow
from surefoot.ids import PointId, SlotId
from surefoot.testing.fakes import HashRunner
from surefoot.testing.scenarios import make_scenario
from surefoot.testing.simulate import Parts, Simulation, SimulationFault

SEEDS = [seed for seed in range(400) if make_scenario(seed).model.block]


def simulate_recurrent(parts: Parts) -> int:
    """Run the scenarios that have recurrent state; returns how many tokens were accepted."""
    return sum(Simulation(make_scenario(seed), parts).run().accepted for seed in SEEDS)


def test_the_right_parts_are_right() -> None:
    assert len(SEEDS) > 50
    assert simulate_recurrent(Parts()) > 50


class FoldForgotten(HashRunner):
    """Accepted drafts complete a block, and nobody cares."""

    def settle(self, rows: Sequence[PlannedRow]) -> None:
        """See Runner."""


class FoldTwice(HashRunner):
    """A completed block is taken in twice."""

    def _fold(self, fold: Fold) -> None:
        super()._fold(fold)
        super()._fold(fold)


class FoldOneShort(HashRunner):
    """The first input of a block is missing."""

    def _fold(self, fold: Fold) -> None:
        self._inputs[fold.slot][fold.base % len(self._inputs[fold.slot])] = 0
        super()._fold(fold)


class PointsWithoutRing(HashRunner):
    """A resume point has the checkpoint, but not the ring of the window."""

    def _save(self, slot: SlotId, point: PointId, end: int) -> None:
        super()._save(slot, point, end)
        window, checkpoint = self._points[point]
        self._points[point] = [0] * len(window), checkpoint


class PointsWithoutCheckpoint(HashRunner):
    """A resume point has the ring of the window, but not the checkpoint."""

    def _save(self, slot: SlotId, point: PointId, end: int) -> None:
        super()._save(slot, point, end)
        self._points[point] = self._points[point][0], 0


class LateReader(HashRunner):
    """The ring is read as if the checkpoint had moved on already."""

    def _fold(self, fold: Fold) -> None:
        super()._fold(Fold(fold.slot, fold.base + 1))


@pytest.mark.parametrize(
    "parts",
    [
        Parts(runner=FoldForgotten),
        Parts(runner=FoldTwice),
        Parts(runner=FoldOneShort),
        Parts(runner=PointsWithoutRing),
        Parts(runner=PointsWithoutCheckpoint),
        Parts(runner=LateReader),
    ],
    ids=lambda parts: parts.runner.__name__,
)
def test_a_fault_in_the_checkpoints_is_found(parts: Parts) -> None:
    with pytest.raises(SimulationFault, match=r"emits|ends by"):
        simulate_recurrent(parts)
