"""Linears in int8 with scales by groups of inputs, on a CPU; see `operands.Int8Weight`.

One kernel does all of it where the processor has an instruction for exact sums; elsewhere each
group goes through the framework's product. What sums are worth is added in the order of the groups
either way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.backend.cpu.int8 import NO_STREAM, Floats, Int8Linear, Sums
from surefoot.backend.cpu.kernels import dots, grouped, grouped_dots
from surefoot.backend.operands import Int8Weight

_NO_FLOATS = np.empty(0, np.float32)


@dataclass(frozen=True)
class GroupedLinear:
    """Such a linear. No row's bits depend on another row, by construction.

    Attributes:
        inputs: of the weight.
        outputs: of the weight.
        values: the weight's, each group by itself, made up with zeros: [G, blocks, 16 inputs / G]
            as grouped_dots.grouped_linear wants it, or [G, outputs, inputs / G] without.
        excess: see grouped_dots.grouped_linear.
        scales: likewise.
        bias: [outputs], or [0] for none.
        by_dots: whether one kernel does it all.
    """

    inputs: int
    outputs: int
    values: Tensor
    excess: Sums
    scales: Floats
    bias: Floats
    by_dots: bool

    @staticmethod
    def pack(
        weight: Int8Weight, bias: Tensor | None, by_dots: bool = dots.HAS_DOTS
    ) -> GroupedLinear:
        """Put the groups apart, in memory of their own."""
        outputs, inputs = weight.shape
        assert weight.groups, "one scale an output is what int8.Int8Linear is for"
        assert bias is None or bias.shape == (outputs,), "each output has one bias"
        unit = grouped_dots.INPUTS if by_dots else dots.INPUTS
        apart = weight.values.unflatten(1, (weight.groups, -1)).transpose(0, 1)
        more = -outputs % grouped_dots.OUTPUTS
        values = F.pad(apart, (0, -apart.shape[2] % unit, 0, more)).contiguous()
        return GroupedLinear(
            inputs=inputs,
            outputs=outputs,
            values=blocked(values) if by_dots else values,
            excess=128 * values.sum(2, dtype=torch.int32).numpy(),
            scales=F.pad(weight.scales.t(), (0, more)).contiguous().numpy(),
            bias=_NO_FLOATS if bias is None else bias.float().numpy(),
            by_dots=by_dots,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs], same dtype."""
        return self.exact(x).to(x.dtype)

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        if x.dtype != torch.float32:
            return stream + self(x)
        return self.exact(x, stream.contiguous().numpy())

    def exact(self, x: Tensor, stream: Floats = NO_STREAM) -> Tensor:
        """Results in float32, whatever the type of x, added to `stream` if one is given."""
        rows = x.shape[0]
        assert x.shape[1] == self.inputs, f"{x.shape[1]} inputs came, and {self.inputs} are wanted"
        fits = stream is NO_STREAM or stream.shape == (rows, self.outputs)
        assert fits, "streams do not fit"
        inputs, out = x.float().contiguous().numpy(), torch.empty(rows, self.outputs)
        if self.by_dots:
            grouped_dots.grouped_linear(
                inputs,
                self.values.numpy(),
                self.excess,
                self.scales,
                self.bias,
                stream,
                out.numpy(),
            )
        elif rows:
            groups, padded, width = self.values.shape
            codes = torch.empty(groups, rows, width, dtype=torch.int8)
            row_scales, totals = torch.empty(rows).numpy(), torch.empty(rows, padded).numpy()
            grouped.quantise_group_rows(inputs, codes.numpy(), row_scales)
            for g in range(groups):
                sums = torch._int_mm(codes[g], self.values[g].t()).numpy()
                grouped.add_worth_rows(sums, self.scales[g], g == 0, totals)
            grouped.finish_rows(totals, row_scales, self.bias, stream, out.numpy())
        return out


def blocked(values: Tensor) -> Tensor:
    """Codes [G, n, k] as [G, n / 16, 16 k]: of each 16 outputs four inputs after the other."""
    blocks = values.unflatten(1, (-1, grouped_dots.OUTPUTS)).unflatten(3, (-1, 4))
    whole: Tensor = blocks.transpose(2, 3).flatten(2)
    return whole.contiguous()


def pack_int8(weight: Int8Weight, bias: Tensor | None) -> Int8Linear | GroupedLinear:
    """A linear in int8, whichever scales it has."""
    return GroupedLinear.pack(weight, bias) if weight.groups else Int8Linear.pack(weight, bias)
