"""Hyper-connections, token by token."""

from __future__ import annotations

import numpy as np

from surefoot.backend.cpu.kernels.algebra import (
    Floats,
    accumulate,
    dot,
    exp,
    norm_row,
    sigmoid,
)
from surefoot.backend.cpu.kernels.compile import kernel, part

_ZERO = np.float32(0)
_ONE = np.float32(1)
_TWO = np.float32(2)


@part
def _normalise_rows(mixing: Floats, eps: np.float32) -> None:
    for j in range(mixing.shape[0]):
        total = _ZERO
        for k in range(mixing.shape[1]):
            total += mixing[j, k]
        for k in range(mixing.shape[1]):
            mixing[j, k] /= total + eps


@part
def _soften(mixing: Floats, eps: np.float32) -> None:
    """Each row becomes its softmax, plus eps."""
    for j in range(mixing.shape[0]):
        top = mixing[j, 0]
        for k in range(1, mixing.shape[1]):
            top = max(top, mixing[j, k])
        total = _ZERO
        for k in range(mixing.shape[1]):
            mixing[j, k] = exp(mixing[j, k] - top)
            total += mixing[j, k]
        for k in range(mixing.shape[1]):
            mixing[j, k] = mixing[j, k] / total + eps


@part
def _gate(
    x: Floats, base: Floats, scale: Floats, eps: np.float32, shares: Floats, factors: Floats
) -> None:
    n = shares.shape[0]
    for j in range(n):
        shares[j] = sigmoid(x[j] * scale[0] + base[j]) + eps
        factors[j] = _TWO * sigmoid(x[n + j] * scale[1] + base[n + j])


@part
def _mix(x: Floats, base: Floats, scale: np.float32, mixing: Floats) -> None:
    n = mixing.shape[0]
    for j in range(n):
        for k in range(n):
            mixing[j, k] = x[j * n + k] * scale + base[j * n + k]


@kernel(
    "void(f4[:,:,::1],f4[:,::1],f4[::1],f4[::1],i8,f4,f4[::1],f4,f4[:,::1],f4[:,::1],f4[:,:,::1])"
)
def enter_streams(
    streams: Floats,
    products: Floats,
    base: Floats,
    scale: Floats,
    rounds: int,
    eps: np.float32,
    norm: Floats,
    norm_eps: np.float32,
    out: Floats,
    factors: Floats,
    mixing: Floats,
) -> None:
    """See Backend.enter_streams.

    Args:
        streams: [T, n, d].
        products: [T, n (n + 2)].
        base: [n (n + 2)].
        scale: [3].
        rounds: of normalising.
        eps: in every denominator.
        norm: [d].
        norm_eps: of both norms.
        out: [T, d], written to.
        factors: [T, n], written to.
        mixing: [T, n, n], written to.
    """
    n, size = streams.shape[1], streams.shape[2]
    shares, x = np.empty(n, np.float32), np.empty(products.shape[1], np.float32)
    for token in range(streams.shape[0]):
        square = _ZERO
        for j in range(n):
            square += dot(streams[token, j], streams[token, j])
        factor = _ONE / np.sqrt(square / np.float32(n * size) + norm_eps)
        for i in range(x.shape[0]):
            x[i] = products[token, i] * factor
        _gate(x, base, scale, eps, shares, factors[token])
        own = mixing[token]
        _mix(x[2 * n :], base[2 * n :], scale[2], own)
        _soften(own, eps)
        _normalise_rows(own.T, eps)
        for _ in range(rounds - 1):
            _normalise_rows(own, eps)
            _normalise_rows(own.T, eps)
        target = out[token]
        target[:] = _ZERO
        accumulate(shares, streams[token], target)
        norm_row(target, norm, norm_eps)


@kernel("void(f4[:,:,::1],f4[:,::1],f4[:,::1])")
def read_streams(streams: Floats, shares: Floats, out: Floats) -> None:
    """See Backend.read_streams; out is [T, d]."""
    for token in range(streams.shape[0]):
        target = out[token]
        target[:] = _ZERO
        accumulate(shares[token], streams[token], target)


@part
def _times(x: Floats, factor: np.float32, out: Floats) -> None:
    for d in range(out.shape[0]):
        out[d] = factor * x[d]


@kernel("void(f4[:,:,::1],f4[:,::1],f4[:,::1],f4[:,:,::1],f4[:,:,::1])")
def write_streams(
    streams: Floats, out: Floats, factors: Floats, mixing: Floats, made: Floats
) -> None:
    """See Backend.write_streams; made is [T, n, d]."""
    n = streams.shape[1]
    column = np.empty(n, np.float32)
    for token in range(streams.shape[0]):
        for k in range(n):
            for j in range(n):
                column[j] = mixing[token, j, k]
            _times(out[token], factors[token, k], made[token, k])
            accumulate(column, streams[token], made[token, k])
