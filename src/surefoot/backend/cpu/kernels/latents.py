"""Compressed entries, the choice among them, and attention over them and a window.

A token's keys are its window, which is laid out first, and the entries it looks at, which are read
where they lie: what a step needs besides its tensors hardly grows with the context.
"""

from __future__ import annotations

import numpy as np

from surefoot.backend.cpu.kernels.algebra import (
    Floats,
    Integers,
    accumulate,
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
from surefoot.backend.cpu.kernels.placed import accumulate_placed, find

_ZERO = np.float32(0)
_ONE = np.float32(1)
_LOWEST = np.float32(-np.inf)


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
def _keep_best(scores: Floats, numbers: Integers, count: int) -> tuple[int, np.float32]:
    """Move the `count` best of some candidates to the front.

    They come in the order of their numbers and stay in it; the lowest is the best among equals.

    Returns:
        How many were kept, `count` if all scores are numbers, and the least of their scores.
    """
    rank = scores.shape[0] - count
    least = np.partition(scores, rank)[rank]
    equal, kept = count, 0
    for i in range(scores.shape[0]):
        equal -= scores[i] > least
    for i in range(scores.shape[0]):
        if scores[i] > least or (scores[i] == least and equal > 0):
            equal -= scores[i] == least
            scores[kept], numbers[kept] = scores[i], numbers[i]
            kept += 1
    return kept, least


@part
def _score_page(
    q: Floats, weights: Floats, page: Floats, columns: Floats, fits: Floats, scores: Floats
) -> None:
    """Scores of a page's entries, all at once: sums over heads of weight * max(q . key, 0).

    Args:
        q: [H, D].
        weights: [H].
        page: [P / ratio, D]; what nobody has written yet gives a score that means nothing.
        columns: [D, P / ratio], written to: the page turned.
        fits: [P / ratio], written to.
        scores: [P / ratio], written to.
    """
    for j in range(page.shape[0]):
        for d in range(page.shape[1]):
            columns[d, j] = page[j, d]
    scores[:] = _ZERO
    for head in range(q.shape[0]):
        fits[:] = _ZERO
        accumulate(q[head], columns, fits)
        weight = weights[head]
        for j in range(scores.shape[0]):
            scores[j] = scores[j] + weight * max(fits[j], _ZERO)


@part
def _choose(
    q: Floats,
    weights: Floats,
    pool: Floats,
    table: Integers,
    low: int,
    seen: int,
    scores: Floats,
    numbers: Integers,
) -> None:
    """Put the best of some entries, half as many as there is room for, to the front.

    Entries are scored page by page. One that is better than the least of the best so far is a
    candidate, and when there is no room for more, the worse half of them goes. So most entries cost
    one comparison, and the room does not grow with the context.

    Args:
        q: [H, D].
        weights: [H].
        pool: [pages, P / ratio, D].
        table: of the row.
        low: the first entry,
        seen: and the one behind the last; more than half as many as there is room for.
        scores: [room] of the candidates.
        numbers: [room] of the candidates.
    """
    share, count = pool.shape[1], scores.shape[0] // 2
    columns = np.empty((pool.shape[2], share), np.float32)
    fits, whole = np.empty(share, np.float32), np.empty(share, np.float32)
    held, least = 0, _LOWEST
    for begin in range(low // share * share, seen, share):
        _score_page(q, weights, pool[table[begin // share]], columns, fits, whole)
        for offset in range(max(0, low - begin), min(share, seen - begin)):
            score = whole[offset]
            if held < count or score > least:
                scores[held], numbers[held] = score, begin + offset
                held += 1
                if held == scores.shape[0]:
                    held, least = _keep_best(scores, numbers, count)
    if held > count:
        _keep_best(scores[:held], numbers[:held], count)


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
        chosen: [T, n], written to.
    """
    most = chosen.shape[1]
    scores, numbers = np.empty(2 * most, np.float32), np.empty(2 * most, np.int64)
    for row in range(tables.shape[0]):
        start, count, first, least, begins = tables[row]
        table, low = pages[begins:], (least + ratio - 1) // ratio
        for i in range(count):
            token, seen = start + i, (first + i + 1) // ratio
            if seen - low > most:
                _choose(q[token], weights[token], pool, table, low, seen, scores, numbers)
            for place in range(most):
                if seen - low > most:
                    chosen[token, place] = numbers[place]
                else:
                    chosen[token, place] = low + place if low + place < seen else -1


@part
def _lay_out(own: Floats, ring: Floats, row: Integers, low: int, keys: Floats) -> None:
    """Keys of positions from `low` on, as many as there is room for."""
    for j in range(keys.shape[0]):
        copy(_raw(own, ring, row, low + j), keys[j])


@part
def _weigh(
    query: Floats, keys: Floats, entries: Floats, places: Integers, sink: np.float32, scores: Floats
) -> np.float32:
    """Turn the scores of a query [D] with keys, and then with entries, into weights; their sum."""
    held, count = keys.shape[0], keys.shape[0] + places.shape[0]
    for j in range(held):
        scores[j] = dot(query, keys[j])
    for j in range(held, count):
        scores[j] = dot(query, entries[places[j - held]])
    top = max(greatest(scores, 0, count), sink)
    for j in range(count):
        scores[j] = exp(scores[j] - top)
    return np.float32(sum_of(scores[:count]) + exp(sink - top))


@part
def _attend(
    q: Floats,
    keys: Floats,
    entries: Floats,
    places: Integers,
    sinks: Floats,
    scale: np.float32,
    scores: Floats,
    out: Floats,
) -> None:
    """Attention of one token.

    Args:
        q: [H, D].
        keys: [n, D] of the window.
        entries: [pages * P / ratio, D] of all pages.
        places: [m] where those lie that are looked at.
        sinks: [H].
        scale: factor on the other scores.
        scores: [2, n + m] or longer, written to.
        out: [H, D].
    """
    heads, held, count = q.shape[0], keys.shape[0], keys.shape[0] + places.shape[0]
    query = np.empty(q.shape[1], np.float32)
    sums = np.empty((2, q.shape[1]), np.float32)
    totals = np.empty(2, np.float32)
    for head in range(0, heads, 2):
        pair = min(2, heads - head)
        scores[1, :count] = _ZERO
        sums[:] = _ZERO
        for i in range(pair):
            for d in range(query.shape[0]):
                query[d] = q[head + i, d] * scale
            totals[i] = _weigh(query, keys, entries, places, sinks[head + i], scores[i])
        accumulate_two(scores[0, :held], scores[1, :held], keys, sums)
        accumulate_placed(scores[0, held:], scores[1, held:], entries, places, sums)
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
    entries = pool.reshape(pool.shape[0] * share, size)
    for row in range(slots.shape[0]):
        start, count, first, least, _ = slots[row]
        table = pages[tables[row, 4] :]
        most = (first + count) // ratio if ratio else 0
        some = chosen.shape[0] > 0
        if some:
            most = min(most, chosen.shape[1])
        keys = np.empty((min(window, first + count), size), np.float32)
        scores = np.empty((2, keys.shape[0] + most), np.float32)
        places = np.empty(most, np.int64)
        if not some:
            find(np.arange(most), table, share, places)
        for i in range(count):
            token, position = start + i, first + i
            low = max(least, position + 1 - window)
            held = position + 1 - low
            _lay_out(own, ring, slots[row], low, keys[:held])
            seen = min(most, (position + 1) // ratio) if ratio else 0
            if some:
                seen = find(chosen[token], table, share, places[:seen])
            _attend(q[token], keys[:held], entries, places[:seen], sinks, scale, scores, out[token])
