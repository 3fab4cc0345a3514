"""Linears of float32 inputs and weights that are numbers of bfloat16, in vector registers.

A product of few tokens takes as long as reading its weight. So weights stay in bfloat16, half the
bytes, and become float32 by a shift. Three vectors of 16 outputs are taken at once for up to eight
tokens:

    24 registers  sums of 8 tokens x 48 outputs
     3 registers  an input's 48 weights
     1 register   that input of one token, 16 times

Each sum is added to input by input, so its bits depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import llvmlite.binding
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from surefoot.backend.cpu.kernels.algebra import Floats
from surefoot.backend.cpu.kernels.compile import kernel, part
from surefoot.backend.cpu.kernels.threads import on_threads

Halves = npt.NDArray[np.uint16]

TOKENS = 8
"""Most tokens that are taken at once."""

LANES = 16
VECTORS = 3
OUTPUTS = LANES * VECTORS
"""Outputs that are taken at once."""

HAS_VECTORS = bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))
"""Whether this processor has registers of 16 float32, and 32 of them."""

_LONG = ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_HALVES = ir.VectorType(ir.IntType(16), LANES)
_BITS = ir.VectorType(ir.IntType(32), LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_SIXTEEN = ir.Constant(_BITS, [16] * LANES)
_FMA = ir.FunctionType(_FLOATS, [_FLOATS] * 3), "llvm.fma.v16f32"
_PREFETCH = (
    ir.FunctionType(ir.VoidType(), [_BYTES, *[ir.IntType(32)] * 3]),
    "llvm.prefetch.p0",
)
_TO_SECOND_CACHE = [ir.Constant(ir.IntType(32), value) for value in (0, 2, 1)]  # read, near, data
_LINE = 64  # bytes
_AHEAD = 128 * 2 * OUTPUTS


def _long(value: int) -> Any:
    return ir.Constant(_LONG, value)


def _spread(builder: Any, number: Any) -> Any:
    """A float in all lanes."""
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, _long(0))
    return builder.shuffle_vector(one, one, ir.Constant(_BITS, [0] * LANES))


def _widened(builder: Any, address: Any) -> Any:
    """Sixteen numbers of bfloat16 as float32."""
    halves = builder.load(builder.bitcast(address, _HALVES.as_pointer()))
    halves.align = 2
    return builder.bitcast(builder.shl(builder.zext(halves, _BITS), _SIXTEEN), _FLOATS)


def _fetch(builder: Any, address: Any) -> None:
    """Call what will be needed soon from memory; an input's weights lie in up to two lines."""
    prefetch = cgutils.get_or_insert_function(builder.module, *_PREFETCH)
    start = builder.bitcast(address, _BYTES)
    for place in (_AHEAD, _AHEAD + _LINE):
        builder.call(prefetch, [builder.gep(start, [_long(place)]), *_TO_SECOND_CACHE])


def _emit(
    builder: Any, x: Any, inputs: Any, weight: Any, out: tuple[Any, Any], tokens: int
) -> None:
    """Instructions of a _Multiply function: addresses of arrays, and for `out` a row's bytes."""
    fma = cgutils.get_or_insert_function(builder.module, *_FMA)
    totals = [
        [cgutils.alloca_once(builder, _FLOATS) for _ in range(VECTORS)] for _ in range(tokens)
    ]
    for total in (each for row in totals for each in row):
        builder.store(ir.Constant(_FLOATS, None), total)
    with cgutils.for_range(builder, inputs) as loop:
        here = builder.gep(weight, [builder.mul(loop.index, _long(OUTPUTS))])
        _fetch(builder, here)
        vectors = [builder.gep(here, [_long(LANES * vector)]) for vector in range(VECTORS)]
        weights = [_widened(builder, vector) for vector in vectors]
        for token, row in enumerate(totals):
            place = builder.add(builder.mul(inputs, _long(token)), loop.index)
            number = _spread(builder, builder.load(builder.gep(x, [place])))
            for each, total in zip(weights, row, strict=True):
                builder.store(builder.call(fma, [number, each, builder.load(total)]), total)
    start, stride = builder.bitcast(out[0], _BYTES), out[1]
    for token, row in enumerate(totals):
        for vector, total in enumerate(row):
            place = builder.add(builder.mul(stride, _long(token)), _long(4 * LANES * vector))
            address = builder.bitcast(builder.gep(start, [place]), _FLOATS.as_pointer())
            builder.store(builder.load(total), address).align = 4


_Multiply = Callable[[Floats, Halves, Floats], None]
"""Sums of products of some tokens' inputs [tokens, inputs] and a group's weights: [tokens, 48]."""


def _multiply(tokens: int) -> _Multiply:
    """Such a function for so many tokens; there may be more, which it leaves alone."""

    def typed(_: Any, x: Any, weight: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            given, weights, target = (
                context.make_array(kind)(context, builder, value)
                for kind, value in zip(signature.args, values, strict=True)
            )
            inputs = cgutils.unpack_tuple(builder, given.shape)[1]
            stride = cgutils.unpack_tuple(builder, target.strides)[0]
            _emit(builder, given.data, inputs, weights.data, (target.data, stride), tokens)
            return context.get_dummy_value()

        return types.void(x, weight, out), generate

    return cast(_Multiply, intrinsic(typed))


_one, _two, _four, _eight = (_multiply(tokens) for tokens in (1, 2, 4, TOKENS))


@part
def _group(x: Floats, weight: Halves, out: Floats) -> None:
    """Sums of all tokens x [T, inputs] for one group of outputs, out [T, 48]."""
    t, tokens = 0, x.shape[0]
    while t < tokens:
        if tokens - t >= TOKENS:
            _eight(x[t:], weight, out[t:])
            t += TOKENS
        elif tokens - t >= 4:
            _four(x[t:], weight, out[t:])
            t += 4
        elif tokens - t >= 2:
            _two(x[t:], weight, out[t:])
            t += 2
        else:
            _one(x[t:], weight, out[t:])
            t += 1


@part
def _add(bias: Floats, stream: Floats, out: Floats, begin: int, end: int) -> None:
    """Add what is there of bias and stream to some of the outputs."""
    for t in range(out.shape[0]):
        if bias.shape[0] > 0:
            for n in range(begin, end):
                out[t, n] = out[t, n] + bias[n]
        if stream.shape[0] > 0:
            for n in range(begin, end):
                out[t, n] = stream[t, n] + out[t, n]


@part
def _some_groups(
    x: Floats,
    weight: Halves,
    bias: Floats,
    stream: Floats,
    out: Floats,
    number: int,
    parts: int,
) -> None:
    """One part of a linear: some groups of its outputs; see `halves_linear`."""
    tokens, groups, outputs = x.shape[0], weight.shape[0], out.shape[1]
    begin, end = number * groups // parts, (number + 1) * groups // parts
    for group in range(begin, end):
        start = group * OUTPUTS
        if start + OUTPUTS <= outputs:
            _group(x, weight[group], out[:, start:])
        else:
            sums = np.empty((tokens, OUTPUTS), np.float32)
            _group(x, weight[group], sums[:, 0:])
            for t in range(tokens):
                for n in range(start, outputs):
                    out[t, n] = sums[t, n - start]
    _add(bias, stream, out, begin * OUTPUTS, min(end * OUTPUTS, outputs))


@kernel("void(f4[:,::1],u2[:,::1],f4[::1],f4[:,::1],f4[:,::1],i8)")
def halves_linear(
    x: Floats, weight: Halves, bias: Floats, stream: Floats, out: Floats, threads: int
) -> None:
    """A whole linear.

    Args:
        x: [T, inputs].
        weight: [groups, inputs * 48]: a group's 48 outputs side by side for each input.
        bias: [outputs], or [0] for none.
        stream: [T, outputs] that the results are added to, or [0, 0] for none.
        out: [T, outputs], written to.
        threads: how many share the work.
    """
    on_threads(_some_groups, threads, (x, weight, bias, stream, out))
