"""Scales by groups of inputs: the very bits that are promised, in any form and beside any rows."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.backend import AscendBackend
from surefoot.backend.ascend.emulate import STRICT, EmulatedVendor
from surefoot.backend.ascend.machine import emulated_backend
from surefoot.backend.cpu import CpuBackend
from surefoot.backend.cpu.grouped import GroupedLinear
from surefoot.backend.cpu.int8 import Int8Linear
from surefoot.backend.cpu.kernels import dots
from surefoot.backend.operands import FixedInput, Int8Weight
from surefoot.backend.plain_int8 import PlainInt8Linear, codes_of
from surefoot.backend.protocol import Linear
from surefoot.backend.reference import ReferenceBackend
from surefoot.model.layers.weights import Reordered, pack_reordered
from tests.unit.backend.ascend import test_conformance as ascend
from tests.unit.backend.ascend.narrow import exact, narrow
from tests.unit.backend.conformance import GROUPED_OPERATORS, differing
from tests.unit.backend.conformance_grouped import coded_groups
from tests.unit.backend.conformance_int8 import drawn_inputs
from tests.unit.backend.cuts import assert_row_invariant
from tests.unit.backend.test_int8 import fenced, same
from tests.unit.backend.test_int8_faults import Faulty

ROWS = 24
SHAPES = [(1, 1, 1), (16, 64, 1), (17, 65, 5), (67, 96, 3), (33, 300, 2), (257, 512, 4)]
"""Outputs, inputs, groups."""

FORMS = (True, False) if dots.HAS_DOTS else (False,)
by_form = pytest.mark.parametrize("by_dots", FORMS, ids={True: "kernel", False: "products"}.get)


def case(shape: tuple[int, int, int]) -> tuple[Int8Weight, Tensor, Tensor]:
    """Weight, bias and input."""
    outputs, inputs, groups = shape
    rng, draws = random.Random(outputs), torch.Generator().manual_seed(outputs)
    values = torch.randint(-128, 128, (outputs, inputs), generator=draws).to(torch.int8)
    scales = torch.rand(outputs, groups, generator=draws) / 128
    bias = torch.randn(outputs, generator=draws)
    return Int8Weight(values, scales), bias, drawn_inputs(rng, draws, ROWS, inputs)


def written_out(weight: Int8Weight, bias: Tensor | None, x: Tensor) -> Tensor:
    """The definition in whole numbers of any size and single float32 operations."""
    codes, scales = codes_of(x, None)
    size = weight.shape[1] // weight.groups
    out = torch.empty(len(x), weight.shape[0])
    for m, row in enumerate(codes.tolist()):
        for n, values in enumerate(weight.values.tolist()):
            worth = torch.tensor(0.0)
            for g in range(weight.groups):
                at = range(g * size, (g + 1) * size)
                part = torch.tensor(float(sum(row[k] * values[k] for k in at)))
                part = part * weight.scales[n, g]
                worth = part if g == 0 else worth + part
            y = worth * scales[m]
            out[m, n] = y if bias is None else y + bias[n]
    return out


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 65, 5), (6, 96, 3)], ids=str)
def test_the_plainest_form_is_the_definition(shape: tuple[int, int, int]) -> None:
    weight, bias, x = case(shape)
    for added in (None, bias):
        assert same(PlainInt8Linear(weight, added)(x), written_out(weight, added, x))


@by_form
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_form_has_the_same_bits(
    shape: tuple[int, int, int], biased: bool, by_dots: bool
) -> None:
    weight, bias, x = case(shape)
    added = bias if biased else None
    plain, ours = PlainInt8Linear(weight, added), GroupedLinear.pack(weight, added, by_dots)
    stream = torch.randn(ROWS, shape[0], generator=torch.Generator().manual_seed(1))
    assert same(ours(x), plain(x))
    assert same(ours.add(x, stream), plain.add(x, stream))
    for one, other in zip((ours(x[:3]), ours(x[:0])), (plain(x[:3]), plain(x[:0])), strict=True):
        assert same(one, other)


@by_form
@pytest.mark.parametrize("shape", SHAPES[2:5], ids=str)
def test_rows_have_the_same_bits_beside_any_others(
    shape: tuple[int, int, int], by_dots: bool
) -> None:
    weight, bias, _ = case(shape)
    x = torch.randn(130, shape[1], generator=torch.Generator().manual_seed(2))
    assert_row_invariant(GroupedLinear.pack(weight, bias, by_dots), x)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_group_is_one_scale_an_output(shape: tuple[int, int, int]) -> None:
    weight, bias, x = case((*shape[:2], 1))
    plain = Int8Weight(weight.values, weight.scales[:, 0])
    assert same(PlainInt8Linear(weight, bias)(x), PlainInt8Linear(plain, bias)(x))
    packed = CpuBackend().pack_linear(weight, bias), CpuBackend().pack_linear(plain, bias)
    assert isinstance(packed[0], GroupedLinear)
    assert isinstance(packed[1], Int8Linear)
    assert same(packed[0](x), packed[1](x))


@pytest.mark.skipif(not dots.HAS_DOTS, reason="the processor lacks the instruction")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_outside_of_arrays_is_touched(shape: tuple[int, int, int]) -> None:
    """Pages that may not be touched lie right before and behind each array the kernel is given."""
    weight, bias, x = case(shape)
    linear = GroupedLinear.pack(weight, bias)
    for at_end in (False, True):
        own = partial(fenced, at_end=at_end)
        tight = replace(
            linear,
            values=torch.from_numpy(own(linear.values.numpy())),
            excess=own(linear.excess),
            scales=own(linear.scales),
            bias=own(linear.bias),
        )
        for rows in (0, 1, 3, 4, 24):
            ours, stream = torch.from_numpy(own(x[:rows].numpy())), np.zeros((rows, shape[0]), "f4")
            assert same(tight.exact(ours, own(stream)), linear(x[:rows]))


def npu() -> AscendBackend:
    return emulated_backend(EmulatedVendor(STRICT))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_npu_gives_the_same_bits(shape: tuple[int, int, int], biased: bool) -> None:
    """The codes of some rows tie between two, where the vendor's operator takes another one."""
    weight, bias, x = case(shape)
    added, half = bias if biased else None, x.bfloat16()
    want = PlainInt8Linear(weight, added)(half)
    got = npu().pack_linear(weight, added)
    assert same(got(half), want)
    stream = torch.ones(ROWS, shape[0], dtype=torch.bfloat16)
    assert same(got.add(half, stream), stream + want)
    assert got(half[:0]).shape == (0, shape[0])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("operator", ["grouped_linear", "grouped_gated"])
def test_the_npu_conforms_to_the_reference(operator: str, seed: int) -> None:
    run = GROUPED_OPERATORS[operator]
    want, got = run(exact(ReferenceBackend()), seed), run(narrow(npu()), seed)
    faults = [ascend.differing(one, other, False) for one, other in zip(got, want, strict=True)]
    assert faults == [""] * len(want)


def test_the_npu_s_experts_multiply_exactly() -> None:
    """Each expert's product alone has the bits of a linear, groups above 1,024 inputs too."""
    draws = torch.Generator().manual_seed(3)
    for groups, inputs in ((2, 64), (1, 2500), (2, 3000)):
        values = torch.randint(-128, 128, (3, 8, inputs), generator=draws).to(torch.int8)
        values[0], values[1] = 127, -128
        weight = Int8Weight(values, torch.rand(3, 8, groups, generator=draws) / 128)
        x = torch.randn(7, inputs, generator=draws).bfloat16()
        x[:3] = 1.0
        ends = torch.tensor([2, 3, 6])
        backend = npu()
        got = backend._groups(weight)(x, ends)
        for expert, (first, last) in enumerate(((0, 2), (2, 3), (3, 6))):
            own = Int8Weight(weight.values[expert], weight.scales[expert])
            assert same(got[first:last], PlainInt8Linear(own, None)(x[first:last]))


class Watched(EmulatedVendor):
    """Notes the greatest sum that a product of floats may have reached."""

    greatest = 0.0

    def npu_grouped_matmul(self, x: Any, weight: Any, **kwargs: Any) -> Any:
        self.greatest = max(self.greatest, float((x[0].abs() @ weight[0].abs()).max()))
        return super().npu_grouped_matmul(x, weight, **kwargs)


def test_no_sum_of_experts_leaves_what_float32_counts() -> None:
    vendor = Watched(STRICT)
    values = torch.full((1, 4, 3000), -128, dtype=torch.int8)
    weight = Int8Weight(values, torch.ones(1, 4, 2))
    emulated_backend(vendor)._groups(weight)(torch.ones(2, 3000).bfloat16(), torch.tensor([2]))
    assert 2**23 < vendor.greatest < 2**24


def test_groups_take_their_inputs_wherever_they_are() -> None:
    weight, _, x = case((33, 300, 2))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(4))
    plain = PlainInt8Linear(weight, None)
    packed = pack_reordered(CpuBackend(), weight, order)
    assert isinstance(packed, Reordered)
    assert same(packed(x[:, order]), plain(x))
    stream = torch.ones(ROWS, 33)
    assert same(packed.add(x[:, order], stream), plain.add(x, stream))
    single = Int8Weight(weight.values, weight.scales[:, 0])
    moved = pack_reordered(CpuBackend(), single, order)
    assert isinstance(moved, Int8Linear)
    assert same(moved(x[:, order]), PlainInt8Linear(single, None)(x))


def test_what_is_no_group_stops() -> None:
    values = torch.zeros(4, 6, dtype=torch.int8)
    with pytest.raises(AssertionError, match="groups are of one size"):
        Int8Weight(values, torch.ones(4, 4))
    with pytest.raises(AssertionError, match="scaled row by row"):
        Int8Weight(values, torch.ones(4, 2), FixedInput(1.0, 0, torch.zeros(4).int()))
    with pytest.raises(AssertionError, match="its scales"):
        Int8Weight(values, torch.ones(2, 2))
    weight = Int8Weight(values, torch.ones(4, 2))
    with pytest.raises(AssertionError, match="stay where they are"):
        weight.columns(torch.arange(6))
    linear = GroupedLinear.pack(weight, None)
    with pytest.raises(AssertionError, match="6 are wanted"):
        linear(torch.zeros(1, 7))
    with pytest.raises(AssertionError, match="streams do not fit"):
        linear.add(torch.zeros(2, 6), torch.zeros(1, 4))


def test_rows_are_picked_with_their_scales() -> None:
    weight, _, x = case((67, 96, 3))
    order = torch.arange(66, -1, -1)
    picked = weight.rows(lambda rows: rows[order])
    assert picked.groups == 3
    want = PlainInt8Linear(weight, None)(x)[:, order]
    assert same(PlainInt8Linear(picked, None)(x), want)


class Planted(PlainInt8Linear):
    """A linear with a fault in its groups."""

    def _worth(self, codes: Tensor) -> Tensor:
        weight = self.weight
        if not weight.groups:
            return super()._worth(codes)
        products = (weight.values.int() * codes.int()).unflatten(1, (weight.groups, -1))
        return self.added(products.sum(2).float(), weight.scales)

    def added(self, sums: Tensor, scales: Tensor) -> Tensor:
        """What sums [outputs, G] are worth."""
        raise NotImplementedError


class ScaleOfAnotherGroup(Planted):
    def added(self, sums: Tensor, scales: Tensor) -> Tensor:
        return (sums * scales.roll(1, 1)).sum(1)


class FirstScaleForAll(Planted):
    def added(self, sums: Tensor, scales: Tensor) -> Tensor:
        return sums.sum(1) * scales[:, 0]


class LastGroupFirst(Planted):
    """Right but for its last bits."""

    def added(self, sums: Tensor, scales: Tensor) -> Tensor:
        parts = (sums * scales).unbind(1)
        total = parts[-1]
        for part in parts[-2::-1]:
            total = total + part
        return total


@pytest.mark.parametrize("operator", GROUPED_OPERATORS)
@pytest.mark.parametrize("fault", [ScaleOfAnotherGroup, FirstScaleForAll])
def test_a_wrong_scale_does_not_conform(fault: type[Linear], operator: str) -> None:
    run = GROUPED_OPERATORS[operator]
    caught = [
        seed
        for seed in range(12)
        if differing(run(Faulty(partial(fault)), seed), run(ReferenceBackend(), seed))
    ]
    assert len(caught) > 1


def test_another_order_of_groups_shows_in_the_bits() -> None:
    weight, bias, x = case((257, 512, 4))
    assert not same(LastGroupFirst(weight, bias)(x), PlainInt8Linear(weight, bias)(x))


def test_four_bits_with_groups_are_near_the_weight() -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(5))
    made = coded_groups(weight)
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(6))
    want = x @ weight.t()
    assert (PlainInt8Linear(made, None)(x) - want).norm() < 0.2 * want.norm()
