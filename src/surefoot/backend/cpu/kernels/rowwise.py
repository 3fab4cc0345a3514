"""Norms, gates and rotations: each row or head by itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from surefoot.backend.cpu.kernels.algebra import (
    Floats,
    Integers,
    copy,
    norm_row,
    packed,
    rotate_row,
    sigmoid,
    silu,
)
from surefoot.backend.cpu.kernels.compile import kernel, part

Doubles = npt.NDArray[np.float64]

_ZERO = np.float32(0)
_ONE = np.float32(1)


@kernel("void(f4[:,:,:],f4[:,::1],f4,f4[:,:,::1])")
def rms_norm(x: Floats, weight: Floats, eps: np.float32, out: Floats) -> None:
    """See Backend.rms_norm.

    Args:
        x: [T, heads, n].
        weight: [heads, n], or [1, n] for all heads.
        eps: added to the mean square.
        out: [T, heads, n].
    """
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            target = out[t, h]
            copy(packed(x[t, h]), target)
            norm_row(target, weight[h % weight.shape[0]], eps)


@kernel("void(f4[:,::1],i8[::1],f4[:,::1])")
def pick_rows(table: Floats, places: Integers, out: Floats) -> None:
    """See Backend.pick_rows."""
    for i in range(places.shape[0]):
        place = places[i]
        assert 0 <= place < table.shape[0], "a row must be in the table"
        copy(table[place], out[i])


@kernel("void(i8[::1],f4[:,::1],f4[:,::1],f4[:,::1],f4,f4[:,:,::1])")
def join_tokens(
    tokens: Integers, table: Floats, states: Floats, norms: Floats, eps: np.float32, out: Floats
) -> None:
    """See Backend.join_tokens; out [T, 2, n]."""
    for t in range(tokens.shape[0]):
        token = tokens[t]
        assert 0 <= token < table.shape[0], "a token must have an embedding"
        copy(table[token], out[t, 0])
        copy(states[t], out[t, 1])
        norm_row(out[t, 0], norms[0], eps)
        norm_row(out[t, 1], norms[1], eps)


@kernel("void(f4[:,:,:],f4[:,:,:],f4[::1],f4,f4[:,:,::1])")
def gated_norm(x: Floats, gate: Floats, weight: Floats, eps: np.float32, out: Floats) -> None:
    """See Backend.gated_norm; x, gate and out are [T, heads, n], weight [n]."""
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            target, opening = out[t, h], packed(gate[t, h])
            copy(packed(x[t, h]), target)
            norm_row(target, weight, eps)
            for d in range(target.shape[0]):
                target[d] = target[d] * silu(opening[d])


@kernel("void(f4[:,:],f4[:,:],f4[:,::1])")
def gate(x: Floats, opening: Floats, out: Floats) -> None:
    """See Backend.gate; x and out [T, n], the gate [T, n] or [T, 1]."""
    for t in range(x.shape[0]):
        row, target = packed(x[t]), out[t]
        if opening.shape[1] == 1:
            factor = sigmoid(opening[t, 0])
            for d in range(row.shape[0]):
                target[d] = row[d] * factor
        else:
            openings = packed(opening[t])
            for d in range(row.shape[0]):
                target[d] = row[d] * sigmoid(openings[d])


@kernel("void(f4[:,:,:],f4[:,:],f4[:,:],f4[:,:,::1])")
def rotary(x: Floats, cos: Floats, sin: Floats, out: Floats) -> None:
    """See Backend.rotary; x and out [T, heads, D], cos and sin [T, D]."""
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            copy(x[t, h], out[t, h])
            rotate_row(out[t, h], cos[t], sin[t])


@kernel("void(f4[:,:],f4[:,:],f4[::1],f4[::1],f4[:,::1],f4[:,::1])")
def delta_gates(
    a: Floats, b: Floats, a_log: Floats, dt_bias: Floats, decay: Floats, beta: Floats
) -> None:
    """See Backend.delta_gates; a, b, decay and beta [T, Hv]."""
    for t in range(a.shape[0]):
        for h in range(a.shape[1]):
            x = a[t, h] + dt_bias[h]
            above = x if x > _ZERO or x != x else _ZERO
            decay[t, h] = -np.exp(a_log[h]) * (np.log1p(np.exp(-np.abs(x))) + above)
            beta[t, h] = sigmoid(b[t, h])


@part
def _add_product(x: Floats, weight: Floats, out: Floats) -> None:
    for d in range(out.shape[0]):
        out[d] = out[d] + x[d] * weight[d]


@kernel("void(f4[:,:],f4[:,:,::1],f4[:,::1],i8[:,::1],f4[:,::1])")
def causal_conv(x: Floats, ring: Floats, taps: Floats, rows: Integers, out: Floats) -> None:
    """See RowOperators.causal_conv.

    Args:
        x: [T, C].
        ring: [slots, capacity, C].
        taps: [K, C], the last one meets the token itself.
        rows: as for window_attention.
        out: [T, C].
    """
    before, capacity = taps.shape[0] - 1, ring.shape[1]
    for row in range(rows.shape[0]):
        start, count, first, _, slot = rows[row]
        for i in range(count):
            target = out[start + i]
            target[:] = _ZERO
            for tap in range(taps.shape[0]):
                position, weight = first + i - before + tap, taps[tap]
                if position >= first:
                    _add_product(packed(x[start + position - first]), weight, target)
                elif position >= 0:
                    _add_product(ring[slot, position % capacity], weight, target)
            for d in range(target.shape[0]):
                target[d] = silu(target[d])


@kernel("void(f4[:,:],i8[::1])")
def clean(entries: Floats, tokens: Integers) -> None:
    """See Backend.clean; entries [T, n], tokens [m]."""
    for i in range(tokens.shape[0]):
        row = entries[tokens[i]]
        for d in range(row.shape[0]):
            if not np.isfinite(row[d]):
                row[d] = _ZERO


@kernel("void(i8[::1],f8[::1],f8,f4[:,:,::1])")
def angles(positions: Integers, frequencies: Doubles, factor: float, both: Floats) -> None:
    """See Backend.angles; positions [T], frequencies [n], cos and sin in both [2, T, D]."""
    turning, half = frequencies.shape[0], both.shape[2] // 2
    for t in range(positions.shape[0]):
        cos, sin = both[0, t], both[1, t]
        for i in range(turning):
            angle = np.float64(positions[t]) * frequencies[i]
            c, s = np.float32(np.cos(angle) * factor), np.float32(np.sin(angle) * factor)
            cos[i], cos[half + i] = c, c
            sin[i], sin[half + i] = -s, s
        for i in range(turning, half):
            cos[i], cos[half + i] = _ONE, _ONE
            sin[i], sin[half + i] = _ZERO, _ZERO
