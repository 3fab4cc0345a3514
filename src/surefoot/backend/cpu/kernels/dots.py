"""Exact sums of products in int8, with the instruction that some processors have for them.

VPDPBUSD multiplies 64 unsigned bytes with 64 signed ones, and adds each four products to one of 16
sums in int32. Inputs are signed too, so 128 is added to each, and what this brings into a sum, 128
times the sum of the weight's row, is taken off in the end. A sum that grows too large on the way
wraps around, and back.

Sixteen rows of the weight are taken at once. Each has a register of 16 sums, and in the end these
are added up so that one register holds the sums of the sixteen rows. Meanwhile the next sixteen,
which lie right behind, are called from memory: what a processor foresees by itself of sixteen rows
in turn is less (measured: 14 % of a product of one row).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from surefoot.backend.cpu.kernels.algebra import Floats
from surefoot.backend.cpu.kernels.compile import exact_kernel
from surefoot.backend.cpu.kernels.int8 import Bytes, Sums, dequantise, quantise

ROWS = 16
"""Rows of a weight that are taken at once; it must have a multiple of them."""

INPUTS = 64
"""Inputs that are taken at once; there must be a multiple of them."""

HAS_DOTS = bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni", False))
"""Whether this processor has the instruction; the kernel below cannot be compiled without it."""

_VECTOR = ir.VectorType(ir.IntType(32), 16)
_INSTRUCTION = ir.FunctionType(_VECTOR, [_VECTOR] * 3), "llvm.x86.avx512.vpdpbusd.512"
_PREFETCH = (
    ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), *[ir.IntType(32)] * 3]),
    "llvm.prefetch.p0",
)
_TO_SECOND_CACHE = [ir.Constant(ir.IntType(32), value) for value in (0, 2, 1)]  # read, near, data
_ADD_128 = ir.Constant(_VECTOR, [-0x7F7F7F80] * 16)  # turns the sign bit of each byte


def _load(builder: Any, address: Any) -> Any:
    vector = builder.load(builder.bitcast(address, _VECTOR.as_pointer()))
    vector.align = 1
    return vector


def _merge(builder: Any, x: Any, y: Any, width: int) -> Any:
    """Runs of `width` sums of x and of y in turn, each the sum of two neighbouring runs."""
    pairs = range(0, 16, 2 * width)
    left = [p + i for at in pairs for p in (at, 16 + at) for i in range(width)]
    right = [place + width for place in left]
    halves = (builder.shuffle_vector(x, y, ir.Constant(_VECTOR, side)) for side in (left, right))
    return builder.add(*halves)


def _emit(
    builder: Any, codes: Any, weight: Any, stride: Any, excess: Any, sums: Any, ahead: bool
) -> None:
    """Instructions of a _Dots function, with addresses for arrays; `stride` is in bytes."""
    dot = cgutils.get_or_insert_function(builder.module, *_INSTRUCTION)
    prefetch = cgutils.get_or_insert_function(builder.module, *_PREFETCH)
    totals = [cgutils.alloca_once(builder, _VECTOR) for _ in range(ROWS)]
    for total in totals:
        builder.store(ir.Constant(_VECTOR, None), total)
    step, rows = ir.Constant(stride.type, INPUTS), ir.Constant(stride.type, ROWS)
    next_rows = builder.gep(weight, [builder.mul(stride, rows)])
    with cgutils.for_range(builder, builder.udiv(stride, step)) as loop:
        at = builder.mul(loop.index, step)
        inputs = builder.xor(_load(builder, builder.gep(codes, [at])), _ADD_128)
        row = builder.gep(weight, [at])
        wanted_next = builder.gep(next_rows, [builder.mul(at, rows)])
        for total in totals:
            if ahead:
                builder.call(prefetch, [wanted_next, *_TO_SECOND_CACHE])
            added = builder.call(dot, [builder.load(total), inputs, _load(builder, row)])
            builder.store(added, total)
            row, wanted_next = builder.gep(row, [stride]), builder.gep(wanted_next, [step])
    result = builder.sub(_merged(builder, totals), _load(builder, excess))
    builder.store(result, builder.bitcast(sums, _VECTOR.as_pointer())).align = 1


def _merged(builder: Any, totals: list[Any]) -> Any:
    """The sum of each register, in one register."""
    vectors, width = [builder.load(total) for total in totals], 1
    while len(vectors) > 1:
        halves = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [_merge(builder, x, y, width) for x, y in halves]
        width *= 2
    return vectors[0]


_Dots = Callable[[Bytes, Bytes, Sums, Sums], None]
"""The sums of products of an input [inputs] and 16 rows [16, inputs], less an excess [16]: [16]."""


def _dots(ahead: bool) -> _Dots:
    """Such a function that calls the next rows from memory, or does not."""

    def typed(_: Any, codes: Any, weight: Any, excess: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            arrays = [
                context.make_array(kind)(context, builder, value)
                for kind, value in zip(signature.args, values, strict=True)
            ]
            stride = cgutils.unpack_tuple(builder, arrays[1].shape)[1]
            inputs, rows, less, out = (array.data for array in arrays)
            _emit(builder, inputs, rows, stride, less, out, ahead)
            return context.get_dummy_value()

        return types.void(codes, weight, excess, sums), generate

    return cast(_Dots, intrinsic(typed))


first_dots = _dots(ahead=True)
more_dots = _dots(ahead=False)


@exact_kernel(
    "void(f4[:,::1],f4[::1],i1[:,::1],i4[::1],i4[::1],f4[::1],f4[::1],f4[:,::1],f4[:,::1])"
)
def int8_linear(
    x: Floats,
    fixed: Floats,
    values: Bytes,
    excess: Sums,
    added: Sums,
    scales: Floats,
    bias: Floats,
    stream: Floats,
    out: Floats,
) -> None:
    """A whole linear, best for few rows of input; see `int8` for what is not said here.

    Args:
        x: [T, inputs].
        fixed: see quantise.
        values: [outputs, inputs], both made up to multiples of ROWS and INPUTS with zeros.
        excess: as many as rows of values, 128 times the sum of each.
        added: see dequantise.
        scales: [outputs].
        bias: see dequantise.
        stream: see dequantise.
        out: [T, outputs], written to.
    """
    tokens, padded = x.shape[0], values.shape[0]
    codes = np.empty((tokens, values.shape[1]), np.int8)
    row_scales = np.empty(tokens, np.float32)
    quantise(x, fixed, codes, row_scales)
    sums = np.empty((tokens, padded), np.int32)
    for n in range(0, padded, ROWS):
        rows = values[n : n + ROWS]
        less = excess[n : n + ROWS]
        for t in range(tokens):  # there may be none, and then there is no first either
            if t == 0:
                first_dots(codes[t], rows, less, sums[t, n : n + ROWS])
            else:
                more_dots(codes[t], rows, less, sums[t, n : n + ROWS])
    dequantise(sums, added, scales, row_scales, bias, stream, out)
