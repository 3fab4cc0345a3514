"""The cache tensors: their shapes, the work of the ledger, and poison."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.ids import PageId, PointId, SlotId
from surefoot.state.ledger import Clear, Restore, Save, Work
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec, Held, Paged, Part, Recurrent, Ring
from tests.unit.state.plans import plan_of

K, V = Part("k", (2, 3), "float32"), Part("v", (2, 3), "bfloat16")
KV = Paged("kv", 2, (K, V))
LATENT = Paged("latent", 1, (Part("c", (5,), "float32"),), ratio=4)
WINDOW = Ring("window", 3, (K,), 6, Held(6))
DELTA = Recurrent(
    "delta", 1, (Part("state", (2, 4), "float32"),), (Part("x", (7,), "float32"),), block=8
)
RAW = Ring("raw", 2, (Part("y", (6,), "float32"),), 8, Held(4, {"y": ((0, 2), (3, 4))}))
SCRATCH = Ring("scratch", 1, (K,), 8, held=None)
SPECS: tuple[CacheSpec, ...] = (KV, LATENT, WINDOW, DELTA)


def pools_of(*specs: CacheSpec) -> Pools:
    """Five pages of eight tokens or more, three slots, two points, drafts of two."""
    plan = plan_of(
        *specs,
        page_tokens=8,
        draft_tokens=2,
        max_rows=3,
        max_model_len=40,
        budget_bytes=1 << 15,
        points=2,
    )
    pools = Pools(specs, plan, torch.device("cpu"))
    assert pools.bytes == plan.total_bytes
    return pools


def points_of(pools: Pools, cache: str, part: str) -> list[Tensor]:
    """What resume points hold of it, one tensor for each span: [layers, points, ...]."""
    return [saved.points for saved in pools._saved.get((cache, part), ())]


def test_pools_have_the_shapes_of_their_specs() -> None:
    pools = pools_of(*SPECS)
    pages = pools.paged("kv", "k").shape[1]
    assert pages >= 6
    assert pools.paged("kv", "k").shape == (2, pages, 2, 8, 3)
    assert pools.paged("kv", "v").dtype == torch.bfloat16
    assert pools.paged("latent", "c").shape == (1, pages, 2, 5)
    assert pools.rows("window", "k").shape == (3, 4, 6 + 2 + 1, 2, 3)
    assert pools.rows("delta", "state").shape == (1, 4, 2, 4)
    assert pools.rows("delta", "x").shape == (1, 4, 8 + 2, 7)


def test_points_hold_windows_and_checkpoints_and_no_more() -> None:
    pools = pools_of(*SPECS, RAW, SCRATCH)
    shapes = {name: [held.shape for held in points_of(pools, *name)] for name in pools._rows}
    assert shapes == {
        ("window", "k"): [(3, 2, 6, 2, 3)],
        ("delta", "state"): [(1, 2, 2, 4)],
        ("delta", "x"): [],
        ("raw", "y"): [(2, 2, 4, 2), (2, 2, 4, 1)],
        ("scratch", "k"): [],
    }


def test_a_ring_outside_of_points_is_neither_cleared_nor_copied() -> None:
    pools = pools_of(KV, WINDOW, SCRATCH)
    one, two, three, point = SlotId(1), SlotId(2), SlotId(3), PointId(1)
    pools.poison([], [one, two, three], [], 3.0)
    pools.apply(Work([], [Clear(one), Save(two, point, 8), Restore(point, three, 8)]))
    saved, scratch = pools.rows("window", "k"), pools.rows("scratch", "k")
    assert [bool(saved[:, row].any()) for row in (one, two, three)] == [False, True, True]
    assert [bool((scratch[:, row] == 3).all()) for row in (one, two, three)] == [True] * 3


def test_pools_start_as_zeros() -> None:
    pools = pools_of(*SPECS)
    assert pools.paged("kv", "k").count_nonzero() == 0
    assert pools.rows("delta", "state").count_nonzero() == 0


@pytest.mark.parametrize(
    "specs", [(KV,), (WINDOW,), (*SPECS, RAW, SCRATCH)], ids=["paged", "ring", "all"]
)
def test_bytes_are_those_of_the_plan(specs: tuple[CacheSpec, ...]) -> None:
    assert pools_of(*specs).bytes > 0


def test_handed_out_pages_are_cleared_and_others_are_not() -> None:
    pools = pools_of(KV, LATENT)
    pools.poison([PageId(page) for page in range(4)], [], [], 3.0)
    pools.apply(Work(clear_pages=[PageId(1), PageId(2), PageId(1)]))
    for name, part in (("kv", "k"), ("kv", "v"), ("latent", "c")):
        pool = pools.paged(name, part)
        assert pool[:, 1:3].count_nonzero() == 0
        assert (pool[:, [0, 3]] == 3).all()


def test_moves_happen_in_order() -> None:
    """A slot is saved to a point, cleared for the next request and filled from another point."""
    pools = pools_of(WINDOW, DELTA)
    slot, saved, other = SlotId(1), PointId(0), PointId(1)
    pools.poison([], [slot], [], 1.0)
    pools.poison([], [], [other], 2.0)
    pools.apply(Work([], [Save(slot, saved, 8), Clear(slot), Restore(other, slot, 8)]))
    for cache, part in (("window", "k"), ("delta", "state")):
        [points], rows = points_of(pools, cache, part), pools.rows(cache, part)
        assert (points[:, 0] == 1).all()
        assert (points[:, 1] == 2).all()
        assert (rows[:, slot] == 2).any()
        assert not (rows[:, slot] == 1).any()
        assert rows[:, 2].count_nonzero() == 0


@pytest.mark.parametrize("end", [8, 16, 24, 64, 80])
def test_a_row_restored_has_what_was_saved_and_zeros_elsewhere(end: int) -> None:
    pools = pools_of(WINDOW, DELTA, RAW)
    one, two, point = SlotId(1), SlotId(3), PointId(1)
    names = list(pools._rows)
    for name in names:
        rows = pools.rows(*name)
        rows[:, one] = torch.rand(rows[:, one].shape, generator=torch.Generator().manual_seed(3))
    before = {name: pools.rows(*name)[:, one].clone() for name in names}
    pools.poison([], [two], [point], torch.nan)
    pools.apply(Work([], [Save(one, point, end)]))
    pools.poison([], [one], [], torch.nan)
    pools.apply(Work([], [Restore(point, two, end)]))
    # Which columns of a ring, and which of an entry's numbers, a page leaves to the next one.
    window = [position % 9 for position in range(end - 6, end)]
    raw = [position % 11 for position in range(end - 4, end)]
    kept = {name: torch.zeros_like(before[name], dtype=torch.bool) for name in names}
    kept["window", "k"][:, window] = True
    kept["delta", "state"][:] = True
    kept["raw", "y"][:, raw] = torch.tensor([1, 1, 0, 1, 0, 0], dtype=torch.bool)
    for name in names:
        assert torch.equal(pools.rows(*name)[:, two], before[name].where(kept[name], 0)), name


def test_one_row_is_cleared_and_no_other() -> None:
    pools = pools_of(WINDOW)
    pools.rows("window", "k")[:] = 1.0
    pools.apply(Work([], [Clear(SlotId(2))]))
    rows = pools.rows("window", "k")
    assert rows[:, 2].count_nonzero() == 0
    assert (rows[:, [0, 1, 3]] == 1).all()


def test_no_work_changes_nothing() -> None:
    pools = pools_of(*SPECS)
    pools.poison([PageId(1)], [SlotId(1)], [], 3.0)
    before = pools.paged("kv", "k").clone(), pools.rows("window", "k").clone()
    pools.apply(Work())
    assert torch.equal(pools.paged("kv", "k"), before[0])
    assert torch.equal(pools.rows("window", "k"), before[1])


def test_poison_fills_pages_and_rows_of_all_caches() -> None:
    pools = pools_of(*SPECS)
    pools.poison([PageId(2)], [SlotId(3)], [PointId(0)], float("nan"))
    for name, part in (("kv", "k"), ("kv", "v"), ("latent", "c")):
        pool = pools.paged(name, part)
        assert pool[:, 2].isnan().all()
        assert not pool[:, [0, 1, 3]].isnan().any()
    for name, part in (("window", "k"), ("delta", "state"), ("delta", "x")):
        rows = pools.rows(name, part)
        assert rows[:, 3].isnan().all()
        assert not rows[:, [0, 1, 2]].isnan().any()
    for name, part in (("window", "k"), ("delta", "state")):
        [points] = points_of(pools, name, part)
        assert points[:, 0].isnan().all()
        assert not points[:, 1].isnan().any()


def test_poison_leaves_integers_alone() -> None:
    pools = pools_of(Paged("index", 1, (Part("id", (1,), "int32"), K)))
    pools.poison([PageId(1)], [], [], float("nan"))
    assert pools.paged("index", "id").count_nonzero() == 0
    assert pools.paged("index", "k")[:, 1].isnan().all()
