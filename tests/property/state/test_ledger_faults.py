"""Negative controls: faults planted in the ledger, and that the machine finds each of them."""

from collections.abc import Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from surefoot.state.ledger import Clear, Lease, Ledger, Work
from tests.property.state.model_pools import World
from tests.property.state.test_ledger_machine import LedgerMachine


class EarlyPublisher(Ledger):
    """Publishes known tokens that are not computed yet."""

    def publish(self, lease: Lease, tokens: Sequence[int]) -> None:
        computed, lease.computed = lease.computed, min(lease.capacity, len(tokens))
        super().publish(lease, tokens)
        lease.computed = computed


class SilentEarlyPublisher(EarlyPublisher):
    """The same with an audit that sees nothing: the content has to give it away."""

    def audit(self) -> None:
        pass


class Sharer(Ledger):
    """Gives a second request the page that another one writes."""

    def reserve(self, lease: Lease, n: int, evict: bool = True) -> bool:
        granted = super().reserve(lease, n, evict)
        for other in self._leases - {lease}:
            if granted and other.private_pages() and lease.private_pages():
                lease.pages[-1] = other.pages[-1]
        return granted


class Forgetful(Ledger):
    """Does not remember where the last row began."""

    def commit(self, lease: Lease, n: int) -> None:
        super().commit(lease, n)
        lease.row_start = lease.prompt


class Optimist(Ledger):
    """Believes that the drafter is always up to date."""

    def publish(self, lease: Lease, tokens: Sequence[int]) -> None:
        kept, lease.drafted, lease.draft_from = (lease.drafted, lease.draft_from), 1 << 30, 0
        super().publish(lease, tokens)
        lease.drafted, lease.draft_from = kept


class PointOptimist(Ledger):
    """Believes that a resume point has whatever the drafter knows of its page."""

    def publish(self, lease: Lease, tokens: Sequence[int]) -> None:
        super().publish(lease, tokens)
        for node in lease.path:
            node.point_drafted = node.point is not None and node.drafted


class Lazy(Ledger):
    """Leaves handed-out pages as they are."""

    def take_work(self) -> Work:
        work = super().take_work()
        return Work([], work.moves)


class ClearsFirst(World):
    """Does not keep to the order in which rows are to be cleared and saved."""

    def carry_out(self, work: Work) -> None:
        moves = sorted(work.moves, key=lambda move: not isinstance(move, Clear))
        super().carry_out(Work(work.clear_pages, moves))


def find_fault(ledger: type[Ledger], world: type[World], points: bool) -> None:
    """Run the machine with a planted fault; raises what it finds."""

    class Faulty(LedgerMachine):
        ledger_class = ledger
        world_class = world
        always_points = points

        def teardown(self) -> None:
            pass

    run_state_machine_as_test(
        Faulty,
        settings=settings(
            max_examples=600, phases=[Phase.generate], database=None, derandomize=True
        ),
    )


@pytest.mark.parametrize(
    ("ledger", "world", "symptom"),
    [
        (EarlyPublisher, World, "published, but computed|page entry"),
        (SilentEarlyPublisher, World, "page entry"),
        (Sharer, World, "two owners|was not cleared|page entry"),
        (Forgetful, World, "ring|checkpoint"),
        (Optimist, World, "drafter entry|drafter row"),
        (PointOptimist, World, "drafter row"),
        (Lazy, World, "was not cleared"),
        (Ledger, ClearsFirst, "ring|checkpoint|not clear"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_planted_fault_is_found(ledger: type[Ledger], world: type[World], symptom: str) -> None:
    with pytest.raises(AssertionError, match=symptom):
        find_fault(ledger, world, points="ring" in symptom or symptom == "drafter row")
