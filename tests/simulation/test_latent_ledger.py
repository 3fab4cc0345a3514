"""DeepSeek V4's pools under thousands of random calls of the ledger: nothing is lost in any."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from surefoot.ids import PointId
from surefoot.state.ledger import Clear, Lease, Ledger, Save, Work
from surefoot.state.spec import CacheSpec
from surefoot.testing.tiny_latents import TinyLatentSizes
from tests.simulation.ledger_run import LedgerRun, Setting
from tests.unit.state.latents import lacking, other_span

# In one pages give way before their points do, in the other points before their pages.
SHORT = Setting(TinyLatentSizes(), page=16, points=20)
REAL = Setting(TinyLatentSizes(window=128, heavy_ratio=128), page=128, points=7)
CALLS = 10_000


def run(setting: Setting, seed: int, calls: int = CALLS) -> LedgerRun:
    made = LedgerRun(setting, seed)
    made.run(calls)
    return made


@pytest.mark.parametrize(("setting", "seed"), [(SHORT, 1), (REAL, 2)], ids=["short", "real"])
def test_no_page_slot_or_point_is_lost_in_ten_thousand_calls(setting: Setting, seed: int) -> None:
    made = run(setting, seed)
    # What is not exercised is not tested.
    assert made.calls.total() >= CALLS
    assert min(made.calls.values()) > 500, made.calls
    assert min(made.seen.values()) > 60, made.seen


@pytest.mark.deep
@pytest.mark.parametrize("setting", [SHORT, REAL], ids=["short", "real"])
@pytest.mark.parametrize("seed", range(10, 20))
def test_no_further_seed_finds_a_loss(setting: Setting, seed: int) -> None:
    run(setting, seed, 5 * CALLS)


class KeepsAPage(Ledger):
    """The last page of a request that ends badly is not given back."""

    def release(self, lease: Lease, tokens: Sequence[int], publish: bool = True) -> None:
        if not publish and len(lease.pages) > len(lease.path):
            lease.pages.pop()
            self._private -= 1
        super().release(lease, tokens, publish)


class KeepsAPreemptedPage(Ledger):
    """A request that goes, and may come back, keeps a hold of its first page."""

    def release(self, lease: Lease, tokens: Sequence[int], publish: bool = True) -> None:
        if publish and lease.path:
            self.tree.hold(lease.path[0])
        super().release(lease, tokens, publish)


class KeepsPoints(Ledger):
    """Points of pages that give way are forgotten, not given back."""

    def _evict_page(self) -> None:
        free = list(self._free_points)
        super()._evict_page()
        self._free_points = free


class KeepsSlots(Ledger):
    """The slot of a request that ends badly is not given back."""

    def release(self, lease: Lease, tokens: Sequence[int], publish: bool = True) -> None:
        slot = lease.slot
        super().release(lease, tokens, publish)
        if not publish:
            self._free_slots.remove(slot)


class GivesBackTwice(Ledger):
    """A page that nobody published is freed as soon as its request is pre-empted, and again."""

    def release(self, lease: Lease, tokens: Sequence[int], publish: bool = True) -> None:
        twice = lease.pages[len(lease.path) + 1 :]
        super().release(lease, tokens, publish)
        self._free_pages += twice


class SavesElsewhere(Ledger):
    """Points are taken as if their page ended one token later."""

    def _record_point(self, lease: Lease, point: PointId) -> None:
        super()._record_point(lease, point)
        saved = self._work.moves.pop()
        assert isinstance(saved, Save)
        self._work.moves.append(replace(saved, end=saved.end + 1))


class NoPoints(Ledger):
    """Points are neither saved nor restored."""

    def take_work(self) -> Work:
        work = super().take_work()
        return Work(work.clear_pages, [move for move in work.moves if isinstance(move, Clear)])


@pytest.mark.parametrize(
    ("ledger", "symptom"),
    [
        (KeepsAPage, r"of 26 pages \[\d+\] have no owner"),
        (KeepsAPreemptedPage, "counts 1 holders, 0 leases hold it"),
        (KeepsPoints, r"points \[[\d, ]+\] have no owner"),
        (KeepsSlots, r"of 4 slots \[\d\] have no owner"),
        (GivesBackTwice, r"page \d+ has two owners"),
        (SavesElsewhere, "window|raw"),
        (NoPoints, "window|raw"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
@pytest.mark.parametrize("setting", [SHORT, REAL], ids=["short", "real"])
def test_a_fault_in_the_books_is_found(
    setting: Setting, ledger: type[Ledger], symptom: str
) -> None:
    with pytest.raises(AssertionError, match=symptom):
        run(replace(setting, ledger=ledger), 3)


@pytest.mark.parametrize(
    ("change", "symptom"),
    [
        (lacking("window"), "^window"),
        (lacking("mtp.window"), "^mtp.window"),
        (lacking("sparse.raw"), "^sparse.raw"),
        (other_span("kv", 0), "^sparse.raw"),
        (other_span("index", 1), "^sparse.raw"),
    ],
)
@pytest.mark.parametrize("setting", [SHORT, REAL], ids=["short", "real"])
def test_a_point_that_lacks_anything_is_found(
    setting: Setting, change: Callable[[CacheSpec], CacheSpec], symptom: str
) -> None:
    with pytest.raises(AssertionError, match=symptom):
        run(replace(setting, change=change), 3)
