"""A whole linear with scales by groups of inputs, by the instruction that `dots` is about.

A group is too short for sums that are spread over a register and put together in the end. So a
weight lies here in blocks of 16 outputs, four inputs of each side by side: each instruction adds
to the sums of 16 outputs, and takes the same four inputs for all of them. One row of the input has
four registers of sums, that none waits for another; of four rows each has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from surefoot.backend.cpu.kernels.algebra import Floats
from surefoot.backend.cpu.kernels.compile import exact_kernel
from surefoot.backend.cpu.kernels.grouped import GroupedBytes, add_worth, finish, quantise_groups
from surefoot.backend.cpu.kernels.int8 import Bytes, Sums

OUTPUTS = 16
"""Outputs of a block."""

INPUTS = 16
"""Inputs that are taken at once, in four steps; a group must have a multiple of them."""

_ROWS = 4
_TILE = 32  # rows whose sums of a group stay in the second cache
_STEP = 4
_BLOCK_STEP = OUTPUTS * _STEP
_VECTOR = ir.VectorType(ir.IntType(32), OUTPUTS)
_INSTRUCTION = ir.FunctionType(_VECTOR, [_VECTOR] * 3), "llvm.x86.avx512.vpdpbusd.512"
_ALL_FIRST = ir.Constant(_VECTOR, [0] * OUTPUTS)

_Dots = Callable[[Bytes, npt.NDArray[np.int8], Sums, Sums, int], None]
"""Sums of rows of codes [T, inputs], with 128 added to each, and a block [16 inputs], less an
excess [16], to be put into columns of [T, outputs] from a place on."""


def _load(builder: Any, address: Any) -> Any:
    vector = builder.load(builder.bitcast(address, _VECTOR.as_pointer()))
    vector.align = 1
    return vector


def _spread(builder: Any, address: Any) -> Any:
    """Four bytes, sixteen times."""
    four = builder.load(builder.bitcast(address, ir.IntType(32).as_pointer()))
    four.align = 1
    single = builder.insert_element(
        ir.Constant(_VECTOR, ir.Undefined), four, ir.Constant(ir.IntType(32), 0)
    )
    return builder.shuffle_vector(single, ir.Constant(_VECTOR, ir.Undefined), _ALL_FIRST)


def _emit(
    builder: Any, rows: list[Any], weight: Any, count: Any, less: Any, out: list[Any]
) -> None:
    """Instructions for rows, given by their addresses; `count` is how many inputs there are."""
    dot = cgutils.get_or_insert_function(builder.module, *_INSTRUCTION)
    lanes = INPUTS // _STEP if len(rows) == 1 else 1
    totals = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(lanes)] for _ in rows]
    for total in (total for own in totals for total in own):
        builder.store(ir.Constant(_VECTOR, None), total)
    with cgutils.for_range(builder, builder.udiv(count, count.type(INPUTS))) as loop:
        for step in range(INPUTS // _STEP):
            at = builder.add(builder.mul(loop.index, count.type(INPUTS)), count.type(step * _STEP))
            block = _load(builder, builder.gep(weight, [builder.mul(at, count.type(OUTPUTS))]))
            for row, own in zip(rows, totals, strict=True):
                total = own[step % lanes]
                inputs = _spread(builder, builder.gep(row, [at]))
                builder.store(builder.call(dot, [builder.load(total), inputs, block]), total)
    for own, place in zip(totals, out, strict=True):
        result = builder.load(own[0])
        for total in own[1:]:
            result = builder.add(result, builder.load(total))
        result = builder.sub(result, _load(builder, less))
        builder.store(result, builder.bitcast(place, _VECTOR.as_pointer())).align = 1


def _dots(count: int) -> _Dots:
    """Such a function for so many rows."""

    def typed(_: Any, codes: Any, block: Any, less: Any, sums: Any, column: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            arrays = [
                context.make_array(kind)(context, builder, value)
                for kind, value in zip(signature.args[:4], values, strict=False)
            ]
            inputs, outputs = (
                cgutils.unpack_tuple(builder, arrays[place].shape)[1] for place in (0, 3)
            )
            at = context.cast(builder, values[4], signature.args[4], types.intp)

            def row(array: Any, width: Any, number: int, first: Any) -> Any:
                return builder.gep(
                    array.data, [builder.add(builder.mul(width, width.type(number)), first)]
                )

            nothing = inputs.type(0)
            rows = [row(arrays[0], inputs, number, nothing) for number in range(count)]
            places = [row(arrays[3], outputs, number, at) for number in range(count)]
            _emit(builder, rows, arrays[1].data, inputs, arrays[2].data, places)
            return context.get_dummy_value()

        return types.void(codes, block, less, sums, column), generate

    return cast(_Dots, intrinsic(typed))


_dots_of_one = _dots(1)
_dots_of_four = _dots(_ROWS)


@exact_kernel("void(f4[:,::1],i1[:,:,::1],i4[:,::1],f4[:,::1],f4[::1],f4[:,::1],f4[:,::1])")
def grouped_linear(
    x: Floats,
    values: GroupedBytes,
    excess: Sums,
    scales: Floats,
    bias: Floats,
    stream: Floats,
    out: Floats,
) -> None:
    """The linear. The weight is read group by group, from its begin to its end.

    Args:
        x: [T, inputs].
        values: [G, blocks, 16 inputs / G], see `blocked`.
        excess: [G, 16 blocks], 128 times the sum of each output's codes.
        scales: likewise; 0 for outputs that were made up.
        bias: see finish.
        stream: see finish.
        out: [T, outputs], written to.
    """
    tokens = x.shape[0]
    groups, blocks, width = values.shape[0], values.shape[1], values.shape[2] // OUTPUTS
    codes = np.empty((groups, tokens, width), np.int8)
    row_scales = np.empty(tokens, np.float32)
    quantise_groups(x, codes, row_scales)
    for g in range(groups):
        for t in range(tokens):
            for k in range(width):
                codes[g, t, k] = codes[g, t, k] ^ np.int8(-128)  # 128 is added, without a sign
    totals = np.empty((tokens, blocks * OUTPUTS), np.float32)
    sums = np.empty((min(_TILE, tokens), blocks * OUTPUTS), np.int32)
    for begin in range(0, tokens, _TILE):
        end = min(tokens, begin + _TILE)
        for g in range(groups):
            for b in range(blocks):
                less = excess[g, b * OUTPUTS : (b + 1) * OUTPUTS]
                t = begin
                while t + _ROWS <= end:
                    rows, own = codes[g, t : t + _ROWS], sums[t - begin : t - begin + _ROWS]
                    _dots_of_four(rows, values[g, b], less, own, b * OUTPUTS)
                    t += _ROWS
                while t < end:
                    rows, own = codes[g, t : t + 1], sums[t - begin : t - begin + 1]
                    _dots_of_one(rows, values[g, b], less, own, b * OUTPUTS)
                    t += 1
            for t in range(begin, end):
                add_worth(sums[t - begin], scales[g], g == 0, totals[t])
    finish(totals, row_scales, bias, stream, out)
