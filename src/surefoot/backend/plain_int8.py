"""Products in int8 in their plainest form; `operands.Int8Weight` says what they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import LEAST_SCALE, FixedInput, Int8Weight
from surefoot.backend.plain_streams import total


def quantise(weight: Tensor) -> Int8Weight:
    """A weight in int8 with a scale for each output, the greatest magnitude there over 127.

    Args:
        weight: [..., outputs, inputs] of any floating-point type.
    """
    numbers = weight.float()
    scales = scales_of(numbers)
    return Int8Weight(torch.round(numbers / scales[..., None]).nan_to_num_(0).char(), scales)


def quantise_groups(weight: Tensor, size: int) -> Int8Weight:
    """A weight in 4 bits with a scale for each `size` inputs, the greatest magnitude there over 7.

    Scales are rounded to float16, as ModelSlim's are when they are read, and codes made by what
    comes out. Where a scale would be 0 there, it is 1 and codes are 0.

    Args:
        weight: [..., outputs, inputs] of any floating-point type.
        size: divides the inputs; one scale an output if it is all of them.
    """
    numbers = weight.float().unflatten(-1, (-1, size))
    scales = (numbers.abs().amax(-1) / 7).half().float()
    scales = torch.where(scales < LEAST_SCALE, 1.0, scales)
    scales = torch.where(scales.isinf(), torch.nan, scales)
    codes = torch.round(numbers / scales[..., None]).nan_to_num_(0).clamp_(-7, 7).char()
    return Int8Weight(codes.flatten(-2), scales[..., 0] if codes.shape[-2] == 1 else scales)


def scales_of(numbers: Tensor) -> Tensor:
    """What a step from one code to the next is worth, along the last axis of float32 numbers.

    NaN where a number is not finite.
    """
    scales = numbers.abs().amax(-1) / 127
    scales = torch.where(scales < LEAST_SCALE, 1.0, scales)
    return torch.where(scales.isinf(), torch.nan, scales)


def codes_of(x: Tensor, fixed: FixedInput | None) -> tuple[Tensor, Tensor]:
    """The input x [T, inputs] of a product: codes [T, inputs] int8 and scales [T] float32."""
    x = x.float()
    scales = scales_of(x)
    if fixed is None:
        codes = torch.round(x / scales[:, None])
    else:
        codes = (torch.round(x / fixed.scale) + fixed.offset).clamp_(-128, 127)
        scales = torch.where(scales.isnan(), scales, 1.0)
        codes = torch.where(scales.isnan()[:, None], 0.0, codes)
    return codes.nan_to_num_(0).char(), scales


@dataclass(frozen=True)
class PlainInt8Linear:
    """A linear in int8, each token on its own."""

    weight: Int8Weight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        weight = self.weight
        codes, scales = codes_of(x, weight.fixed)
        y = x.new_empty(x.shape[0], weight.values.shape[0], dtype=torch.float32)
        for token in range(x.shape[0]):
            y[token] = self._worth(codes[token]) * scales[token]
        y = y if self.bias is None else y + self.bias.float()
        return y.to(x.dtype)

    def _worth(self, codes: Tensor) -> Tensor:
        """Sums of products with the codes of one input, times their scales."""
        weight = self.weight
        if weight.groups:
            products = (weight.values.int() * codes.int()).unflatten(1, (weight.groups, -1))
            parts = products.sum(2, dtype=torch.int32).float() * weight.scales
            return total(parts.unbind(1))
        sums = torch.mv(weight.values.int(), codes.int())
        if weight.fixed is not None:
            sums = sums + weight.fixed.added
        return sums.float() * weight.scales

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        return stream + self(x)
