"""The suites for int8 notice the faults that they are there for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from surefoot.backend.operands import Int8Weight, Weight
from surefoot.backend.plain_int8 import PlainInt8Linear, codes_of, scales_of
from surefoot.backend.protocol import Linear
from surefoot.backend.reference import ReferenceBackend
from tests.unit.backend.conformance import INT8_OPERATORS, differing
from tests.unit.backend.cuts import assert_row_invariant
from tests.unit.backend.test_int8 import case, same

SOME_CASES = range(16)


class Another(PlainInt8Linear):
    """A linear that can be told another way to scale."""

    def scaled(self, sums: Tensor, scales: Tensor) -> Tensor:
        """Of sums [T, outputs] and the scales [T] of inputs."""
        raise NotImplementedError

    def __call__(self, x: Tensor) -> Tensor:
        codes, scales = codes_of(x, self.weight.fixed)
        sums = codes.int() @ self.weight.values.int().t()
        if self.weight.fixed is not None:
            sums = sums + self.weight.fixed.added
        y = self.scaled(sums.float(), scales)
        return y if self.bias is None else y + self.bias


class ScaleOfAnotherOutput(Another):
    def scaled(self, sums: Tensor, scales: Tensor) -> Tensor:
        return sums * self.weight.scales.roll(1) * scales[:, None]


class ScaleOfAnotherRow(Another):
    def scaled(self, sums: Tensor, scales: Tensor) -> Tensor:
        return sums * self.weight.scales * scales.roll(1)[:, None]


class RowScaleFirst(Another):
    """Right but for its last bits: the scales are multiplied in another order."""

    def scaled(self, sums: Tensor, scales: Tensor) -> Tensor:
        return sums * scales[:, None] * self.weight.scales


class OneScaleForAllRows(PlainInt8Linear):
    """What a row becomes depends on the rows beside it."""

    def __call__(self, x: Tensor) -> Tensor:
        scale = scales_of(x.reshape(1, -1)) if len(x) else x.new_ones(1)
        codes = torch.round(x / scale).char()
        return (codes.int() @ self.weight.values.int().t()).float() * self.weight.scales * scale


class Faulty(ReferenceBackend):
    def __init__(self, linear: Callable[[Int8Weight, Tensor | None], Linear]) -> None:
        super().__init__()
        self._linear = linear

    def pack_linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        if isinstance(weight, Int8Weight):
            return self._linear(weight, bias)
        return super().pack_linear(weight, bias)


@pytest.mark.parametrize("operator", INT8_OPERATORS)
@pytest.mark.parametrize("linear", [ScaleOfAnotherOutput, ScaleOfAnotherRow, OneScaleForAllRows])
def test_a_wrong_scale_does_not_conform(
    linear: Callable[[Int8Weight, Tensor | None], Linear], operator: str
) -> None:
    run = INT8_OPERATORS[operator]
    caught = [
        seed
        for seed in SOME_CASES
        if differing(run(Faulty(linear), seed), run(ReferenceBackend(), seed))
    ]
    # Experts see their tokens one by one in the reference, so rows cannot be mistaken there.
    alone = operator == "int8_experts" and linear is not ScaleOfAnotherOutput
    assert len(caught) > 1 or alone


def test_another_order_of_scales_shows_in_the_bits() -> None:
    weight, bias, x = case((257, 36))
    assert same(PlainInt8Linear(weight, bias)(x), PlainInt8Linear(weight, bias)(x))
    assert not same(RowScaleFirst(weight, bias)(x), PlainInt8Linear(weight, bias)(x))


def test_one_scale_for_all_rows_is_caught() -> None:
    weight, _, _ = case((67, 20))
    x = torch.randn(40, 20, generator=torch.Generator().manual_seed(1))
    with pytest.raises(AssertionError):
        assert_row_invariant(OneScaleForAllRows(weight, None), x)
