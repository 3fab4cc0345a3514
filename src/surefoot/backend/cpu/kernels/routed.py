"""Experts: who takes which token, and what happens between their products."""

from __future__ import annotations

import numpy as np

from surefoot.backend.cpu.kernels.algebra import Floats, Integers, copy, gate_row, packed
from surefoot.backend.cpu.kernels.compile import kernel, part
from surefoot.backend.operands import LEAST_SUM

_ZERO = np.float32(0)
_ONE = np.float32(1)
_LEAST_SUM = np.float32(LEAST_SUM)


@part
def _sqrt_softplus(x: np.float32) -> np.float32:
    above = x if x > _ZERO or x != x else _ZERO
    return np.float32(np.sqrt(np.log1p(np.exp(-np.abs(x))) + above))


@kernel("void(f4[:,:],f4[::1],i8[:,::1])")
def choose_experts(scores: Floats, bias: Floats, choice: Integers) -> None:
    """See Backend.choose_experts; scores [T, E], bias [E], choice [T, n]."""
    count = bias.shape[0]
    worth = np.empty(count, np.float32)
    free = np.empty(count, np.bool_)
    for token in range(choice.shape[0]):
        for expert in range(count):
            worth[expert] = _sqrt_softplus(scores[token, expert]) + bias[expert]
            free[expert] = True
        for place in range(choice.shape[1]):
            best = -1
            for expert in range(count):
                # A NaN is above all numbers, as it is where they are sorted.
                if free[expert] and (
                    best < 0
                    or worth[expert] > worth[best]
                    or (worth[expert] != worth[expert] and worth[best] == worth[best])
                ):
                    best = expert
            choice[token, place] = best
            free[best] = False


@kernel("void(f4[:,:],i8[:,:],f4,f4[:,::1])")
def weigh_experts(scores: Floats, choice: Integers, scale: np.float32, weights: Floats) -> None:
    """See Backend.weigh_experts; scores [T, E], choice and weights [T, n]."""
    for token in range(choice.shape[0]):
        total = _ZERO
        for place in range(choice.shape[1]):
            weight = _sqrt_softplus(scores[token, choice[token, place]])
            weights[token, place] = weight
            total += weight
        total += _LEAST_SUM
        for place in range(choice.shape[1]):
            weights[token, place] = weights[token, place] / total * scale


@kernel("void(f4[:,:],i8[:,:],i8[::1],i8[:,::1],f4[:,::1])")
def enter_experts(
    x: Floats, choice: Integers, ends: Integers, places: Integers, entering: Floats
) -> None:
    """Bring the tokens of each expert together, in their order.

    Args:
        x: [T, hidden].
        choice: [T, n]; -1 stands for no expert.
        ends: [E + 1], written to: where each expert's tokens end among the entering ones; the
            first is 0, behind which they all begin.
        places: [T, n], written to: where a token stands among the entering ones, or -1.
        entering: [T * n, hidden], of which the first ends[E] are written to.
    """
    ends[:] = 0
    for token in range(choice.shape[0]):
        for place in range(choice.shape[1]):
            if choice[token, place] >= 0:
                ends[choice[token, place] + 1] += 1
    for expert in range(1, ends.shape[0]):
        ends[expert] += ends[expert - 1]
    following = ends.copy()
    for token in range(choice.shape[0]):
        for place in range(choice.shape[1]):
            expert = choice[token, place]
            places[token, place] = -1
            if expert >= 0:
                row = following[expert]
                places[token, place] = row
                copy(x[token], entering[row])
                following[expert] += 1


@kernel("void(f4[:,:],f4,f4[:,::1])")
def limited_gate(both: Floats, limit: np.float32, out: Floats) -> None:
    """silu(gate) * up of [T, 2 I], with both cut off at the limit; see Backend.pack_gated."""
    width = out.shape[1]
    for t in range(out.shape[0]):
        row = packed(both[t])
        gate_row(row[:width], row[width:], limit, out[t])


@kernel("void(f4[:,:],i8[:,:],f4[:,:],f4[:,::1])")
def leave_experts(products: Floats, places: Integers, weights: Floats, out: Floats) -> None:
    """Weighted sums of what the experts put out, in order of choice.

    Args:
        products: [entering tokens, hidden].
        places: [T, n], as `enter_experts` made them.
        weights: [T, n].
        out: [T, hidden], written to.
    """
    for token in range(places.shape[0]):
        target = out[token]
        target[:] = _ZERO
        for place in range(places.shape[1]):
            row = places[token, place]
            if row >= 0:
                _add_scaled(products[row], weights[token, place], target)


@part
def _add_scaled(x: Floats, factor: np.float32, out: Floats) -> None:
    for d in range(out.shape[0]):
        out[d] = out[d] + factor * x[d]
