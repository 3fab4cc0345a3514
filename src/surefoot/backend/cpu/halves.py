"""Linears whose weights stay in bfloat16; see `kernels.halves` for what they compute.

No row's bits depend on another row, by construction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.backend.cpu.kernels import halves
from surefoot.backend.cpu.kernels.algebra import Floats
from surefoot.backend.cpu.kernels.halves import HAS_VECTORS, OUTPUTS, Halves
from surefoot.backend.cpu.threads import threads_for

_NO_BIAS = np.empty(0, np.float32)
_NO_STREAM = np.empty((0, 0), np.float32)
_LOW = 0xFFFF  # the digits of a float32 that a bfloat16 lacks


def are_halves(weight: Tensor) -> bool:
    """Whether a weight is float32, and all its numbers are numbers of bfloat16."""
    if weight.dtype != torch.float32 or weight.numel() == 0:
        return False
    return not bool((weight.contiguous().view(torch.int32) & _LOW).any())


def suits_vectors(weight: Tensor) -> bool:
    """Whether the registers are there and the weight is one for them."""
    return HAS_VECTORS and are_halves(weight)


def group_weights(weight: Tensor) -> Halves:
    """[groups, inputs * 48] of [outputs, inputs]: a group's outputs side by side for each input."""
    padded = F.pad(weight, (0, 0, 0, -weight.shape[0] % OUTPUTS))
    grouped = padded.bfloat16().view(torch.int16).view(-1, OUTPUTS, weight.shape[1])
    return grouped.transpose(1, 2).contiguous().flatten(1).numpy().view(np.uint16)


@dataclass(frozen=True)
class HalvesLinear:
    """A linear of weights in bfloat16.

    Attributes:
        inputs: of the weight.
        outputs: likewise.
        weight: see group_weights.
        bias: [outputs] or [0].
    """

    inputs: int
    outputs: int
    weight: Halves
    bias: Floats

    @staticmethod
    def pack(weight: Tensor, bias: Tensor | None) -> HalvesLinear:
        """Of weight [outputs, inputs] that suits this form."""
        outputs, inputs = weight.shape
        assert bias is None or bias.shape == (outputs,), "one bias for each row of the weight"
        kept = _NO_BIAS if bias is None else bias.float().contiguous().numpy()
        return HalvesLinear(inputs, outputs, group_weights(weight), kept)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        return self._computed(x, _NO_STREAM)

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        assert stream.shape == (x.shape[0], self.outputs), "streams do not fit"
        return self._computed(x, stream.contiguous().numpy())

    def _computed(self, x: Tensor, stream: Floats) -> Tensor:
        rows, inputs = x.shape
        assert inputs == self.inputs, f"{inputs} inputs came, and {self.inputs} are wanted"
        out = torch.empty(rows, self.outputs)
        halves.halves_linear(
            x.contiguous().numpy(),
            self.weight,
            self.bias,
            stream,
            out.numpy(),
            threads_for(len(self.weight), rows * inputs * self.outputs),
        )
        return out
