"""Compressed entries, the choice among them, and attention over them and a window.

A token's keys are laid out first: its window, then the entries it looks at. All heads read them.
"""

from __future__ import annotations

import numpy as np

from surefoot.backend.cpu.kernels.algebra import (
    Floats,
    Integers,
    accumulate_two,
    copy,
    dot,
    exp,
    greatest,
    norm_row,
    rotate_row,
    sum_of,
)
from surefoot.backend.cpu.kernels.compile import kernel, part

_ZERO = np.float32(0)
_ONE = np.float32(1)


@part
def _raw(raw: Floats, ring: Floats, row: Integers, position: int) -> Floats:
    """What a row has at a position: of the ring before its first token, else of the step."""
    start, _, first, _, slot = row
    if position < first:
        older: Floats = ring[slot, position % ring.shape[1]]
        return older
    own: Floats = raw[start + position - first]
    return own


@part
def _mix(values: Floats, scores: Floats, entry: Floats) -> None:
    """Entry [size] = values [n, size] weighted by the softmax of scores [n, size] over n."""
    for d in range(entry.shape[0]):
        top = scores[0, d]
        for j in range(1, scores.shape[0]):
            top = max(top, scores[j, d])
        total, mixed = _ZERO, _ZERO
        for j in range(scores.shape[0]):
            weight = exp(scores[j, d] - top)
            total += weight
            mixed += weight * values[j, d]
        entry[d] = mixed / total


@kernel(
    "void(f4[:,::1],f4[:,:,::1],f4[:,:,::1],i8,i8,f4[::1],f4,f4[:,::1],f4[:,::1],i8[:,::1],"
    "i8[:,::1],i8[::1])"
)
def compress(
    raw: Floats,
    ring: Floats,
    pool: Floats,
    ratio: int,
    halves: int,
    norm: Floats,
    eps: np.float32,
    cos: Floats,
    sin: Floats,
    slots: Integers,
    tables: Integers,
    pages: Integers,
) -> None:
    """See RowOperators.compress.

    Args:
        raw: [T, 2 * halves * size].
        ring: [slots, capacity, 2 * halves * size].
        pool: [pages, P / ratio, size].
        ratio: tokens of a window.
        halves: 2 where windows overlap, else 1.
        norm: [size].
        eps: of the norm.
        cos: [T, size].
        sin: [T, size].
        slots: [R, 5] index of the first token, tokens, first position, least visible one, slot.
        tables: [R, 5] the same, and where the row's table starts in `pages`.
        pages: the page tables one after the other.
    """
    size, share = norm.shape[0], pool.shape[1]
    width = halves * size
    values = np.empty((halves * ratio, size), np.float32)
    scores = np.empty((halves * ratio, size), np.float32)
    for row in range(slots.shape[0]):
        start, count, first = slots[row, 0], slots[row, 1], slots[row, 2]
        closing = first + ratio - 1 - first % ratio
        for position in range(closing, first + count, ratio):
            begin = position + 1 - ratio
            held = 0
            if halves == 2 and begin > 0:
                for j in range(ratio):
                    source = _raw(raw, ring, slots[row], begin - ratio + j)
                    copy(source[:size], values[j])
                    copy(source[width : width + size], scores[j])
                held = ratio
            own = width - size
            for j in range(ratio):
                source = _raw(raw, ring, slots[row], begin + j)
                copy(source[own : own + size], values[held + j])
                copy(source[width + own : 2 * width], scores[held + j])
            number, token = position // ratio, start + position - first
            entry = pool[pages[tables[row, 4] + number // share], number % share]
            _mix(values[: held + ratio], scores[: held + ratio], entry)
            norm_row(entry, norm, eps)
            rotate_row(entry, cos[token], sin[token])


@part
def _best(scores: Floats, chosen: Integers) -> None:
    """The indices of the greatest scores, the lowest among equals; ascending, then -1."""
    count, held = chosen.shape[0], 0
    if scores.shape[0] <= count:
        for index in range(scores.shape[0]):
            chosen[index] = index
        held = scores.shape[0]
    else:
        ordered = np.sort(scores)
        least = ordered[scores.shape[0] - count]
        equal = count
        for index in range(scores.shape[0]):
            equal -= scores[index] > least
        for index in range(scores.shape[0]):
            if scores[index] > least or (scores[index] == least and equal > 0):
                equal -= scores[index] == least
                chosen[held] = index
                held += 1
    for place in range(held, count):
        chosen[place] = -1


@kernel("void(f4[:,:,::1],f4[:,::1],f4[:,:,::1],i8,i8[:,::1],i8[::1],i8[:,::1])")
def choose_entries(
    q: Floats,
    weights: Floats,
    pool: Floats,
    ratio: int,
    tables: Integers,
    pages: Integers,
    chosen: Integers,
) -> None:
    """See RowOperators.choose_entries.

    Args:
        q: [T, H, D].
        weights: [T, H].
        pool: [pages, P / ratio, D].
        ratio: tokens of an entry.
        tables: see compress.
        pages: the page tables one after the other.
        chosen: [T, count], written to.
    """
    share = pool.shape[1]
    for row in range(tables.shape[0]):
        start, count, first, _, begins = tables[row]
        scores = np.empty((first + count) // ratio, np.float32)
        for i in range(count):
            token, seen = start + i, (first + i + 1) // ratio
            for number in range(seen):
                key = pool[pages[begins + number // share], number % share]
                total = _ZERO
                for head in range(q.shape[1]):
                    total += weights[token, head] * max(dot(q[token, head], key), _ZERO)
                scores[number] = total
            _best(scores[:seen], chosen[token])


@part
def _lay_out(own: Floats, ring: Floats, row: Integers, low: int, keys: Floats) -> None:
    """Keys of positions from `low` on, as many as there is room for."""
    for j in range(keys.shape[0]):
        copy(_raw(own, ring, row, low + j), keys[j])


@part
def _attend(
    q: Floats, keys: Floats, sinks: Floats, scale: np.float32, scores: Floats, out: Floats
) -> None:
    """Attention of one token: q [H, D], keys [n, D], scores [2, n], out [H, D]."""
    heads = q.shape[0]
    query = np.empty(q.shape[1], np.float32)
    sums = np.empty((2, q.shape[1]), np.float32)
    totals = np.empty(2, np.float32)
    for head in range(0, heads, 2):
        pair = min(2, heads - head)
        scores[1] = _ZERO
        sums[:] = _ZERO
        for i in range(pair):
            for d in range(query.shape[0]):
                query[d] = q[head + i, d] * scale
            for j in range(keys.shape[0]):
                scores[i, j] = dot(query, keys[j])
            top = max(greatest(scores[i], 0, keys.shape[0]), sinks[head + i])
            for j in range(keys.shape[0]):
                scores[i, j] = exp(scores[i, j] - top)
            totals[i] = sum_of(scores[i]) + exp(sinks[head + i] - top)
        accumulate_two(scores[0], scores[1], keys, sums)
        for i in range(pair):
            factor = _ONE / totals[i]
            for d in range(query.shape[0]):
                out[head + i, d] = sums[i, d] * factor


@kernel(
    "void(f4[:,:,::1],f4[:,::1],f4[:,:,::1],i8,f4[:,:,::1],i8,i8[:,::1],f4[::1],f4,i8[:,::1],"
    "i8[:,::1],i8[::1],f4[:,:,::1])"
)
def attend_latents(
    q: Floats,
    own: Floats,
    ring: Floats,
    window: int,
    pool: Floats,
    ratio: int,
    chosen: Integers,
    sinks: Floats,
    scale: np.float32,
    slots: Integers,
    tables: Integers,
    pages: Integers,
    out: Floats,
) -> None:
    """See RowOperators.attend_latents.

    Args:
        q: [T, H, D].
        own: [T, D].
        ring: [slots, capacity, D].
        window: positions each token sees.
        pool: [pages, P / ratio, D].
        ratio: tokens of an entry; 0 for no entries.
        chosen: [T, n], or [0, 0] for all entries that can be seen.
        sinks: [H].
        scale: factor on the scores.
        slots: see compress.
        tables: see compress.
        pages: the page tables one after the other.
        out: [T, H, D].
    """
    size, share = own.shape[1], pool.shape[1]
    for row in range(slots.shape[0]):
        start, count, first, least, _ = slots[row]
        begins = tables[row, 4]
        most = (first + count) // ratio if ratio else 0
        if chosen.shape[0]:
            most = min(most, chosen.shape[1])
        keys = np.empty((window + most, size), np.float32)
        scores = np.empty((2, window + most), np.float32)
        for i in range(count):
            token, position = start + i, first + i
            low = max(least, position + 1 - window)
            held = position + 1 - low
            _lay_out(own, ring, slots[row], low, keys[:held])
            seen = (position + 1) // ratio if ratio else 0
            if chosen.shape[0]:
                seen = min(seen, chosen.shape[1])
            for j in range(seen):
                number = chosen[token, j] if chosen.shape[0] else j
                if number >= 0:
                    copy(pool[pages[begins + number // share], number % share], keys[held])
                    held += 1
            _attend(q[token], keys[:held], sinks, scale, scores[:, :held], out[token])
