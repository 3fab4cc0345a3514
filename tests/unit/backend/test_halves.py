"""Linears whose weights stay in bfloat16: as good as float32, and the same bits beside any rows."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from threading import Barrier

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from surefoot.backend.cpu import CpuBackend
from surefoot.backend.cpu.experts import CompiledExperts, CompiledGated
from surefoot.backend.cpu.halves import HalvesLinear, group_weights, suits_vectors
from surefoot.backend.cpu.kernels import halves, matrix_unit
from surefoot.backend.cpu.products import LIBRARIES
from tests.unit.backend.cuts import assert_row_invariant
from tests.unit.backend.test_int8 import fenced, same
from tests.unit.backend.test_pieces import ROWS, Own, case, sums_and_room

# Outputs and inputs; 48 outputs are taken at once.
SHAPES = [(1, 1), (48, 32), (47, 2), (49, 33), (96, 64), (97, 130), (257, 36), (20, 1500)]
TOKENS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 33)
THREADS = (1, 2, 3, 5)

with_vectors = pytest.mark.skipif(
    not halves.HAS_VECTORS, reason="the processor has no registers of 16 float32"
)
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
sizes = st.tuples(st.integers(1, 110), st.integers(1, 130))


def packed(shape: tuple[int, int], biased: bool = True) -> HalvesLinear:
    weight, bias, _ = case(shape)
    return HalvesLinear.pack(weight, bias if biased else None)


@with_vectors
@example((48, 32), True)
@example((97, 130), True)
@example((49, 33), False)
@example((1, 1), False)
@given(sizes, st.booleans())
def test_sums_are_as_near_to_the_truth_as_those_of_float32(
    shape: tuple[int, int], biased: bool
) -> None:
    weight, bias, x = case(shape, max(TOKENS))
    added = bias if biased else None
    linear = HalvesLinear.pack(weight, added)
    want, room = sums_and_room(weight, added, x)
    stream = torch.randn(len(x), shape[0], generator=torch.Generator().manual_seed(1))
    kept = stream.clone()
    for rows in TOKENS:
        got, more = linear(x[:rows]), linear.add(x[:rows], stream[:rows])
        assert (got.dtype, got.shape) == (torch.float32, (rows, shape[0]))
        assert ((got.double() - want[:rows]).abs() <= 2 * room[:rows]).all()
        assert torch.equal(more, stream[:rows] + got)
    assert torch.equal(stream, kept)


@with_vectors
@pytest.mark.parametrize("inputs", [1, 33, 256, 1500])
def test_errors_are_about_those_of_the_library(inputs: int) -> None:
    """Which adds up long rows in parts."""
    weight, _, x = case((70, inputs), 480)
    want, room = sums_and_room(weight, None, x)

    def error(got: Tensor) -> float:
        return float(((got.double() - want) / room).square().mean().sqrt())

    library = LIBRARIES["onednn"](weight, None)
    assert error(HalvesLinear.pack(weight, None)(x)) <= 1.5 * error(library(x))


@with_vectors
@by_shape
def test_rows_have_the_same_bits_beside_any_others(shape: tuple[int, int]) -> None:
    linear, x = packed(shape), case(shape, 130)[2]
    assert_row_invariant(linear, x)
    turn = torch.zeros(shape[1], shape[0]).fill_diagonal_(1)
    assert_row_invariant(lambda rows: linear.add(rows, rows @ turn), x)


@with_vectors
@given(st.lists(st.integers(0, ROWS - 1), max_size=51), st.sampled_from(SHAPES))
def test_any_rows_in_any_order_are_the_rows_one_by_one(
    picked: list[int], shape: tuple[int, int]
) -> None:
    linear, x = packed(shape), case(shape)[2]
    alone = [linear(x[row : row + 1]) for row in picked]
    assert torch.equal(linear(x[picked]), torch.cat([linear(x[:0]), *alone]))


@with_vectors
@by_shape
def test_the_number_of_threads_changes_no_bit(shape: tuple[int, int]) -> None:
    linear, x, before = packed(shape), case(shape)[2], torch.get_num_threads()
    found = []
    try:
        for threads in THREADS:
            torch.set_num_threads(threads)
            found.append(torch.cat([linear(x[:rows]) for rows in TOKENS]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


@with_vectors
def test_calls_at_once_do_not_disturb_each_other() -> None:
    shape = (500, 300)
    jobs = [case(shape, rows)[2] for rows in (1, 3, 16, 33)]
    linear, start = packed(shape), Barrier(len(jobs))
    alone = [linear(x) for x in jobs]

    def works(number: int) -> bool:
        start.wait()
        return all(torch.equal(linear(jobs[number]), alone[number]) for _ in range(100))

    with ThreadPoolExecutor(len(jobs)) as pool:
        assert all(pool.map(works, range(len(jobs))))


@with_vectors
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_spoils_itself_alone(number: float) -> None:
    linear, x = packed((49, 70)), case((49, 70), 20)[2]
    spoiled = x.clone()
    spoiled[7, 3] = number
    got, want = linear(spoiled), linear(x)
    others = torch.arange(20) != 7
    assert not got[7].isfinite().any()
    assert torch.equal(got[others], want[others])


def kernel_result(
    linear: HalvesLinear, x: Tensor, stream: Tensor, threads: int, own: Own
) -> Tensor:
    """The result on arrays that `own` has made; before, it is NaN."""
    out = own(np.full((len(x), linear.outputs), np.nan, np.float32))
    inside = own(x.numpy()), own(linear.weight), own(linear.bias), own(stream.numpy())
    halves.halves_linear(*inside, out, threads)
    return torch.from_numpy(out.copy())


@with_vectors
@by_shape
def test_nothing_outside_of_arrays_is_touched(shape: tuple[int, int]) -> None:
    """Pages that may not be touched lie right before and behind each array the kernel is given."""
    x = case(shape)[2]
    for biased, at_end, rows, threads in product((False, True), (False, True), (1, 7, 33), (1, 3)):
        linear, own = packed(shape, biased), partial(fenced, at_end=at_end)
        got = kernel_result(linear, x[:rows], torch.empty(0, 0), threads, own)
        assert torch.equal(got, linear(x[:rows]))
        more = kernel_result(linear, x[:rows], torch.ones(got.shape), threads, own)
        assert torch.equal(more, 1 + got)


@with_vectors
def test_tensors_may_be_parts_of_others() -> None:
    weight, bias, x = case((66, 45))
    wide = F.pad(x, (3, 2), value=math.nan)
    apart = weight.t().contiguous().t(), torch.stack((bias, bias), 1)[:, 0]
    inner = F.pad(weight, (1, 1), value=math.pi)[:, 1:-1], bias
    plain = HalvesLinear.pack(weight, bias)
    for other in (apart, inner):
        assert suits_vectors(other[0])
        assert same(HalvesLinear.pack(*other)(wide[:, 3:-2]), plain(x))
    assert same(plain(x.t().contiguous().t()), plain(x))
    assert same(plain.add(x, torch.ones(66, ROWS).t()), plain(x) + 1)


@with_vectors
def test_what_does_not_fit_the_weight_stops() -> None:
    """Compiled code looks at no sizes."""
    linear, x = packed((33, 70)), case((33, 70))[2]
    for wrong in (x[:, :69], F.pad(x, (0, 1)), x[:0, :69]):
        with pytest.raises(AssertionError, match="and 70 are wanted"):
            linear(wrong)
    for shape in ((1, 33), (3, 33), (2, 32), (2, 34), (0, 0)):
        with pytest.raises(AssertionError, match="streams do not fit"):
            linear.add(x[:2], torch.zeros(shape))


@by_shape
def test_weights_lie_where_they_are_read(shape: tuple[int, int]) -> None:
    weight, (outputs, inputs) = case(shape)[0], shape
    grouped = group_weights(weight)
    assert grouped.shape == (-(-outputs // 48), inputs * 48)
    values = torch.from_numpy(grouped.view(np.int16)).view(torch.bfloat16).float()
    n, k = torch.arange(outputs)[:, None], torch.arange(inputs)
    assert torch.equal(values[n // 48, k * 48 + n % 48], weight)
    values[n // 48, k * 48 + n % 48] = 0
    assert not values.any(), "what is made up is zero"


@with_vectors
@pytest.mark.parametrize("digit", [0, 7, 15])
def test_other_weights_do_not_suit(digit: int) -> None:
    weight = case((65, 33))[0]
    assert suits_vectors(weight)
    for other in (weight.bfloat16(), weight.half(), weight.double(), weight[:0], weight[:, :0]):
        assert not suits_vectors(other)
    weight.view(torch.int32)[digit * 4, digit * 2] ^= 1 << digit
    assert not suits_vectors(weight)
    assert not suits_vectors(weight.t())


@with_vectors
@pytest.mark.parametrize("bitwise", [True, False])
def test_the_backend_packs_what_suits(monkeypatch: pytest.MonkeyPatch, bitwise: bool) -> None:
    monkeypatch.setattr(matrix_unit, "permitted", lambda: False)
    (weight, bias, x), backend = case((66, 20)), CpuBackend(bitwise)
    linear, gated = backend.pack_linear(weight, bias), backend.pack_gated(weight, bias)
    assert isinstance(linear, HalvesLinear)
    assert isinstance(gated, CompiledGated)
    assert isinstance(gated.both, HalvesLinear)
    experts = backend.pack_experts(weight[None], weight[None, :20, :3])
    assert isinstance(experts, CompiledExperts)
    assert {type(each) for each in (*experts.gate_up, *experts.down)} == {HalvesLinear}
    assert backend.invariant.report() == {}, "no shape had to be tested"
    assert torch.equal(linear(x), HalvesLinear.pack(weight, bias)(x))
    assert not isinstance(backend.pack_linear(weight + 1e-3, bias), HalvesLinear)
