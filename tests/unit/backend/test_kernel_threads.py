"""Parts of kernels on the framework's threads: each is run once, and errors come out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest
import torch
from numba import njit
from torch import Tensor

from surefoot.backend.cpu import CpuBackend
from surefoot.backend.cpu import threads as threads_for
from surefoot.backend.cpu.kernels import threads as pooled
from surefoot.backend.cpu.kernels.threads import on_threads
from surefoot.backend.noise import noise_key
from surefoot.backend.protocol import Backend
from tests.unit.backend.conformance import OPERATORS, Run
from tests.unit.twins import same_bits

Counts = npt.NDArray[np.int64]
MOST = 5

with_pool = pytest.mark.skipif(not pooled.HAS_THREADS, reason="the framework has no pool to share")


@njit(nogil=True)
def _count(counts: Counts, wrong: int, number: int, parts: int) -> None:
    if number == wrong:
        raise ValueError("this part fails")
    for place in range(number, counts.shape[0], parts):
        counts[place] += 1 + 100 * parts


@njit(nogil=True)
def _counted(counts: Counts, wrong: int, threads: int) -> None:
    on_threads(_count, threads, (counts, wrong))


def counted(size: int, threads: int, wrong: int = -1) -> Counts:
    counts = np.zeros(size, np.int64)
    _counted(counts, wrong, threads)
    return counts


@with_pool
@pytest.mark.parametrize("threads", range(1, MOST + 1))
@pytest.mark.parametrize("size", [0, 1, 2, 7, 1000])
def test_each_part_is_run_once(size: int, threads: int) -> None:
    assert (counted(size, threads) == 1 + 100 * threads).all()


@with_pool
def test_the_pool_is_that_of_the_framework() -> None:
    x = torch.randn(300, 300)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(20):
            want = x @ x
            assert (counted(9, 2) == 201).all()
            assert torch.equal(x @ x, want)
    finally:
        torch.set_num_threads(before)


@with_pool
@pytest.mark.parametrize("wrong", [0, 2])
def test_a_part_that_fails_is_an_error_and_the_next_call_is_none(wrong: int) -> None:
    with pytest.raises(RuntimeError, match="a part of a kernel failed"):
        counted(10, 3, wrong)
    assert (counted(10, 3) == 301).all()


@with_pool
def test_many_may_call_at_once() -> None:
    with ThreadPoolExecutor(6) as callers:
        found = list(callers.map(lambda number: counted(50, 1 + number % 3), range(200)))
    for number, counts in enumerate(found):
        assert (counts == 1 + 100 * (1 + number % 3)).all()


def test_without_a_pool_there_is_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled, "HAS_THREADS", False)

    def alone(counts: Counts, wrong: int, threads: int) -> None:
        on_threads(_count, threads, (counts, wrong))

    run, counts = njit(nogil=True)(alone), np.zeros(9, np.int64)
    run(counts, -1, 3)
    assert (counts == 101).all()
    with pytest.raises(ValueError, match="this part fails"):
        run(counts, 0, 3)


@contextmanager
def threads_in_use(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def chosen(backend: Backend, seed: int) -> Sequence[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    rows = seed % 9
    scores = torch.randn(rows, 300, generator=draws)
    keys = [noise_key(seed, row) for row in range(rows)]
    return [backend.choose(scores, [row % 3 / 2 for row in range(rows)], keys)]


DIVIDED: Mapping[str, Run] = {
    **{name: OPERATORS[name] for name in ("paged_attention", "attend_pages", "pack_linear")},
    **{name: OPERATORS[name] for name in ("delta_rule", "fold_delta")},
    "choose": chosen,
}


@pytest.mark.parametrize("operator", DIVIDED)
def test_operators_have_the_same_bits_with_any_number_of_threads(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little there is to do."""
    monkeypatch.setattr(threads_for, "_LEAST", 1)
    backend, run = CpuBackend(), DIVIDED[operator]
    for seed in range(25):
        found = []
        for count in (1, 2, 3):
            with threads_in_use(count):
                found.append(run(backend, seed))
        for more in found[1:]:
            assert all(map(same_bits, found[0], more))
