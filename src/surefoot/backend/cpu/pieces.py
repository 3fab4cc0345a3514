"""Linears on the processor's matrix unit; see `kernels.pieces` for what they compute.

No row's bits depend on another row, by construction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.backend.cpu.halves import are_halves
from surefoot.backend.cpu.kernels import matrix_unit, pieces
from surefoot.backend.cpu.kernels.algebra import Floats
from surefoot.backend.cpu.kernels.matrix_unit import INPUTS, OUTPUTS, PIECES, TOKENS, Halves

_NO_BIAS = np.empty(0, np.float32)
_NO_STREAM = np.empty((0, 0), np.float32)
_MOST_NUMBERS = 4 << 20


def suits_unit(weight: Tensor) -> bool:
    """Whether the unit is there and the weight is one for it: float32, all numbers of bfloat16.

    It works on one thread. The more there are, the sooner the library's product is faster
    (measured with two, for which a weight of 2 million numbers is a tie).
    """
    threads = torch.get_num_threads()
    return (
        matrix_unit.permitted()
        and (threads == 1 or weight.numel() * threads <= _MOST_NUMBERS)
        and are_halves(weight)
    )


def _check(weight: Tensor, bias: Tensor | None) -> None:
    assert matrix_unit.permitted(), "there is no unit"
    assert bias is None or bias.shape == weight.shape[:1], "one bias for each row of the weight"


def group_weights(weight: Tensor) -> Halves:
    """[groups, inputs * 64] in the order in which the unit reads [outputs, inputs].

    Both are made up with zeros. A group is 64 outputs; it has a tile for each 32 inputs and each 16
    outputs, and a tile has two neighbouring inputs of an output side by side.
    """
    padded = F.pad(weight, (0, -weight.shape[1] % INPUTS, 0, -weight.shape[0] % OUTPUTS))
    groups, steps = padded.shape[0] // OUTPUTS, padded.shape[1] // INPUTS
    halves = padded.bfloat16().view(torch.int16).view(groups, 4, 16, steps, 16, 2)
    ordered = halves.permute(0, 3, 1, 4, 2, 5).contiguous()
    return ordered.view(groups, -1).numpy().view(np.uint16)


def _scratch(rows: int, inputs: int) -> Halves:
    """Room for the pieces of so many rows; of torch, whose memory begins with a cache line."""
    tokens = rows if rows <= TOKENS else rows + -rows % TOKENS
    made = torch.empty(PIECES, tokens, inputs + -inputs % INPUTS, dtype=torch.int16)
    return made.numpy().view(np.uint16)


@dataclass(frozen=True)
class PiecesLinear:
    """A linear on the matrix unit.

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
    def pack(weight: Tensor, bias: Tensor | None) -> PiecesLinear:
        """Of weight [outputs, inputs] that suits the unit."""
        outputs, inputs = weight.shape
        _check(weight, bias)
        kept = _NO_BIAS if bias is None else bias.float().contiguous().numpy()
        return PiecesLinear(inputs, outputs, group_weights(weight), kept)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        return self._computed(x, _NO_STREAM)

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        assert stream.shape == (x.shape[0], self.outputs), "streams do not fit"
        return self._computed(x, stream.numpy())

    def _computed(self, x: Tensor, stream: Floats) -> Tensor:
        rows, inputs = x.shape
        assert inputs == self.inputs, f"{inputs} inputs came, and {self.inputs} are wanted"
        out = torch.empty(rows, self.outputs)
        if rows:
            pieces.linear(
                x.contiguous().numpy(),
                _scratch(rows, inputs),
                self.weight,
                self.bias,
                stream,
                out.numpy(),
            )
        return out


@dataclass(frozen=True)
class PiecesGated:
    """silu(gate) * up on the matrix unit; see Backend.pack_gated.

    Attributes:
        inputs: of the weight.
        outputs: half the rows of the weight.
        weight: see kernels.pieces.gated.
        bias: [2 * outputs] or [0].
        limit: where gate and up are cut off.
    """

    inputs: int
    outputs: int
    weight: Halves
    bias: Floats
    limit: float

    @staticmethod
    def pack(weight: Tensor, bias: Tensor | None, limit: float) -> PiecesGated:
        """Of weight [2 * outputs, inputs] that suits the unit, the gates first."""
        half = OUTPUTS // 2
        _check(weight, bias)
        outputs, inputs = weight.shape[0] // 2, weight.shape[1]
        both = F.pad(weight.view(2, outputs, inputs), (0, 0, 0, -outputs % half))
        grouped = both.view(2, -1, half, inputs).transpose(0, 1).reshape(-1, inputs)
        kept = _NO_BIAS if bias is None else bias.float().contiguous().numpy()
        return PiecesGated(inputs, outputs, group_weights(grouped), kept, limit)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        rows, inputs = x.shape
        assert inputs == self.inputs, f"{inputs} inputs came, and {self.inputs} are wanted"
        out = torch.empty(rows, self.outputs)
        if rows:
            pieces.gated(
                x.contiguous().numpy(),
                _scratch(rows, inputs),
                self.weight,
                self.bias,
                np.float32(self.limit),
                out.numpy(),
            )
        return out
