"""Checkpoints of all layers move on together, each as if its layer were alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from surefoot.backend.operands import DeltaCaches, Fold
from surefoot.backend.protocol import Backend
from surefoot.backend.reference import ReferenceBackend
from surefoot.model.layers.delta import BLOCK, DeltaSizes, fold_layers
from surefoot.state.pool import Pools
from tests.unit.backend.tiled import KERNELS, TILED
from tests.unit.state.plans import plan_of

SIZES = DeltaSizes(key_heads=1, value_heads=2, key_size=8, value_size=12, taps=4)
PARTS = ("state", "k", "value", "decay", "beta")
NAME = "some.delta"


def filled_pools(layers: int) -> Pools:
    """Pools of random numbers, the same each time."""
    specs = SIZES.caches(layers, "float32", "some.")
    plan = plan_of(*specs, draft_tokens=3, max_rows=5)
    pools, draws = Pools(specs, plan, torch.device("cpu")), torch.Generator().manual_seed(layers)
    for part in PARTS:
        pool = pools.rows(NAME, part)
        pool.copy_(torch.randn(pool.shape, generator=draws) / 4)
    pools.rows(NAME, "decay").abs_().neg_()
    return pools


def caches_of(pools: Pools, layer: int) -> DeltaCaches:
    state, k, value, decay, beta = (pools.rows(NAME, part)[layer] for part in PARTS)
    return DeltaCaches(state, k, value, decay, beta, BLOCK)


class Counting(ReferenceBackend):
    """Keeps how many folds came in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def fold_delta(self, caches: DeltaCaches, folds: Sequence[Fold]) -> None:
        self.calls.append(len(folds))
        super().fold_delta(caches, folds)


@pytest.mark.parametrize(
    "backend", [KERNELS, TILED, ReferenceBackend()], ids=["cpu", "tiled", "reference"]
)
@pytest.mark.parametrize("layers", [1, 3])
def test_every_layer_moves_on_as_if_alone(layers: int, backend: Backend) -> None:
    folds = [Fold(2, 32), Fold(4, 0)]
    want, got = filled_pools(layers), filled_pools(layers)
    before = want.rows(NAME, "state").clone()
    for layer in range(layers):
        backend.fold_delta(caches_of(want, layer), folds)
    fold_layers("some.", folds, got, backend)
    for part in PARTS:
        assert torch.equal(got.rows(NAME, part), want.rows(NAME, part)), part
    moved = (want.rows(NAME, "state") != before).flatten(2).any(2)
    assert moved.tolist() == [[slot in (2, 4) for slot in range(moved.shape[1])]] * layers


def test_a_call_has_so_many_folds_at_most() -> None:
    backend, folds = Counting(), [Fold(slot, 16) for slot in range(1, 6)]
    want, got = filled_pools(30), filled_pools(30)
    fold_layers("some.", folds, got, backend)
    assert backend.calls == [64, 64, 22]
    for layer in range(30):
        KERNELS.fold_delta(caches_of(want, layer), folds)
    torch.testing.assert_close(got.rows(NAME, "state"), want.rows(NAME, "state"))


def test_no_folds_are_no_call() -> None:
    backend = Counting()
    fold_layers("some.", [], filled_pools(2), backend)
    assert backend.calls == []
