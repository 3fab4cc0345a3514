"""Linear layers of the cpu backend: the same bits beside any rows, and the fall-back to tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.backend.blockwise.linear import PlainGated, PlainLinear
from surefoot.backend.cpu import CpuBackend
from surefoot.backend.cpu.linear import (
    Map,
    PackedLinear,
    RowInvariant,
    TiledLinear,
    is_row_invariant,
    pack_fast,
)
from surefoot.backend.cpu.products import (
    LIBRARIES,
    MklProduct,
    OneDnnProduct,
    Product,
    available_libraries,
)
from surefoot.backend.protocol import Linear
from tests.unit.backend.cuts import assert_row_invariant

# Outputs and inputs.
SHAPES = [(67, 20), (20, 67), (1, 5), (6, 1), (33, 300), (257, 36), (64, 64), (120, 1500)]


def weights(shape: tuple[int, int], rows: int = 130) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, bias and input."""
    draws = torch.Generator().manual_seed(shape[0])
    outputs, inputs = shape
    return (
        torch.randn(outputs, inputs, generator=draws),
        torch.randn(outputs, generator=draws),
        torch.randn(rows, inputs, generator=draws),
    )


@dataclass(frozen=True)
class CountsRows:
    """A faulty linear: its bits depend on how many rows there are."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) * (1 + 1e-6 * len(x))


@dataclass(frozen=True)
class OneRowOtherwise:
    """A faulty linear: a single row takes another kernel, which adds up in another order."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return F.linear(x.flip(1), self.weight.flip(1))
        return F.linear(F.pad(x, (0, 0, 0, -len(x) % 16)), self.weight)[: len(x)]


def doubles(linear: Map, inputs: int) -> bool:
    """Pass the packed form that sends one row as two, untested."""
    return isinstance(linear, PackedLinear) and linear.doubles


def add_to_turned(linear: Linear, turn: Tensor, x: Tensor) -> Tensor:
    """The product added to a stream that depends on the same row alone."""
    return linear.add(x, x @ turn)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_and_tiled_have_the_same_bits_for_any_rows(
    shape: tuple[int, int], biased: bool
) -> None:
    weight, bias, x = weights(shape)
    added = bias if biased else None
    turn = torch.zeros(shape[1], shape[0])
    turn.fill_diagonal_(1)
    chosen = RowInvariant().pack(weight, added)
    onednn: Linear = PackedLinear(LIBRARIES["onednn"](weight, added), shape[0], doubles=True)
    for linear in (chosen, onednn, TiledLinear(weight, added)):
        assert_row_invariant(linear, x)
        assert_row_invariant(partial(add_to_turned, linear, turn), x)
        torch.testing.assert_close(linear(x), F.linear(x, weight, added), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_has_the_same_bits_for_any_rows(shape: tuple[int, int]) -> None:
    weight, bias, x = (tensor.bfloat16() for tensor in weights(shape))
    linear = RowInvariant().pack(weight, bias)
    assert isinstance(linear, TiledLinear)
    assert linear(x).dtype == torch.bfloat16
    assert_row_invariant(linear, x)


@pytest.mark.parametrize("faulty", [CountsRows, OneRowOtherwise])
def test_the_self_test_refuses_a_faulty_linear(faulty: type[CountsRows | OneRowOtherwise]) -> None:
    weight, _, _ = weights((67, 300))
    assert not is_row_invariant(faulty(weight), 300)


def test_the_self_test_passes_an_exact_linear() -> None:
    weight, _, _ = weights((67, 20))
    assert is_row_invariant(TiledLinear(weight, None), 20)


def test_tiles_are_chosen_where_the_packed_form_fails() -> None:
    def passes(linear: Map, inputs: int) -> bool:
        assert isinstance(linear, PackedLinear)
        return is_row_invariant(CountsRows(torch.ones(3, inputs)), inputs)

    invariant = RowInvariant(passes)
    weight, bias, x = weights((67, 20))
    linear = invariant.pack(weight, bias)
    assert isinstance(linear, TiledLinear)
    assert invariant.report() == {(67, 20): "tiles"}
    assert_row_invariant(linear, x)
    torch.testing.assert_close(linear(x), F.linear(x, weight, bias))


def test_each_shape_is_tested_once_and_alone() -> None:
    asked: list[int] = []

    def passes(linear: Map, inputs: int) -> bool:
        asked.append(inputs)
        return inputs == 20

    invariant = RowInvariant(passes)
    kinds = [type(invariant.pack(torch.ones(4, inputs), None)) for inputs in (20, 30, 20, 30)]
    assert kinds == [PackedLinear, TiledLinear, PackedLinear, TiledLinear]
    first = available_libraries()[0]
    assert asked == [20] + 2 * len(available_libraries()) * [30]
    assert invariant.report() == {(4, 20): first, (4, 30): "tiles"}


def test_one_row_goes_alone_only_where_it_keeps_its_bits() -> None:
    invariant = RowInvariant()
    for shape in ((67, 20), (120, 1500)):
        weight, bias, x = weights(shape)
        assert_row_invariant(invariant.pack(weight, bias), x)
    only_doubled = RowInvariant(doubles)
    only_doubled.pack(*weights((67, 20))[:2])
    first = available_libraries()[0]
    assert only_doubled.report() == {(67, 20): f"{first}, one row as two"}


@dataclass(frozen=True)
class Fails:
    """Refuse one library's product."""

    refused: type[Product]

    def __call__(self, linear: Map, inputs: int) -> bool:
        assert isinstance(linear, PackedLinear)
        return not isinstance(linear.product, self.refused)


@pytest.mark.parametrize(
    ("refused", "left"), [(MklProduct, "onednn"), (OneDnnProduct, "mkl")], ids=["mkl", "onednn"]
)
def test_another_library_takes_the_place_of_one_that_fails(
    refused: type[Product], left: str
) -> None:
    if left not in available_libraries():
        pytest.skip(f"this build of the framework has no {left}")
    invariant = RowInvariant(Fails(refused))
    weight, bias, x = weights((67, 20))
    linear = invariant.pack(weight, bias)
    assert invariant.report() == {(67, 20): left}
    torch.testing.assert_close(linear(x), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_fast_form_is_right_without_the_promise(dtype: torch.dtype) -> None:
    weight, bias, x = (tensor.to(dtype) for tensor in weights((67, 20)))
    linear = pack_fast(weight, bias)
    for rows in (0, 1, 2, 9):
        want = F.linear(x[:rows].float(), weight.float(), bias.float())
        got = linear(x[:rows])
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=1e-1)


def test_only_the_bitwise_backend_tests_shapes() -> None:
    weight, bias, _ = weights((67, 20))
    exact, fast = CpuBackend(bitwise=True), CpuBackend(bitwise=False)
    for backend in (exact, fast):
        backend.pack_linear(weight, bias)
    assert exact.invariant.report().keys() == {(67, 20)}
    assert fast.invariant.report() == {}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [1, 20, 32, 96, 100, 704, 1001, 1536])
def test_a_gated_pair_keeps_its_bits_with_any_number_of_threads(width: int, threads: int) -> None:
    weight = torch.randn(2 * width, 8, generator=torch.Generator().manual_seed(width))
    x = torch.randn(90, 8, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gated = CpuBackend().pack_gated(weight, None)
        whole = gated(x)
        parts = [gated(x[a:b]) for a, b in ((0, 1), (1, 3), (3, 20), (20, 90))]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(parts), whole)
    reference = PlainGated(PlainLinear(weight, None))(x)
    torch.testing.assert_close(whole, reference, rtol=1e-4, atol=1e-5)
