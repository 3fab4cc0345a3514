"""What the operators of compressed caches need besides their tensors, far into a context.

Kernels take scratch memory where nobody sees it. So here they run as the plain functions that they
are compiled from, and every array that they make is counted.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from surefoot.backend.cpu import kernels
from surefoot.backend.cpu.kernels import compile as compiling
from surefoot.backend.operands import RowLayout
from surefoot.backend.protocol import Backend
from surefoot.backend.reference import ReferenceBackend
from tests.unit.backend.tiled import KERNELS, TILED
from tests.unit.made import Made, Traced

PAGE, WINDOW, SIZE, HEADS, CHOSEN = 128, 8, 32, 2, 16
NEAR, FAR = 2_000, 16_000
"""Tokens before a step."""
SLACK = 2_000
"""Bytes for numbers and views, which Python itself makes."""
Arrays = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]
Run = Callable[[], object]


@dataclass(frozen=True)
class Place:
    """A row of `tokens` tokens behind `first` others, all of whose pages are one and the same."""

    first: int
    tokens: int = 2

    @property
    def layout(self) -> RowLayout:
        last = self.first + self.tokens
        return RowLayout(
            starts=(0, self.tokens),
            first=(self.first,),
            tables=([1] * -(-last // PAGE),),
            slots=(1,),
            visible_from=(0,),
            settled=(self.first,),
            settles=(last,),
            page_tokens=PAGE,
        )

    @property
    def arrays(self) -> Arrays:
        """Rows by slot, rows by table, and pages, as kernels take them."""
        row = (0, self.tokens, self.first, 0)
        return np.array([(*row, 1)]), np.array([(*row, 0)]), np.array(self.layout.tables[0])

    def numbers(self, *shape: int) -> npt.NDArray[np.float32]:
        return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def choose(plain: ModuleType, place: Place) -> Run:
    """Keys of two numbers, as every one of them takes time here."""
    _, tables, pages = place.arrays
    q, pool = place.numbers(place.tokens, 1, 2), place.numbers(2, PAGE // 4, 2)
    weights = place.numbers(place.tokens, 1)
    chosen = np.empty((place.tokens, CHOSEN), np.int64)
    return partial(plain.choose_entries, q, weights, pool, 4, tables, pages, chosen)


def attend(ratio: int, some: bool, plain: ModuleType, place: Place) -> Run:
    own, ring = place.numbers(place.tokens, SIZE), place.numbers(2, WINDOW + 3, SIZE)
    q, pool = place.numbers(place.tokens, HEADS, SIZE), place.numbers(2, PAGE // ratio, SIZE)
    shape = (place.tokens, 1) if some else (0, 0)
    chosen = np.tile(np.arange(CHOSEN if some else 0), shape).reshape(shape[0], -1 if some else 0)
    inputs = (q, own, ring, WINDOW, pool, ratio, chosen, place.numbers(HEADS), np.float32(0.1))
    return partial(plain.attend_latents, *inputs, *place.arrays, np.empty_like(q))


def compress(plain: ModuleType, place: Place) -> Run:
    tokens = place.tokens
    raw, ring = place.numbers(tokens, 4 * SIZE), place.numbers(2, 11, 4 * SIZE)
    pool, norm = place.numbers(2, PAGE // 4, SIZE), place.numbers(SIZE)
    angles = place.numbers(tokens, SIZE), place.numbers(tokens, SIZE)
    inputs = (raw, ring, pool, 4, 2, norm, np.float32(1e-6), *angles)
    return partial(plain.compress, *inputs, *place.arrays)


attend_to_some = partial(attend, 4, True)
attend_to_all = partial(attend, PAGE, False)
RUNS: dict[str, Callable[[ModuleType, Place], Run]] = {
    "choose": choose,
    "attend to some": attend_to_some,
    "attend to all": attend_to_all,
    "compress": compress,
}


def same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def uncompiled(name: str) -> ModuleType:
    """One file of the kernels, whose functions are left as they are written."""
    path = Path(kernels.__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"uncompiled_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with (
        patch.multiple(compiling, part=same, lanes=same, extremes=same),
        patch.object(compiling, "kernel", lambda _: same),
    ):
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plain() -> ModuleType:
    algebra = {f"{kernels.__name__}.algebra": uncompiled("algebra")}
    with patch.dict(sys.modules, algebra):
        return uncompiled("latents")


def scratch(run: Run) -> int:
    """Most bytes that are taken at once while it runs; at times Python takes some for itself."""

    def once() -> int:
        with Traced() as traced:
            run()
        return traced.peak

    return min(once() for _ in range(3))


@pytest.mark.parametrize("name", ["choose", "attend to some", "compress"])
def test_scratch_memory_does_not_grow_with_the_context(name: str, plain: ModuleType) -> None:
    near, far = (scratch(RUNS[name](plain, Place(first))) for first in (NEAR, FAR))
    assert abs(far - near) < SLACK


def test_attention_to_all_entries_copies_none_of_them(plain: ModuleType) -> None:
    """A place, two scores and what counts to them are less than a head of an entry."""
    near, far = (scratch(attend_to_all(plain, Place(first))) for first in (NEAR, FAR))
    entries = FAR // PAGE - NEAR // PAGE
    assert 0 < far - near < entries * SIZE + SLACK


@pytest.mark.parametrize("name", RUNS)
def test_scratch_memory_does_not_grow_with_the_step(name: str, plain: ModuleType) -> None:
    few, many = (scratch(RUNS[name](plain, Place(NEAR, tokens))) for tokens in (2, 12))
    assert abs(many - few) < SLACK


backends = pytest.mark.parametrize(
    "backend", [KERNELS, TILED, ReferenceBackend()], ids=["kernels", "tiled", "reference"]
)


def chosen_at(place: Place, backend: Backend, count: int) -> tuple[Tensor, int]:
    """What the indexer chooses, and the bytes of the largest tensor that it makes."""
    q, weights = (torch.tensor(place.numbers(place.tokens, *more)) for more in ((2, SIZE), (2,)))
    pool = torch.tensor(place.numbers(2, PAGE // 4, SIZE))
    rows = backend.rows(place.layout)
    with Made() as made:
        chosen = rows.choose_entries(q, weights, pool, 4, count)
    return chosen, made.largest


@backends
def test_a_choice_is_as_wide_as_asked_however_few_entries_there_are(backend: Backend) -> None:
    """So that the width of a recorded step does not depend on its rows."""
    chosen, _ = chosen_at(Place(NEAR - 2, 9), backend, NEAR)
    assert chosen.shape == (9, NEAR)
    seen = (NEAR - 1) // 4
    assert chosen[0, :seen].tolist() == [*range(seen)]
    assert (chosen[0, seen:] == -1).all()
    empty, _ = chosen_at(Place(0, 3), backend, 5)
    assert empty.tolist() == [[-1] * 5] * 3


@backends
def test_no_tensor_of_the_choice_is_as_large_as_the_keys(backend: Backend) -> None:
    _, largest = chosen_at(Place(FAR, 1), backend, CHOSEN)
    entries = FAR // 4
    # Places among all entries, and the keys of some.
    assert largest <= max(entries * 8, 1024 * SIZE * 4) < entries * SIZE * 4 / 2
