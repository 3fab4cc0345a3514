"""Linears of float32 inputs and weights that are numbers of bfloat16, on the matrix unit.

A float32 has 24 digits, and a bfloat16 has 8 and the same range. So each input is the sum of three
numbers of bfloat16, exactly, and three products of bfloat16 summed in float32 are one of float32
(after arXiv 1904.06376). Checkpoints are mostly in bfloat16; their weights take half the memory.

What the unit does otherwise: a piece, a weight, a product or a sum below 2^-126 counts as 0, and an
infinite input or weight makes the results that it enters NaN.
"""

from __future__ import annotations

import numpy as np

from surefoot.backend.cpu.kernels.algebra import Floats, gate_row
from surefoot.backend.cpu.kernels.compile import exact, kernel
from surefoot.backend.cpu.kernels.matrix_unit import (
    OUTPUTS,
    TOKENS,
    Halves,
    describe_tiles,
    divide_tiles,
    first_multiply,
    more_multiply,
    release_tiles,
)

_HIGH = np.uint32(0xFFFF0000)
_DOWN = np.uint32(16)
_PAIR = OUTPUTS // 2


@exact
def _split(x: Floats, pieces: Halves) -> None:
    """Each number of x [T, inputs] as the sum of three; pieces [3, at least T, at least inputs]."""
    tokens, inputs = x.shape
    pieces[:, :, inputs:] = 0
    pieces[:, tokens:] = 0
    for t in range(tokens):
        row, first, second, third = x[t], pieces[0, t], pieces[1, t], pieces[2, t]
        for k in range(inputs):
            bits = np.float32(row[k]).view(np.uint32)
            rest = np.float32(row[k] - np.uint32(bits & _HIGH).view(np.float32))
            middle = rest.view(np.uint32)
            least = np.float32(rest - np.uint32(middle & _HIGH).view(np.float32))
            first[k] = bits >> _DOWN
            second[k] = middle >> _DOWN
            third[k] = least.view(np.uint32) >> _DOWN


@exact
def _enter(x: Floats, pieces: Halves) -> None:
    """Split the inputs and divide the tiles for them."""
    _split(x, pieces)
    form = np.empty(64, np.uint8)
    describe_tiles(min(pieces.shape[1], TOKENS), form)
    divide_tiles(form)


@exact
def _multiply(pieces: Halves, weight: Halves, t: int, sums: Floats) -> None:
    if t == 0:
        first_multiply(pieces, weight, t, sums)
    else:
        more_multiply(pieces, weight, t, sums)


@kernel("void(f4[:,::1],u2[:,:,::1],u2[:,::1],f4[::1],f4[:,:],f4[:,::1])")
def linear(
    x: Floats, pieces: Halves, weight: Halves, bias: Floats, stream: Floats, out: Floats
) -> None:
    """A whole linear.

    Args:
        x: [T, inputs], at least one token.
        pieces: scratch [3, T or more, inputs or more], both made up: inputs to a multiple of 32,
            tokens, if there are more than 16, to a multiple of 16.
        weight: [groups, inputs made up * 64], see `group_weights`.
        bias: [outputs], or [0] for none.
        stream: [T, outputs] that the results are added to, or [0, 0] for none.
        out: [T, outputs], written to.
    """
    _enter(x, pieces)
    sums = np.empty((TOKENS, OUTPUTS), np.float32)
    for group in range(weight.shape[0]):
        begin = group * OUTPUTS
        end = min(begin + OUTPUTS, out.shape[1])
        for t in range(0, x.shape[0], TOKENS):
            _multiply(pieces, weight[group], t, sums)
            for i in range(t, min(t + TOKENS, x.shape[0])):
                target, row = out[i, begin:end], sums[i - t]
                for n in range(end - begin):
                    target[n] = row[n]
                if bias.shape[0] > 0:
                    for n in range(end - begin):
                        target[n] = target[n] + bias[begin + n]
                if stream.shape[0] > 0:
                    for n in range(end - begin):
                        target[n] = stream[i, begin + n] + target[n]
    release_tiles()


@kernel("void(f4[:,::1],u2[:,:,::1],u2[:,::1],f4[::1],f4,f4[:,::1])")
def gated(
    x: Floats, pieces: Halves, weight: Halves, bias: Floats, limit: np.float32, out: Floats
) -> None:
    """silu(gate) * up; see Backend.pack_gated, and `linear` for what is not said here.

    Args:
        x: [T, inputs].
        pieces: scratch.
        weight: a group has 32 gates and then their 32 ups.
        bias: [2 * outputs], the gates first, or [0].
        limit: where gates and ups are cut off.
        out: [T, outputs], written to.
    """
    _enter(x, pieces)
    sums = np.empty((TOKENS, OUTPUTS), np.float32)
    width = out.shape[1]
    for group in range(weight.shape[0]):
        begin = group * _PAIR
        end = min(begin + _PAIR, width)
        for t in range(0, x.shape[0], TOKENS):
            _multiply(pieces, weight[group], t, sums)
            for i in range(t, min(t + TOKENS, x.shape[0])):
                target, gates, ups = out[i, begin:end], sums[i - t, :_PAIR], sums[i - t, _PAIR:]
                if bias.shape[0] > 0:
                    for n in range(end - begin):
                        gates[n] = gates[n] + bias[begin + n]
                        ups[n] = ups[n] + bias[width + begin + n]
                gate_row(gates, ups, limit, target)
    release_tiles()
