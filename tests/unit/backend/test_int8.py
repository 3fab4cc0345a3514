"""Linears in int8: the very bits that are promised, in any form and beside any rows."""

from __future__ import annotations

import ctypes
import math
import mmap
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from surefoot.backend.cpu import CpuBackend
from surefoot.backend.cpu.int8 import FEW_ROWS, Int8Linear
from surefoot.backend.cpu.kernels import dots
from surefoot.backend.operands import LEAST_SCALE, MOST_INPUTS, FixedInput, Int8Weight
from surefoot.backend.plain_int8 import PlainInt8Linear, codes_of, quantise
from surefoot.backend.reference import ReferenceBackend
from surefoot.errors import WeightsError
from tests.unit.backend.conformance_int8 import coded, drawn_inputs, drawn_weight
from tests.unit.backend.cuts import assert_row_invariant

SHAPES = [(1, 1), (16, 64), (17, 65), (67, 20), (33, 300), (257, 36), (64, 64), (20, 1500)]
FORMS = {"few rows": 1 << 20, "many rows": 0} if dots.HAS_DOTS else {"many rows": 0}
ROWS = 40

by_form = pytest.mark.parametrize("few_rows", FORMS.values(), ids=FORMS)


def case(shape: tuple[int, int]) -> tuple[Int8Weight, Tensor, Tensor]:
    """Weight, bias and input."""
    rng, draws = random.Random(shape[0]), torch.Generator().manual_seed(shape[0])
    weight = drawn_weight(rng, draws, shape)
    bias = torch.randn(shape[0], generator=draws)
    return weight, bias, drawn_inputs(rng, draws, ROWS, shape[1])


def same(one: Tensor, other: Tensor) -> bool:
    """Whether all bits are the same; any NaN is like any other."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(0), other.nan_to_num(0)
    )


def written_out(weight: Int8Weight, bias: Tensor | None, x: Tensor) -> Tensor:
    """The definition in whole numbers of any size and single float32 operations."""
    out = torch.empty(len(x), weight.shape[0])
    for m, row in enumerate(x.tolist()):
        if not all(map(math.isfinite, row)):
            out[m] = math.nan
            continue
        peak = torch.tensor(max(map(abs, row)))
        scale = peak / torch.tensor(127.0)
        if scale < LEAST_SCALE or weight.fixed is not None:
            scale = torch.tensor(1.0)
        step = scale if weight.fixed is None else torch.tensor(weight.fixed.scale)
        codes = [round(float(torch.tensor(number) / step)) for number in row]
        if weight.fixed is not None:
            codes = [min(127, max(-128, code + weight.fixed.offset)) for code in codes]
        for n, values in enumerate(weight.values.tolist()):
            total = sum(q * w for q, w in zip(codes, values, strict=True))
            if weight.fixed is not None:
                total += int(weight.fixed.added[n])
            y = torch.tensor(total, dtype=torch.int32).float() * weight.scales[n] * scale
            out[m, n] = y if bias is None else y + bias[n]
    return out


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (5, 65), (18, 20)], ids=str)
def test_the_plainest_form_is_the_definition(shape: tuple[int, int], biased: bool) -> None:
    weight, bias, x = case(shape)
    added = bias if biased else None
    fixed = Int8Weight(
        weight.values, weight.scales, FixedInput(0.03, -7, weight.values.sum(1).int())
    )
    for each in (Int8Weight(weight.values, weight.scales), fixed):
        assert same(PlainInt8Linear(each, added)(x), written_out(each, added, x))


@by_form
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_form_has_the_same_bits(shape: tuple[int, int], biased: bool, few_rows: int) -> None:
    weight, bias, x = case(shape)
    added = bias if biased else None
    plain, ours = PlainInt8Linear(weight, added), Int8Linear.pack(weight, added, few_rows)
    stream = torch.randn(ROWS, shape[0], generator=torch.Generator().manual_seed(1))
    kept = stream.clone()
    assert same(ours(x), plain(x))
    assert same(ours.add(x, stream), plain.add(x, stream))
    assert torch.equal(stream, kept)


@by_form
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_same_bits_beside_any_others(shape: tuple[int, int], few_rows: int) -> None:
    weight, bias, _ = case(shape)
    x = torch.randn(130, shape[1], generator=torch.Generator().manual_seed(2))
    linear = Int8Linear.pack(weight, bias, few_rows)
    assert_row_invariant(linear, x)
    turn = torch.zeros(shape[1], shape[0]).fill_diagonal_(1)
    assert_row_invariant(partial(_added, linear, turn), x)


def _added(linear: Int8Linear, turn: Tensor, x: Tensor) -> Tensor:
    """The product added to a stream that depends on the same row alone."""
    return linear.add(x, x @ turn)


@given(
    st.lists(st.integers(0, ROWS - 1), max_size=3 * FEW_ROWS + 3), st.integers(0, len(SHAPES) - 1)
)
def test_any_rows_in_any_order_are_the_rows_one_by_one(picked: list[int], shape: int) -> None:
    """Whichever form their number takes them through; half of the shapes have fixed inputs."""
    weight, bias, x = case(SHAPES[shape])
    linear = CpuBackend().pack_linear(weight, bias)
    alone = [linear(x[row : row + 1]) for row in picked]
    want = torch.cat(alone) if alone else x.new_empty(0, weight.shape[0])
    assert same(linear(x[picked]), want)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    weight, bias, x = case((257, 36))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 5, 40):
            got = CpuBackend().pack_linear(weight, bias)(x[:rows])
            assert same(got, PlainInt8Linear(weight, bias)(x[:rows]))
    finally:
        torch.set_num_threads(before)


@by_form
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_spoils_itself_alone(bad: float, few_rows: int) -> None:
    weight, bias, _ = case((33, 70))
    x = torch.randn(20, 70, generator=torch.Generator().manual_seed(3))
    spoiled = x.clone()
    spoiled[7, 69] = bad
    for each in (weight, Int8Weight(weight.values, weight.scales)):
        linear = Int8Linear.pack(each, bias, few_rows)
        got, want = linear(spoiled), linear(x)
        assert got[7].isnan().all()
        others = torch.arange(20) != 7
        assert torch.equal(got[others], want[others])


@by_form
def test_nothing_is_divided_by_zero(few_rows: int) -> None:
    """Rows of zeros, and of numbers so small that their scale would be none."""
    weight, bias, x = case((17, 65))
    dynamic = Int8Weight(weight.values, weight.scales)
    x = torch.zeros(3, 65)
    x[1], x[2] = 1e-45, 126 * LEAST_SCALE
    assert torch.equal(Int8Linear.pack(dynamic, None, few_rows)(x), torch.zeros(3, 17))
    assert torch.equal(Int8Linear.pack(dynamic, bias, few_rows)(x), bias.expand(3, 17))


@by_form
def test_the_greatest_sums_fit(few_rows: int) -> None:
    inputs = MOST_INPUTS
    values = torch.full((1, inputs), -128, dtype=torch.int8)
    fixed = FixedInput(1.0, 0, torch.zeros(1, dtype=torch.int32))
    weight = Int8Weight(values, torch.ones(1), fixed)
    x = torch.full((2, inputs), -128.0)
    got = Int8Linear.pack(weight, None, few_rows)(x)
    assert got.tolist() == 2 * [[float(torch.tensor(128 * 128 * inputs).float())]]


WITHOUT_ROWS = """
import numpy as np
from surefoot.backend.cpu.kernels import dots
outputs = 1 << 18
none, no_sums, no_stream = np.zeros(0, "f4"), np.zeros(0, "i4"), np.zeros((0, 0), "f4")
x, values = np.zeros((0, 64), "f4"), np.zeros((outputs, 64), "i1")
out = np.zeros((0, outputs), "f4")
excess, scales = np.zeros(outputs, "i4"), np.ones(outputs, "f4")
dots.int8_linear(x, none, values, excess, no_sums, scales, none, no_stream, out)
"""


@pytest.mark.skipif(not dots.HAS_DOTS, reason="the processor lacks the instruction")
def test_a_kernel_given_no_rows_writes_nothing() -> None:
    """In a process of its own, which ends if sums of a row that is not there are written."""
    subprocess.run([sys.executable, "-c", WITHOUT_ROWS], check=True)


@pytest.mark.skipif(not dots.HAS_DOTS, reason="the processor lacks the instruction")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_outside_of_arrays_is_touched(shape: tuple[int, int]) -> None:
    """Pages that may not be touched lie right before and behind each array the kernel is given."""
    weight, bias, x = case(shape)
    linear = Int8Linear.pack(weight, bias, 1 << 20)
    for at_end in (False, True):
        own = partial(fenced, at_end=at_end)
        tight = replace(
            linear,
            values=torch.from_numpy(own(linear.values.numpy())),
            excess=own(linear.excess),
            scales=own(linear.scales),
            fixed=own(linear.fixed),
            added=own(linear.added),
            bias=own(linear.bias),
        )
        for rows in (1, 2, 17):
            ours, stream = torch.from_numpy(own(x[:rows].numpy())), np.zeros((rows, shape[0]), "f4")
            assert same(tight.exact(ours, own(stream)), linear(x[:rows]))


def fenced(array: npt.NDArray[Any], at_end: bool) -> npt.NDArray[Any]:
    """A copy at the beginning or the end of pages, between two that may not be touched."""
    page = mmap.PAGESIZE
    whole = mmap.mmap(-1, (-(-array.nbytes // page) + 2) * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    libc = ctypes.CDLL(None, use_errno=True)
    for fence in (address, address + len(whole) - page):
        assert libc.mprotect(ctypes.c_void_p(fence), page, 0) == 0
    begin = len(whole) - page - array.nbytes if at_end else page
    copy = np.frombuffer(whole, array.dtype, array.size, begin).reshape(array.shape)
    copy[...] = array
    return copy


def test_what_does_not_fit_the_weight_stops() -> None:
    """Compiled code looks at no sizes."""
    weight, bias, x = case((33, 300))
    linear = Int8Linear.pack(weight, bias)
    for wrong in (x[:, :299], F.pad(x, (0, 1))):
        with pytest.raises(AssertionError, match="and 300 are wanted"):
            linear(wrong)
    with pytest.raises(AssertionError, match="streams do not fit"):
        linear.add(x[:2], torch.zeros(1, 33))
    with pytest.raises(AssertionError, match="one bias"):
        Int8Linear.pack(weight, bias[1:])


def test_what_might_not_fit_is_refused() -> None:
    wide = torch.zeros(1, MOST_INPUTS + 1, dtype=torch.int8)
    with pytest.raises(WeightsError, match="131072 inputs"):
        Int8Weight(wide, torch.ones(1))
    much = FixedInput(1.0, 0, torch.tensor([-(2**31 - 1 - 128 * 128 * 3)], dtype=torch.int32))
    Int8Weight(wide[:, :3], torch.ones(1), much)
    with pytest.raises(WeightsError, match="4 inputs"):
        Int8Weight(wide[:, :4], torch.ones(1), much)


def test_weights_become_the_nearest_codes() -> None:
    weight = torch.randn(20, 30, generator=torch.Generator().manual_seed(4))
    weight[3], weight[4, 5] = 0, math.nan
    made = quantise(weight)
    good = [row for row in range(20) if row not in (3, 4)]
    assert torch.equal(made.scales[good], weight[good].abs().amax(1) / 127)
    error = made.values[good] * made.scales[good, None] - weight[good]
    assert (error.abs() <= 0.5001 * made.scales[good, None]).all()
    assert (made.values[good].abs().amax(1) == 127).all()
    assert not made.values[3].any()
    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(5))
    got = PlainInt8Linear(made, None)(x)
    assert got[:, 4].isnan().all(), "a damaged output says so"
    assert got[:, good].isfinite().all()
    assert not got[:, 3].any()


def test_halves_go_to_the_even_code() -> None:
    codes, scales = codes_of(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]), None)
    assert scales.tolist() == [1.0]
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2]]
    assert quantise(torch.tensor([[127.0, 0.5, 1.5, -2.5]])).values.tolist() == [[127, 0, 2, -2]]


def test_the_weight_is_not_copied() -> None:
    whole = coded(torch.randn(32, 128, generator=torch.Generator().manual_seed(6)))
    linear = CpuBackend().pack_linear(whole, None)
    assert isinstance(linear, Int8Linear)
    assert linear.values.data_ptr() == whole.values.data_ptr()


@pytest.mark.parametrize("make", [ReferenceBackend, CpuBackend])
def test_bfloat16_is_computed_in_float32(make: Callable[[], ReferenceBackend | CpuBackend]) -> None:
    weight, bias, x = case((33, 70))
    half = x.bfloat16()
    linear = make().pack_linear(weight, bias.bfloat16())
    want = PlainInt8Linear(weight, bias.bfloat16())(half.float()).bfloat16()
    assert same(linear(half), want)
    stream = torch.ones(ROWS, 33, dtype=torch.bfloat16)
    assert same(linear.add(half, stream), stream + want)
    gated = make().pack_gated(Int8Weight(weight.values[:32], weight.scales[:32]), None)
    got = gated(half[:1])
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), gated(half[:1].float()), rtol=1e-2, atol=1e-6)


def test_bfloat16_experts_are_computed_in_float32() -> None:
    draws = torch.Generator().manual_seed(7)
    gate_up, down = torch.randn(3, 8, 6, generator=draws), torch.randn(3, 6, 4, generator=draws)
    packed = CpuBackend().pack_experts(coded(gate_up), coded(down))
    x, choice, weights = (
        torch.randn(5, 6, generator=draws),
        torch.arange(5)[:, None] % 3,
        torch.ones(5, 1),
    )
    got = packed(x.bfloat16(), choice, weights)
    assert got.dtype == torch.bfloat16
    want = packed(x.bfloat16().float(), choice, weights)
    assert torch.equal(got, want.bfloat16())
