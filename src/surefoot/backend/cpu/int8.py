"""Linears in int8 on a CPU; see `operands.Int8Weight` for what they compute.

Sums are exact, so how they are made may depend on how many rows there are: few go through one
kernel, where the processor has an instruction for it, more through the framework's product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.backend.cpu.experts import limited_gate
from surefoot.backend.cpu.kernels import dots, int8
from surefoot.backend.operands import Int8Weight

FEW_ROWS = 16 if dots.HAS_DOTS else 0
"""Most rows that one kernel takes; above them the framework's product is faster, measured."""

Floats = npt.NDArray[np.float32]
Sums = npt.NDArray[np.int32]
_NO_FLOATS = np.empty(0, np.float32)
_NO_SUMS = np.empty(0, np.int32)
NO_STREAM = np.empty((0, 0), np.float32)


@dataclass(frozen=True)
class Int8Linear:
    """A linear in int8. No row's bits depend on another row, by construction.

    Attributes:
        inputs: of the weight.
        values: the weight's, made up with zeros as `dots` wants it.
        excess: see dots.int8_linear.
        scales: [outputs].
        fixed: see int8.quantise.
        added: see int8.dequantise.
        bias: likewise.
        few_rows: most rows that one kernel takes.
    """

    inputs: int
    values: Tensor
    excess: Sums
    scales: Floats
    fixed: Floats
    added: Sums
    bias: Floats
    few_rows: int

    @staticmethod
    def pack(weight: Int8Weight, bias: Tensor | None, few_rows: int = FEW_ROWS) -> Int8Linear:
        """Keep the weight's own memory if nothing has to be made up."""
        fixed, (outputs, inputs) = weight.fixed, weight.shape
        assert bias is None or bias.shape == (outputs,), "each output has one bias"
        assert fixed is None or fixed.added.shape == (outputs,), "each output has one sum added"
        missing = (0, -inputs % dots.INPUTS, 0, -outputs % dots.ROWS)
        values = F.pad(weight.values, missing) if any(missing) else weight.values.contiguous()
        return Int8Linear(
            inputs=inputs,
            values=values,
            excess=128 * values.sum(1, dtype=torch.int32).numpy(),
            scales=weight.scales.contiguous().numpy(),
            fixed=_NO_FLOATS if fixed is None else np.array([fixed.scale, fixed.offset], "f4"),
            added=_NO_SUMS if fixed is None else fixed.added.contiguous().numpy(),
            bias=_NO_FLOATS if bias is None else bias.float().numpy(),
            few_rows=few_rows,
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
        rows, outputs = x.shape[0], len(self.scales)
        assert x.shape[1] == self.inputs, f"{x.shape[1]} inputs came, and {self.inputs} are wanted"
        assert stream is NO_STREAM or stream.shape == (rows, outputs), "streams do not fit"
        inputs, out = x.float().contiguous().numpy(), torch.empty(rows, outputs)
        if 0 < rows <= self.few_rows:
            dots.int8_linear(
                inputs,
                self.fixed,
                self.values.numpy(),
                self.excess,
                self.added,
                self.scales,
                self.bias,
                stream,
                out.numpy(),
            )
        elif rows:
            codes = torch.empty(rows, self.values.shape[1], dtype=torch.int8)
            row_scales = torch.empty(rows).numpy()
            int8.quantise_rows(inputs, self.fixed, codes.numpy(), row_scales)
            sums = torch._int_mm(codes, self.values.t()).numpy()
            int8.dequantise_rows(
                sums, self.added, self.scales, row_scales, self.bias, stream, out.numpy()
            )
        return out


class Exact(Protocol):
    """A linear in int8 as it comes out of its sums."""

    def exact(self, x: Tensor) -> Tensor:
        """Results in float32, whatever the type of x."""
        ...


@dataclass(frozen=True)
class Int8Gated:
    """silu(gate) * up in float32; see Backend.pack_gated.

    Attributes:
        both: maps [T, inputs] to [T, 2 * width], the gate first.
        limit: where gate and up are cut off.
    """

    both: Exact
    limit: float

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, width]."""
        return limited_gate(self.both.exact(x), self.limit).to(x.dtype)
