"""Products in int8 in their plainest form; `operands.Int8Weight` says what they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import LEAST_SCALE, FixedInput, Int8Weight


def quantise(weight: Tensor) -> Int8Weight:
    """A weight in int8 with a scale for each output, the greatest magnitude there over 127.

    Args:
        weight: [..., outputs, inputs] of any floating-point type.
    """
    numbers = weight.float()
    scales = scales_of(numbers)
    return Int8Weight(torch.round(numbers / scales[..., None]).nan_to_num_(0).char(), scales)


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
            sums = torch.mv(weight.values.int(), codes[token].int())
            if weight.fixed is not None:
                sums = sums + weight.fixed.added
            y[token] = sums.float() * weight.scales * scales[token]
        y = y if self.bias is None else y + self.bias.float()
        return y.to(x.dtype)

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        return stream + self(x)
