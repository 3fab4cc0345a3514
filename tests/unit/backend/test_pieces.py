"""Linears on the matrix unit: as good as float32, and the same bits beside any rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from threading import Barrier
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from surefoot.backend.blockwise.linear import swiglu
from surefoot.backend.cpu import CpuBackend, halves
from surefoot.backend.cpu.experts import CompiledExperts, CompiledGated
from surefoot.backend.cpu.kernels import matrix_unit, pieces
from surefoot.backend.cpu.linear import RowInvariant, pack_fast
from surefoot.backend.cpu.pieces import (
    PiecesGated,
    PiecesLinear,
    _scratch,
    group_weights,
    suits_unit,
)
from surefoot.backend.reference import ReferenceBackend
from tests.unit.backend.conformance import differing
from tests.unit.backend.conformance_int8 import experts_case
from tests.unit.backend.cuts import assert_row_invariant
from tests.unit.backend.test_int8 import fenced, same

# Outputs and inputs.
SHAPES = [(1, 1), (64, 32), (65, 33), (63, 31), (17, 64), (70, 130), (257, 36), (20, 1500)]
TOKENS = (0, 1, 2, 15, 16, 17, 31, 33, 48)
ROWS = 40
EPS = 2.0**-24
UNITS = 8  # of EPS * sum |x w|: what a sum may be off; float32's own are up to 10 here, ours 6
LEAST = 2.0**-126
NO_STREAM = torch.empty(0, 0)
FORMS = ("linear", "gated", "limited")

on_unit = pytest.mark.skipif(
    not matrix_unit.permitted(), reason="the processor has no matrix unit for bfloat16"
)
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
by_form = pytest.mark.parametrize("form", FORMS)
sizes = st.tuples(st.integers(1, 70), st.integers(1, 130))
magnitudes = st.integers(24 << 23, (255 << 23) - 1)  # as bits; all three pieces are normal numbers

Own = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


def rounded(weight: Tensor) -> Tensor:
    """Numbers of bfloat16, kept in float32."""
    return weight.bfloat16().float()


def case(shape: tuple[int, int], rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, bias and input; every other input has a size of its own."""
    outputs, inputs = shape
    draws = torch.Generator().manual_seed(1000 * outputs + inputs)
    x = torch.randn(rows, inputs, generator=draws)
    x[:, 1::2] *= torch.exp2(torch.randint(-6, 7, (rows, inputs // 2), generator=draws).float())
    weight = rounded(torch.randn(outputs, inputs, generator=draws))
    return weight, torch.randn(outputs, generator=draws), x


def packed(form: str, shape: tuple[int, int], biased: bool = True) -> PiecesLinear | PiecesGated:
    weight, bias, _ = case((shape[0] if form == "linear" else 2 * shape[0], shape[1]))
    added = bias if biased else None
    if form == "linear":
        return PiecesLinear.pack(weight, added)
    return PiecesGated.pack(weight, added, 0.5 if form == "limited" else math.inf)


def sums_and_room(weight: Tensor, bias: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """Products in float64, and how far from them those of float32 may be."""
    wide = weight.double().t()
    want, size = x.double() @ wide, x.double().abs() @ wide.abs()
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    return want, UNITS * EPS * size


@on_unit
@example((64, 32), True)
@example((70, 130), True)
@example((65, 33), False)
@example((1, 1), False)
@given(sizes, st.booleans())
def test_sums_are_as_near_to_the_truth_as_those_of_float32(
    shape: tuple[int, int], biased: bool
) -> None:
    weight, bias, x = case(shape, max(TOKENS))
    added = bias if biased else None
    linear = PiecesLinear.pack(weight, added)
    want, room = sums_and_room(weight, added, x)
    stream = torch.randn(len(x), shape[0], generator=torch.Generator().manual_seed(1))
    kept = stream.clone()
    for rows in TOKENS:
        got, more = linear(x[:rows]), linear.add(x[:rows], stream[:rows])
        assert (got.dtype, got.shape) == (torch.float32, (rows, shape[0]))
        assert ((got.double() - want[:rows]).abs() <= room[:rows]).all()
        assert torch.equal(more, stream[:rows] + got)
    assert torch.equal(stream, kept)


@on_unit
@pytest.mark.parametrize("inputs", [1, 2, 33, 130])
def test_errors_are_no_greater_than_those_of_float32(inputs: int) -> None:
    """On the whole; of a single product float32 has the last bit right, and a sum of three not."""
    weight, _, x = case((70, inputs), 480)
    want, room = sums_and_room(weight, None, x)

    def error(got: Tensor) -> float:
        return float(((got.double() - want) / room).square().mean().sqrt())

    assert error(PiecesLinear.pack(weight, None)(x)) <= 1.25 * error(F.linear(x, weight))


def kernel_results(
    linear: PiecesLinear | PiecesGated, x: Tensor, stream: Tensor, own: Own
) -> tuple[Tensor, Tensor]:
    """Results on arrays that `own` has made, and the pieces left behind; before, both are NaN."""
    scratch = own(np.full_like(_scratch(*x.shape), 0x7FC0))
    out = own(np.full((len(x), linear.outputs), np.nan, np.float32))
    inside = own(x.numpy()), scratch, own(linear.weight), own(linear.bias)
    if isinstance(linear, PiecesGated):
        pieces.gated(*inside, np.float32(linear.limit), out)
    else:
        pieces.linear(*inside, own(stream.numpy()), out)
    found = torch.from_numpy(scratch.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(out.copy()), found.double()


@on_unit
@example([(0x3FFFFFFF, False)] * 33)
@given(st.lists(st.tuples(magnitudes, st.booleans()), min_size=1, max_size=70))
def test_the_pieces_of_a_number_add_up_to_it(numbers: list[tuple[int, bool]]) -> None:
    bits = [size | (-(1 << 31) if negative else 0) for size, negative in numbers]
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    for each in (x[None], x[:, None]):
        rows, inputs = each.shape
        linear = PiecesLinear.pack(torch.eye(inputs), None)
        got, found = kernel_results(linear, each, NO_STREAM, np.copy)
        made_up = (0, found.shape[2] - inputs, 0, found.shape[1] - rows)
        assert torch.equal(found.sum(0), F.pad(each.double(), made_up))
        assert torch.equal(got, each)


@on_unit
def test_what_is_below_the_least_normal_number_counts_as_zero() -> None:
    draws = torch.Generator().manual_seed(1)
    bits = torch.randint(1, 24 << 23, (480, 1), generator=draws, dtype=torch.int32)
    bits[:16] >>= 5  # below the least
    x, great = bits.view(torch.float32), PiecesLinear.pack(torch.full((1, 1), 2.0**100), None)
    got, found = kernel_results(great, x, NO_STREAM, np.copy)
    normal = torch.where(found < LEAST, 0, found).sum(0)
    assert torch.equal(got.double(), normal[:, :1] * 2.0**100)
    assert not got[:16].any()
    assert 0 < int((normal[16:, :1] == x[16:]).sum()) < 400, "some have pieces that count as zero"
    for factor, number in ((2.0**-127, 2.0**100), (2.0**-70, 2.0**-70)):  # a weight, a product
        linear = PiecesLinear.pack(torch.tensor([[factor]]), None)
        assert linear(torch.tensor([[number]])).item() == 0


@on_unit
@by_form
@by_shape
def test_rows_have_the_same_bits_beside_any_others(shape: tuple[int, int], form: str) -> None:
    linear, x = packed(form, shape), case(shape, 130)[2]
    assert_row_invariant(linear, x)
    if isinstance(linear, PiecesLinear):
        turn = torch.zeros(shape[1], shape[0]).fill_diagonal_(1)
        assert_row_invariant(partial(_added, linear, turn), x)


def _added(linear: PiecesLinear, turn: Tensor, x: Tensor) -> Tensor:
    """The product added to a stream that depends on the same row alone."""
    return linear.add(x, x @ turn)


@on_unit
@given(
    st.lists(st.integers(0, ROWS - 1), max_size=51), st.sampled_from(SHAPES), st.sampled_from(FORMS)
)
def test_any_rows_in_any_order_are_the_rows_one_by_one(
    picked: list[int], shape: tuple[int, int], form: str
) -> None:
    linear, x = packed(form, shape), case(shape)[2]
    alone = [linear(x[row : row + 1]) for row in picked]
    assert torch.equal(linear(x[picked]), torch.cat([linear(x[:0]), *alone]))


@on_unit
@by_form
@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_changes_no_bit(threads: int, form: str) -> None:
    x, before = case((257, 36))[2], torch.get_num_threads()
    try:
        for rows in (1, 5, 40):
            torch.set_num_threads(1)
            want = packed(form, (257, 36))(x[:rows])
            torch.set_num_threads(threads)
            assert torch.equal(packed(form, (257, 36))(x[:rows]), want)
    finally:
        torch.set_num_threads(before)


@on_unit
def test_threads_that_compute_at_once_do_not_disturb_each_other() -> None:
    """Each with its own number of tokens, for which the tiles are divided in its own way."""
    shape, kinds = (200, 700), [("linear", 3), ("linear", 33), ("limited", 16), ("gated", 1)]
    jobs = [(packed(form, shape), case(shape, rows)[2]) for form, rows in kinds]
    alone, start = [linear(x) for linear, x in jobs], Barrier(len(jobs))

    def works(number: int) -> bool:
        linear, x = jobs[number]
        start.wait()
        return all(torch.equal(linear(x), alone[number]) for _ in range(200))

    with ThreadPoolExecutor(len(jobs)) as pool:
        assert all(pool.map(works, range(len(jobs))))


@on_unit
@by_form
@pytest.mark.parametrize("place", [0, 31, 69])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7F800000, -0x00800000], ids=hex)
def test_a_row_that_is_not_finite_spoils_itself_alone(bits: int, place: int, form: str) -> None:
    """NaN, one whose highest piece alone would be infinite, and both infinities."""
    linear, (_, _, x) = packed(form, (33, 70)), case((33, 70), 20)
    spoiled = x.clone()
    spoiled.view(torch.int32)[7, place] = bits
    for first in (0, 7):
        got, want = linear(spoiled[first:]), linear(x[first:])
        assert got[7 - first].isnan().all()
        others = torch.arange(first, 20) != 7
        assert torch.equal(got[others], want[others])
        assert want.isfinite().all()


@on_unit
@example((32, 32), True, 0.25)
@example((33, 33), True, math.inf)
@given(sizes, st.booleans(), st.sampled_from([math.inf, 3.0, 0.25]))
def test_a_gated_pair_is_silu_of_the_gate_times_up(
    shape: tuple[int, int], biased: bool, limit: float
) -> None:
    """Against float64: the errors of both sums, handed on, and a few roundings."""
    weight, bias, x = case((2 * shape[0], shape[1]), max(TOKENS))
    added = bias if biased else None
    (gate, up), (off, up_off) = (each.chunk(2, 1) for each in sums_and_room(weight, added, x))
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    silu, least = gate * gate.sigmoid(), 1e-36 * up.abs()  # silu below -88 counts as 0
    want = silu * up
    room = 1.1 * off * (up.abs() + up_off) + silu.abs() * up_off + 10 * EPS * want.abs()
    gated, both = PiecesGated.pack(weight, added, limit), PiecesLinear.pack(weight, added)
    for rows in TOKENS:
        got, plain = gated(x[:rows]), swiglu(both(x[:rows]), limit)
        assert (got.dtype, got.shape) == (torch.float32, (rows, shape[0]))
        assert ((got.double() - want[:rows]).abs() <= (room + least)[:rows]).all()
        assert ((got - plain).abs() <= 10 * EPS * plain.abs() + least[:rows]).all()


@on_unit
@by_form
@by_shape
def test_nothing_outside_of_arrays_is_touched(shape: tuple[int, int], form: str) -> None:
    """Pages that may not be touched lie right before and behind each array the kernel is given."""
    x = case(shape)[2]
    for biased in (False, True):
        linear = packed(form, shape, biased)
        for at_end, rows in product((False, True), (1, 15, 16, 17, 33)):
            own = partial(fenced, at_end=at_end)
            got = kernel_results(linear, x[:rows], NO_STREAM, own)[0]
            assert torch.equal(got, linear(x[:rows]))
            if isinstance(linear, PiecesLinear):
                more = kernel_results(linear, x[:rows], torch.ones(got.shape), own)[0]
                assert torch.equal(more, 1 + got)


@on_unit
def test_tensors_may_be_parts_of_others() -> None:
    weight, bias, x = case((66, 45))
    wide = F.pad(x, (3, 2), value=math.nan)
    apart = weight.t().contiguous().t(), torch.stack((bias, bias), 1)[:, 0]
    inner = F.pad(weight, (1, 1), value=math.pi)[:, 1:-1], bias
    plain, gated = PiecesLinear.pack(weight, bias), PiecesGated.pack(weight, bias, 0.5)
    for other in (apart, inner):
        assert suits_unit(other[0])
        assert same(PiecesLinear.pack(*other)(wide[:, 3:-2]), plain(x))
        assert same(PiecesGated.pack(*other, 0.5)(wide[:, 3:-2]), gated(x))
    assert same(plain(x.t().contiguous().t()), plain(x))
    assert same(plain.add(x, torch.ones(66, ROWS).t()), plain(x) + 1)


@on_unit
def test_what_does_not_fit_the_weight_stops() -> None:
    """Compiled code looks at no sizes."""
    weight, bias, x = case((33, 70))
    for form in FORMS:
        for wrong in (x[:, :69], F.pad(x, (0, 1)), x[:0, :69]):
            with pytest.raises(AssertionError, match="and 70 are wanted"):
                packed(form, (33, 70))(wrong)
    linear = PiecesLinear.pack(weight, bias)
    for shape in ((1, 33), (3, 33), (2, 32), (2, 34), (0, 0)):
        with pytest.raises(AssertionError, match="streams do not fit"):
            linear.add(x[:2], torch.zeros(shape))


@by_shape
def test_weights_lie_where_the_unit_reads_them(shape: tuple[int, int]) -> None:
    weight = case(shape)[0]
    grouped, (outputs, inputs) = group_weights(weight), shape
    assert grouped.shape == (-(-outputs // 64), -(-inputs // 32) * 32 * 64)
    values = torch.from_numpy(grouped.view(np.int16)).view(torch.bfloat16).float()
    n, k = torch.arange(outputs)[:, None], torch.arange(inputs)
    tile = k // 32 * 4 + n % 64 // 16
    place = (tile * 16 + k % 32 // 2) * 32 + n % 16 * 2 + k % 2
    assert torch.equal(values[n // 64, place], weight)
    values[n // 64, place] = 0
    assert not values.any(), "what is made up is zero"


@pytest.mark.parametrize("digit", range(16))
def test_a_number_with_more_digits_is_not_for_the_unit(
    monkeypatch: pytest.MonkeyPatch, digit: int
) -> None:
    monkeypatch.setattr(matrix_unit, "permitted", lambda: True)
    weight = case((65, 33))[0]
    assert suits_unit(weight)
    weight.view(torch.int32)[digit * 4, digit * 2] ^= 1 << digit
    assert not suits_unit(weight)
    assert not suits_unit(weight.t())


def test_other_weights_are_not_for_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_unit, "permitted", lambda: True)
    weight = case((65, 33))[0]
    for other in (weight.bfloat16(), weight.half(), weight.double(), weight[:0], weight[:, :0]):
        assert not suits_unit(other)


def kinds_of(backend: CpuBackend, weight: Tensor, bias: Tensor) -> list[type]:
    """What the backend makes of it: a linear, gated pairs without and with a limit, experts."""
    made = backend.pack_experts(weight[None], weight[None, :20, :3])
    assert isinstance(made, CompiledExperts)
    limited = backend.pack_gated(weight, bias, 0.5)
    packed = (backend.pack_linear(weight, bias), backend.pack_gated(weight, bias), limited)
    return [type(each) for each in (*packed, *made.gate_up, *made.down)]


@pytest.mark.parametrize("bitwise", [True, False])
def test_without_the_unit_weights_are_packed_as_others_are(
    monkeypatch: pytest.MonkeyPatch, bitwise: bool
) -> None:
    monkeypatch.setattr(matrix_unit, "permitted", lambda: False)
    monkeypatch.setattr(halves, "HAS_VECTORS", False)
    weight, bias, x = case((66, 20))
    assert not suits_unit(weight)
    backend, invariant = CpuBackend(bitwise), RowInvariant()
    want = invariant.pack(weight, bias) if bitwise else pack_fast(weight, bias)
    assert torch.equal(backend.pack_linear(weight, bias)(x), want(x))
    assert backend.invariant.report() == invariant.report()
    kinds = kinds_of(backend, weight, bias)
    assert kinds[:3] == [type(want), CompiledGated, CompiledGated]
    assert kinds == kinds_of(backend, weight + 1e-3, bias), "weights that do not suit the unit"


@on_unit
@pytest.mark.parametrize("bitwise", [True, False])
def test_the_backend_packs_for_the_unit_what_suits_it(bitwise: bool) -> None:
    weight, bias, x = case((66, 20))
    backend, limited = CpuBackend(bitwise), PiecesGated.pack(weight, bias, 0.5)
    want = [PiecesLinear, PiecesGated, PiecesGated, PiecesLinear, PiecesLinear]
    assert kinds_of(backend, weight, bias) == want
    assert torch.equal(backend.pack_gated(weight, bias, 0.5)(x), limited(x))
    assert backend.invariant.report() == {}, "no shape had to be tested"
    assert not {PiecesLinear, PiecesGated} & {*kinds_of(backend, weight + 1e-3, bias)}


def fitting(weight: Tensor) -> Tensor:
    """Has products of about the same size for any number of inputs."""
    return rounded(weight / weight.shape[-1] ** 0.5)


@on_unit
@pytest.mark.parametrize("seed", range(30))
def test_experts_of_such_weights_conform_to_the_reference(seed: int) -> None:
    want = experts_case(ReferenceBackend(), seed, fitting, fitting, unit=4)
    assert differing(experts_case(CpuBackend(), seed, fitting, fitting, unit=4), want) == []
