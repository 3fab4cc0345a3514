"""Hyper-connections, token by token."""

from __future__ import annotations

import numpy as np

from surefoot.backend.cpu.kernels.algebra import Floats, exp, sigmoid
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


@kernel("void(f4[:,::1],f4[::1],f4[::1],i8,f4,f4[:,::1],f4[:,::1],f4[:,:,::1])")
def gate_streams(
    x: Floats,
    base: Floats,
    scale: Floats,
    rounds: int,
    eps: np.float32,
    shares: Floats,
    factors: Floats,
    mixing: Floats,
) -> None:
    """See Backend.gate_streams.

    Args:
        x: [T, n (n + 2)].
        base: [n (n + 2)].
        scale: [3].
        rounds: of normalising.
        eps: in every denominator.
        shares: [T, n], written to.
        factors: [T, n], written to.
        mixing: [T, n, n], written to.
    """
    n = shares.shape[1]
    for token in range(x.shape[0]):
        for j in range(n):
            shares[token, j] = sigmoid(x[token, j] * scale[0] + base[j]) + eps
            factors[token, j] = _TWO * sigmoid(x[token, n + j] * scale[1] + base[n + j])
            for k in range(n):
                place = 2 * n + j * n + k
                mixing[token, j, k] = x[token, place] * scale[2] + base[place]
        own = mixing[token]
        _soften(own, eps)
        _normalise_rows(own.T, eps)
        for _ in range(rounds - 1):
            _normalise_rows(own, eps)
            _normalise_rows(own.T, eps)


@kernel("void(f4[:,:,::1],f4[:,::1],f4[:,::1])")
def read_streams(streams: Floats, shares: Floats, out: Floats) -> None:
    """See Backend.read_streams; out is [T, d]."""
    for token in range(streams.shape[0]):
        for d in range(out.shape[1]):
            total = _ZERO
            for j in range(streams.shape[1]):
                total += shares[token, j] * streams[token, j, d]
            out[token, d] = total


@kernel("void(f4[:,:,::1],f4[:,::1],f4[:,::1],f4[:,:,::1],f4[:,:,::1])")
def write_streams(
    streams: Floats, out: Floats, factors: Floats, mixing: Floats, made: Floats
) -> None:
    """See Backend.write_streams; made is [T, n, d]."""
    for token in range(streams.shape[0]):
        for k in range(streams.shape[1]):
            for d in range(out.shape[1]):
                total = factors[token, k] * out[token, d]
                for j in range(streams.shape[1]):
                    total += mixing[token, j, k] * streams[token, j, d]
                made[token, k, d] = total
