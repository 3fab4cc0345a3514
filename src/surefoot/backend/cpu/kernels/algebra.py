"""What the kernels are made of; float32 throughout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from numba import types
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic

from surefoot.backend.cpu.kernels.compile import extremes, lanes, part

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

_ZERO = np.float32(0)
_INFINITE = np.float32(np.inf)
_ONE = np.float32(1)
_HALF = np.float32(0.5)
_LEAST = np.float32(-87)  # below, exp is hardly a normal number
_MOST = np.float32(88)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_C0 = np.float32(1.9875691500e-4)
_C1 = np.float32(1.3981999507e-3)
_C2 = np.float32(8.3334519073e-3)
_C3 = np.float32(4.1665795894e-2)
_C4 = np.float32(1.6666665459e-1)
_C5 = np.float32(5.0000001201e-1)
_BIAS = np.int32(127)
_MANTISSA = np.int32(23)


def _known_as_packed(_: Any, row: Any) -> Any:
    packed = types.Array(row.dtype, row.ndim, "C", readonly=not row.mutable)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return impl_ret_borrowed(context, builder, signature.return_type, values[0])

    return packed(row), generate


_as_packed = cast(Callable[[Floats], Floats], intrinsic(_known_as_packed))


@part
def packed(row: Floats) -> Floats:
    """The same row [n], known to the compiler as one whose numbers lie side by side."""
    assert row.shape[0] < 2 or row.strides[0] == row.itemsize, (
        "numbers of a row must lie side by side"
    )
    return _as_packed(row)


@part
def exp(x: np.float32) -> np.float32:
    """e^x to the last bit or so, from e^-87 up to e^88; a NaN stays one.

    The polynomial of Cephes' expf (S. Moshier): e^x = 2^n e^r with |r| <= ln(2) / 2.
    """
    if x < _LEAST:
        x = _LEAST
    if x > _MOST:
        x = _MOST
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    y = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    power = np.int32((np.int32(n) + _BIAS) << _MANTISSA).view(np.float32)
    return np.float32((y * (r * r) + r + _ONE) * power)


@part
def sigmoid(x: np.float32) -> np.float32:
    """1 / (1 + e^-x)."""
    return np.float32(_ONE / (_ONE + exp(-x)))


@part
def silu(x: np.float32) -> np.float32:
    """X / (1 + e^-x)."""
    return np.float32(x / (_ONE + exp(-x))) if not x < -_MOST else _ZERO


@lanes
def dot(a: Floats, b: Floats) -> np.float32:
    """Sum of a[i] b[i]."""
    total = _ZERO
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


@lanes
def sum_of(a: Floats) -> np.float32:
    """Sum of all."""
    total = _ZERO
    for i in range(a.shape[0]):
        total += a[i]
    return total


@part
def copy(source: Floats, target: Floats) -> None:
    """Target = source."""
    for d in range(target.shape[0]):
        target[d] = source[d]


@part
def rotate_row(x: Floats, cos: Floats, sin: Floats) -> None:
    """X * cos + swapped_halves(x) * sin, in place."""
    half = x.shape[0] // 2
    for d in range(half):
        a, b = x[d], x[half + d]
        x[d] = a * cos[d] + b * sin[d]
        x[half + d] = b * cos[half + d] + a * sin[half + d]


@part
def gate_row(gates: Floats, ups: Floats, limit: np.float32, out: Floats) -> None:
    """silu(gate) * up, with both cut off at the limit; see Backend.pack_gated."""
    if limit == _INFINITE:
        for d in range(out.shape[0]):
            out[d] = silu(gates[d]) * ups[d]
    else:
        for d in range(out.shape[0]):
            gate, up = gates[d], ups[d]
            gate = limit if gate > limit else gate
            up = limit if up > limit else -limit if up < -limit else up
            out[d] = silu(gate) * up


@part
def norm_row(x: Floats, weight: Floats, eps: np.float32) -> None:
    """X / sqrt(mean(x^2) + eps) * weight, in place."""
    mean = dot(x, x) / np.float32(x.shape[0])
    factor = _ONE / np.sqrt(mean + eps)
    for d in range(x.shape[0]):
        x[d] = x[d] * factor * weight[d]


@extremes
def greatest(a: Floats, start: int, stop: int) -> np.float32:
    """The greatest of a[start:stop], which are numbers."""
    top = a[start]
    for i in range(start, stop):
        top = max(top, a[i])
    return np.float32(top)


@part
def accumulate(factors: Floats, rows: Floats, out: Floats) -> None:
    """Out += factors[0] rows[0] + factors[1] rows[1] + ..., one row after the other."""
    size, count = out.shape[0], factors.shape[0]
    whole = count // 4 * 4
    for j in range(0, whole, 4):
        f0, f1, f2, f3 = factors[j], factors[j + 1], factors[j + 2], factors[j + 3]
        r0, r1, r2, r3 = rows[j], rows[j + 1], rows[j + 2], rows[j + 3]
        for d in range(size):
            out[d] = out[d] + f0 * r0[d] + f1 * r1[d] + f2 * r2[d] + f3 * r3[d]
    for j in range(whole, count):
        f0, r0 = factors[j], rows[j]
        for d in range(size):
            out[d] = out[d] + f0 * r0[d]


@part
def accumulate_two(a: Floats, b: Floats, rows: Floats, out: Floats) -> None:
    """`accumulate` for factors a and b into out[0] and out[1]; they read the same rows."""
    size, count = out.shape[1], a.shape[0]
    first, second = out[0], out[1]
    whole = count // 4 * 4
    for j in range(0, whole, 4):
        a0, a1, a2, a3 = a[j], a[j + 1], a[j + 2], a[j + 3]
        b0, b1, b2, b3 = b[j], b[j + 1], b[j + 2], b[j + 3]
        r0, r1, r2, r3 = rows[j], rows[j + 1], rows[j + 2], rows[j + 3]
        for d in range(size):
            w, x, y, z = r0[d], r1[d], r2[d], r3[d]
            first[d] = first[d] + a0 * w + a1 * x + a2 * y + a3 * z
            second[d] = second[d] + b0 * w + b1 * x + b2 * y + b3 * z
    for j in range(whole, count):
        a0, b0, r0 = a[j], b[j], rows[j]
        for d in range(size):
            first[d] = first[d] + a0 * r0[d]
            second[d] = second[d] + b0 * r0[d]
