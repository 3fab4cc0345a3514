"""The gated delta rule block by block, from a checkpoint that stands at a block's start.

With S the state at the start of a block, G the sums of the decays inside it, and for its i-th
position E its error and u what it writes, which the ring keeps:

    E_i = beta_i (v_i - exp(G_i) k_i S)
    u_i = E_i - sum over j < i of beta_i exp(G_i - G_j) (k_i k_j) u_j
    o_i = exp(G_i) q_i S + sum over j <= i of exp(G_i - G_j) (q_i k_j) u_j
    next state = exp(G_last) S + sum over all j of exp(G_last - G_j) k_j u_j

(section 3 of arXiv 2412.06464). Nothing of a position depends on those behind it, and sums go from
the block's start on, so a token's bits do not depend on the cut, and what a position wrote can be
kept: those before it stay as long as it does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from surefoot.backend.cpu.kernels.algebra import (
    Floats,
    Integers,
    accumulate,
    accumulate_two,
    copy,
    dot,
    exp,
    packed,
)
from surefoot.backend.cpu.kernels.compile import kernel, part
from surefoot.backend.cpu.kernels.threads import on_threads

_ZERO = np.float32(0)
_LEAST_DECAY = np.float32(-46)  # e^-46 is 1e-20
_LEAST_NUMBER = np.float32(1e-25)


class Tokens(NamedTuple):
    """The step's inputs and outputs, as DeltaInputs has them."""

    q: Floats
    k: Floats
    v: Floats
    decay: Floats
    beta: Floats
    out: Floats


class Rings(NamedTuple):
    """Earlier inputs, as DeltaCaches has them."""

    k: Floats
    written: Floats
    decay: Floats
    beta: Floats


class Block(NamedTuple):
    """What a head knows of the block at hand, and room to compute in.

    keys [B, dk], writes [B, dv] and sums [B] by position; pair [2, dk] a position's key and query,
    found [2, dv] its error and output; factors [B] and spread [dk, B]; state [dk, dv].
    """

    keys: Floats
    writes: Floats
    sums: Floats
    pair: Floats
    found: Floats
    factors: Floats
    spread: Floats
    state: Floats


@part
def _fade(decay: np.float32) -> np.float32:
    """e^decay, or zero where it is below all rounding.

    Together with `_unless_tiny` it keeps numbers so small that a processor is slow with them from
    ever arising; a few blocks of strong decay would fill a state with them.
    """
    return exp(decay) if decay > _LEAST_DECAY or decay != decay else _ZERO


@part
def _unless_tiny(x: np.float32) -> np.float32:
    """What a state keeps or is given, or zero where it is next to nothing."""
    return _ZERO if abs(x) < _LEAST_NUMBER else x


@part
def _recall(block: Block, i: int, rings: Rings, place: tuple[int, int, int, int]) -> None:
    """Position i of a block from the ring."""
    slot, column, key_head, head = place
    copy(rings.k[slot, column, key_head], block.keys[i])
    copy(rings.written[slot, column, head], block.writes[i])
    block.sums[i] = rings.decay[slot, column, head] + (block.sums[i - 1] if i else _ZERO)


@part
def _meet(block: Block, i: int, tokens: Tokens, place: tuple[int, int, int], state: Floats) -> None:
    """Position i of a block from the step: its error, and what the state adds to its output."""
    token, key_head, head = place
    key, query = block.pair[0], block.pair[1]
    error, output = block.found[0], block.found[1]
    copy(packed(tokens.k[token, key_head]), key)
    copy(packed(tokens.q[token, key_head]), query)
    copy(key, block.keys[i])
    block.sums[i] = tokens.decay[token, head] + (block.sums[i - 1] if i else _ZERO)
    block.found[:] = _ZERO
    accumulate_two(key, query, state, block.found)
    value = packed(tokens.v[token, head])
    fade, beta = _fade(block.sums[i]), tokens.beta[token, head]
    for d in range(error.shape[0]):
        error[d] = _unless_tiny(beta * (value[d] - fade * error[d]))
        output[d] = fade * output[d]
    copy(error, block.writes[i])


@part
def _write(block: Block, i: int, beta: np.float32) -> None:
    """Turn the error of position i into what it writes."""
    for j in range(i):
        near = _fade(block.sums[i] - block.sums[j]) * dot(block.keys[i], block.keys[j])
        block.factors[j] = -beta * near
    accumulate(block.factors[:i], block.writes, block.writes[i])


@part
def _answer(block: Block, i: int, out: Floats) -> None:
    """The output of position i, once it has written."""
    for j in range(i + 1):
        near = _fade(block.sums[i] - block.sums[j]) * dot(block.pair[1], block.keys[j])
        block.factors[j] = near
    accumulate(block.factors[: i + 1], block.writes, block.found[1])
    copy(block.found[1], out)


@part
def _move(block: Block, state: Floats) -> None:
    """Move a state over a whole block, in place."""
    count, size = block.keys.shape
    last = block.sums[count - 1]
    for j in range(count):
        share = _fade(last - block.sums[j])
        for d in range(size):
            block.spread[d, j] = block.keys[j, d] * share
    fade = _fade(last)
    for d in range(size):
        for e in range(state.shape[1]):
            state[d, e] = _unless_tiny(state[d, e] * fade)
    for d in range(0, size - 1, 2):
        accumulate_two(block.spread[d], block.spread[d + 1], block.writes, state[d : d + 2])
    if size % 2:
        accumulate(block.spread[size - 1], block.writes, state[size - 1])


@part
def _run_head(
    row: Integers, head: int, tokens: Tokens, rings: Rings, states: Floats, block: Block
) -> None:
    """All blocks of a row for one value head."""
    start, count, first, base, checkpoint, slot = row
    capacity, size, stop = rings.k.shape[1], block.keys.shape[0], first + count
    key_head, state = head // (states.shape[1] // rings.k.shape[2]), states[slot, head]
    tentative = False
    for begin in range(base, stop, size):
        end = min(begin + size, stop)
        for position in range(begin, end):
            i, column = position - begin, position % capacity
            if position < first:
                _recall(block, i, rings, (slot, column, key_head, head))
            else:
                token = start + position - first
                _meet(block, i, tokens, (token, key_head, head), state)
                _write(block, i, tokens.beta[token, head])
                if position >= stop - capacity:  # what this column held has been read
                    copy(block.writes[i], rings.written[slot, column, head])
                _answer(block, i, tokens.out[token, head])
        settles = end <= checkpoint
        if end < begin + size or not (settles or end < stop):
            break
        if not settles and not tentative:
            for d in range(state.shape[0]):
                copy(state[d], block.state[d])
            state, tentative = block.state, True
        _move(block, state)


@part
def _keep_inputs(row: Integers, tokens: Tokens, rings: Rings) -> None:
    """Put the last of a row's inputs into the ring."""
    start, count, first, _, _, slot = row
    capacity = rings.k.shape[1]
    for i in range(max(0, count - capacity), count):
        token, column = start + i, (first + i) % capacity
        for head in range(rings.k.shape[2]):
            copy(packed(tokens.k[token, head]), rings.k[slot, column, head])
        for head in range(rings.decay.shape[2]):
            rings.decay[slot, column, head] = tokens.decay[token, head]
            rings.beta[slot, column, head] = tokens.beta[token, head]


@part
def _run_heads(
    q: Floats,
    k: Floats,
    v: Floats,
    decay: Floats,
    beta: Floats,
    states: Floats,
    k_ring: Floats,
    written_ring: Floats,
    decay_ring: Floats,
    beta_ring: Floats,
    size: int,
    rows: Integers,
    out: Floats,
    number: int,
    parts: int,
) -> None:
    """Some rows and value heads, all those of a part; see `delta_rule`."""
    heads, key_size, value_size = states.shape[1], states.shape[2], states.shape[3]
    tokens = Tokens(q, k, v, decay, beta, out)
    rings = Rings(k_ring, written_ring, decay_ring, beta_ring)
    block = Block(
        np.empty((size, key_size), np.float32),
        np.empty((size, value_size), np.float32),
        np.empty(size, np.float32),
        np.empty((2, key_size), np.float32),
        np.empty((2, value_size), np.float32),
        np.empty(size, np.float32),
        np.empty((key_size, size), np.float32),
        np.empty((key_size, value_size), np.float32),
    )
    for place in range(number, rows.shape[0] * heads, parts):
        _run_head(rows[place // heads], place % heads, tokens, rings, states, block)


@kernel(
    "void(f4[:,:,:],f4[:,:,:],f4[:,:,:],f4[:,:],f4[:,:],f4[:,:,:,::1],f4[:,:,:,::1],"
    "f4[:,:,:,::1],f4[:,:,::1],f4[:,:,::1],i8,i8[:,::1],f4[:,:,::1],i8)"
)
def delta_rule(
    q: Floats,
    k: Floats,
    v: Floats,
    decay: Floats,
    beta: Floats,
    states: Floats,
    k_ring: Floats,
    written_ring: Floats,
    decay_ring: Floats,
    beta_ring: Floats,
    size: int,
    rows: Integers,
    out: Floats,
    threads: int,
) -> None:
    """See RowOperators.delta_rule; a row without tokens only moves its checkpoint.

    Args:
        q: [T, Hk, dk].
        k: [T, Hk, dk].
        v: [T, Hv, dv].
        decay: [T, Hv].
        beta: [T, Hv].
        states: [slots, Hv, dk, dv].
        k_ring: [slots, capacity, Hk, dk].
        written_ring: [slots, capacity, Hv, dv].
        decay_ring: [slots, capacity, Hv].
        beta_ring: [slots, capacity, Hv].
        size: B.
        rows: [R, 6] index of the first token, tokens, first position, where the checkpoint stands,
            where it stands afterwards, slot.
        out: [T, Hv, dv].
        threads: how many share the work.
    """
    arrays = (q, k, v, decay, beta, states, k_ring, written_ring, decay_ring, beta_ring)
    on_threads(_run_heads, threads, (*arrays, size, rows, out))
    tokens = Tokens(q, k, v, decay, beta, out)
    rings = Rings(k_ring, written_ring, decay_ring, beta_ring)
    for row in range(rows.shape[0]):
        _keep_inputs(rows[row], tokens, rings)
