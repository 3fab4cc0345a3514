"""What stands around sums of products in int8: codes of the inputs, and results in float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from surefoot.backend.cpu.kernels.algebra import Floats
from surefoot.backend.cpu.kernels.compile import exact, exact_kernel
from surefoot.backend.operands import LEAST_SCALE

Bytes = npt.NDArray[np.int8]
Sums = npt.NDArray[np.int32]

_MAGNITUDE = np.int32(0x7FFFFFFF)  # all bits of a float32 but its sign
_INFINITY = np.int32(0x7F800000)  # its bits; those of a NaN are above
_LEAST_SCALE = np.float32(LEAST_SCALE)
_LOWEST = np.float32(-128)
_HIGHEST = np.float32(127)
_ONE = np.float32(1)
_NAN = np.float32(np.nan)
_WHOLE = np.float32(1.5 * 2**23)  # what is added to it loses its fraction, halves to even


@exact
def _peak_bits(x: Floats) -> np.int32:
    """The bits of the greatest magnitude; bits of magnitudes are in the order of the numbers."""
    peak = np.int32(0)
    bits = x.view(np.int32)
    for k in range(bits.shape[0]):
        magnitude = np.int32(bits[k] & _MAGNITUDE)
        if magnitude > peak:  # `max` would widen it
            peak = magnitude
    return peak


@exact
def quantise(x: Floats, fixed: Floats, codes: Bytes, scales: Floats) -> None:
    """Codes and scales of each row of the input; see Int8Weight.

    Args:
        x: [T, inputs].
        fixed: scale and offset, or [0] where scales are found row by row.
        codes: [T, at least inputs], written to; 0 behind the inputs.
        scales: [T], written to.
    """
    inputs = x.shape[1]
    for t in range(x.shape[0]):
        row, target = x[t], codes[t]
        target[inputs:] = 0
        peak = _peak_bits(row)
        if peak >= _INFINITY:
            scales[t] = _NAN
            target[:inputs] = 0
        elif fixed.shape[0] > 0:
            scales[t] = _ONE
            for k in range(inputs):
                code = row[k] / fixed[0] + _WHOLE - _WHOLE + fixed[1]
                target[k] = np.int8(max(_LOWEST, min(_HIGHEST, code)))
        else:
            scale = np.int32(peak).view(np.float32) / _HIGHEST
            scale = _ONE if scale < _LEAST_SCALE else scale
            scales[t] = scale
            for k in range(inputs):
                target[k] = np.int8(row[k] / scale + _WHOLE - _WHOLE)


@exact
def dequantise(
    sums: Sums,
    added: Sums,
    scales: Floats,
    row_scales: Floats,
    bias: Floats,
    stream: Floats,
    out: Floats,
) -> None:
    """Results of the sums of products; see Int8Weight.

    Args:
        sums: [T, at least outputs].
        added: [outputs], or [0] for nothing.
        scales: [outputs].
        row_scales: [T].
        bias: [outputs], or [0] for none.
        stream: [T, outputs] that the results are added to, or [0, 0] for none.
        out: [T, outputs], written to.
    """
    for t in range(out.shape[0]):
        row, target, scale = sums[t], out[t], row_scales[t]
        if added.shape[0] > 0:
            for n in range(target.shape[0]):
                target[n] = np.float32(np.int32(row[n] + added[n])) * scales[n] * scale
        else:
            for n in range(target.shape[0]):
                target[n] = np.float32(row[n]) * scales[n] * scale
        if bias.shape[0] > 0:
            for n in range(target.shape[0]):
                target[n] = target[n] + bias[n]
        if stream.shape[0] > 0:
            for n in range(target.shape[0]):
                target[n] = stream[t, n] + target[n]


@exact_kernel("void(f4[:,::1],f4[::1],i1[:,::1],f4[::1])")
def quantise_rows(x: Floats, fixed: Floats, codes: Bytes, scales: Floats) -> None:
    """See quantise."""
    quantise(x, fixed, codes, scales)


@exact_kernel("void(i4[:,::1],i4[::1],f4[::1],f4[::1],f4[::1],f4[:,::1],f4[:,::1])")
def dequantise_rows(
    sums: Sums,
    added: Sums,
    scales: Floats,
    row_scales: Floats,
    bias: Floats,
    stream: Floats,
    out: Floats,
) -> None:
    """See dequantise."""
    dequantise(sums, added, scales, row_scales, bias, stream, out)
