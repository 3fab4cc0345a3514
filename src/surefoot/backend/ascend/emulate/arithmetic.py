"""How the emulated operators compute.

Inputs are widened to float64, everything is computed there, and results are rounded once to the
dtype of the output. Products of bfloat16, float16 or float32 numbers are exact in float64, and
sums carry an error some 1e-16 of their terms: whether it reaches the rounded result is a matter
of one chance in 10^8 for float32, far less for narrower dtypes. So a row's result does not depend
on the rows beside it, whatever order a product sums in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


def wide(tensor: Tensor) -> Tensor:
    """In float64, exactly."""
    return tensor.to(torch.float64)


class Lasting:
    """float64 copies of tensors that nobody writes to: weights come with every call."""

    def __init__(self) -> None:
        self._copies = WeakTensorKeyDictionary()

    def wide(self, tensor: Tensor) -> Tensor:
        """In float64, exactly; anew if the tensor may have been written to since."""
        if tensor.is_inference():
            return wide(tensor)
        held: tuple[int, Tensor] = self._copies.get(tensor, (-1, tensor))
        version, copy = held
        if version != tensor._version:
            copy = wide(tensor)
            self._copies[tensor] = (tensor._version, copy)
        return copy


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 values in `dtype`, rounded once to the nearest, ties to even.

    A plain conversion to a 16-bit dtype rounds twice, by way of float32. Here the step to float32
    rounds to odd instead, which keeps what the second rounding must know.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return values.to(dtype)
    near = values.to(torch.float32)
    back = near.to(torch.float64)
    bits = near.view(torch.int32)
    bits = torch.where(back.abs() > values.abs(), bits - 1, bits)
    bits = torch.where(back != values, bits | 1, bits)
    return bits.view(torch.float32).to(dtype)


def poison(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What memory that nobody wrote may hold: NaN, or the least integer of the dtype."""
    if dtype.is_floating_point:
        return torch.full(tuple(shape), float("nan"), dtype=dtype)
    return torch.full(tuple(shape), torch.iinfo(dtype).min, dtype=dtype)
