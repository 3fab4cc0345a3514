"""Softmax attention over pages and rings.

A tile is some tokens of one row with the G query heads that share a key head; query i of a tile is
head i % G of token i // G. The scores of a tile are computed first, then each query's weights, then
the weighted values key by key. Keys that a query does not see get the weight zero: they change
nothing, so a query's bits do not depend on its tile.
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
from surefoot.backend.cpu.kernels.threads import on_threads

_ZERO = np.float32(0)
_ONE = np.float32(1)
_TILE_TOKENS = 16
_TILE_SCORES = 1 << 16  # that stay in cache


@part
def _tile_tokens(group: int, keys: int) -> int:
    return max(1, min(_TILE_TOKENS, _TILE_SCORES // (group * max(keys, 1))))


@part
def _take_queries(
    q: Floats, token: int, head: int, group: int, scale: np.float32, tile: Floats
) -> None:
    """Scaled queries of tokens from `token` on and of `group` query heads from `head` on."""
    for i in range(tile.shape[0]):
        source, target = q[token + i // group, head + i % group], tile[i]
        for d in range(target.shape[0]):
            target[d] = source[d] * scale


@part
def _score(tile: Floats, keys: Floats, scores: Floats, at: int) -> None:
    """Scores of a tile and some keys, put from column `at` on."""
    for j in range(keys.shape[0]):
        key = keys[j]
        for i in range(tile.shape[0]):
            scores[i, at + j] = dot(tile[i], key)


@part
def _weigh(scores: Floats, start: int, stop: int) -> np.float32:
    """Make scores[start:stop] weights, whose sum is returned, and the others zero."""
    top = greatest(scores, start, stop)
    for j in range(start):
        scores[j] = _ZERO
    for j in range(start, stop):
        scores[j] = exp(scores[j] - top)
    for j in range(stop, scores.shape[0]):
        scores[j] = _ZERO
    return sum_of(scores[start:stop])


@part
def _add_values(weights: Floats, at: int, values: Floats, sums: Floats) -> None:
    """Add values with the weights from column `at` on; queries go in pairs."""
    stop = at + values.shape[0]
    for i in range(0, sums.shape[0], 2):
        accumulate_two(weights[i, at:stop], weights[i + 1, at:stop], values, sums[i : i + 2])


@part
def _weigh_tile(
    scores: Floats, group: int, position: int, least: int, window: int, low: int
) -> Floats:
    """Turn the scores of a tile into weights.

    Args:
        scores: [queries, keys].
        group: queries of one token.
        position: of the first token.
        least: positions below are not seen,
        window: nor those further back.
        low: position of the first key.

    Returns:
        [queries] sums of the weights.
    """
    totals = np.ones(scores.shape[0], np.float32)
    for i in range(scores.shape[0]):
        after = position + i // group + 1
        totals[i] = _weigh(scores[i], max(least, after - window) - low, after - low)
    return totals


@part
def _put_outputs(
    sums: Floats, totals: Floats, group: int, token: int, head: int, out: Floats
) -> None:
    """Divide by the sums of weights; outputs go to tokens from `token` on, from `head` on."""
    for i in range(totals.shape[0]):
        source, target = sums[i], out[token + i // group, head + i % group]
        factor = _ONE / totals[i]
        for d in range(target.shape[0]):
            target[d] = source[d] * factor


@part
def _page(pool: Floats, pages: Integers, head: int, low: int, high: int) -> Floats:
    """Entries of positions low to high, which lie in one page: [n, D]."""
    page_tokens = pool.shape[2]
    page = low // page_tokens
    entries: Floats = pool[pages[page], head]
    return entries[low - page * page_tokens : high - page * page_tokens]


@part
def _attend_row(
    q: Floats,
    pools: tuple[Floats, Floats],
    scale: np.float32,
    row: Integers,
    pages: Integers,
    head: int,
    out: Floats,
) -> None:
    """All tokens of a row, for one key head."""
    k_pool, v_pool = pools
    page_tokens, size = k_pool.shape[2], k_pool.shape[3]
    start, count, first, least, begins = row
    group, table = q.shape[1] // k_pool.shape[1], pages[begins:]
    step = _tile_tokens(group, first + count - least)
    for begin in range(0, count, step):
        tokens = min(step, count - begin)
        queries, token, stop = tokens * group, start + begin, first + begin + tokens
        even = (queries + 1) // 2 * 2
        tile = np.zeros((even, size), np.float32)
        scores = np.zeros((even, stop - least), np.float32)
        _take_queries(q, token, head * group, group, scale, tile[:queries])
        low = least
        while low < stop:
            high = min((low // page_tokens + 1) * page_tokens, stop)
            keys = _page(k_pool, table, head, low, high)
            _score(tile[:queries], keys, scores, low - least)
            low = high
        totals = _weigh_tile(scores[:queries], group, first + begin, least, stop, least)
        sums = np.zeros((even, size), np.float32)
        low = least
        while low < stop:
            high = min((low // page_tokens + 1) * page_tokens, stop)
            values = _page(v_pool, table, head, low, high)
            _add_values(scores, low - least, values, sums)
            low = high
        _put_outputs(sums, totals, group, token, head * group, out)


@part
def _attend(
    q: Floats,
    k_pool: Floats,
    v_pool: Floats,
    scale: np.float32,
    rows: Integers,
    pages: Integers,
    out: Floats,
    number: int,
    parts: int,
) -> None:
    """Some rows and key heads: all those of a part."""
    heads = k_pool.shape[1]
    for place in range(number, rows.shape[0] * heads, parts):
        row, head = place // heads, place % heads
        _attend_row(q, (k_pool, v_pool), scale, rows[row], pages, head, out)


@kernel("void(f4[:,:,::1],f4[:,:,:,::1],f4[:,:,:,::1],f4,i8[:,::1],i8[::1],f4[:,:,::1],i8)")
def paged_attention(
    q: Floats,
    k_pool: Floats,
    v_pool: Floats,
    scale: np.float32,
    rows: Integers,
    pages: Integers,
    out: Floats,
    threads: int,
) -> None:
    """See RowOperators.paged_attention.

    Args:
        q: [T, H, D].
        k_pool: [pages, K, P, D].
        v_pool: the same.
        scale: factor on the scores.
        rows: [R, 5] index of the first token, tokens, first position, least visible position, and
            where the row's table starts in `pages`.
        pages: the page tables one after the other.
        out: [T, H, D].
        threads: how many share the work.
    """
    on_threads(_attend, threads, (q, k_pool, v_pool, scale, rows, pages, out))


@part
def _place(
    x: Floats, norms: Floats, eps: np.float32, cos: Floats, sin: Floats, out: Floats
) -> None:
    """Norm a head [D] if there are weights, norms [D] or [0], and rotate it."""
    copy(x, out)
    if norms.shape[0]:
        norm_row(out, norms, eps)
    rotate_row(out, cos, sin)


@kernel(
    "void(f4[:,:,:],f4[:,:,:],f4[:,::1],f4,f4[:,::1],f4[:,::1],f4[:,:,:,::1],f4[:,:,:,::1],f4,"
    "i8[:,::1],i8[::1],f4[:,:,::1],i8)"
)
def attend_pages(
    q_and_k: Floats,
    v: Floats,
    norms: Floats,
    eps: np.float32,
    cos: Floats,
    sin: Floats,
    k_pool: Floats,
    v_pool: Floats,
    scale: np.float32,
    rows: Integers,
    pages: Integers,
    out: Floats,
    threads: int,
) -> None:
    """See RowOperators.attend_pages.

    Args:
        q_and_k: [T, H + K, D].
        v: [T, K, D].
        norms: [H + K, D], or [H + K, 0] for no norm.
        eps: of the norm.
        cos: [T, D].
        sin: [T, D].
        k_pool: [pages, K, P, D].
        v_pool: the same.
        scale: factor on the scores.
        rows: as for paged_attention.
        pages: the page tables one after the other.
        out: [T, H, D].
        threads: how many share the work.
    """
    heads, page_tokens = out.shape[1], k_pool.shape[2]
    q = np.empty(out.shape, np.float32)
    for row in range(rows.shape[0]):
        start, count, first, _, begins = rows[row]
        for i in range(count):
            token, position = start + i, first + i
            page, column = pages[begins + position // page_tokens], position % page_tokens
            for head in range(heads):
                source, target = q_and_k[token, head], q[token, head]
                _place(source, norms[head], eps, cos[token], sin[token], target)
            for head in range(k_pool.shape[1]):
                source, target = q_and_k[token, heads + head], k_pool[page, head, column]
                _place(source, norms[heads + head], eps, cos[token], sin[token], target)
                copy(v[token, head], v_pool[page, head, column])
    on_threads(_attend, threads, (q, k_pool, v_pool, scale, rows, pages, out))


@part
def _gather(ring: Floats, own: Floats, row: Integers, head: int, low: int, entries: Floats) -> None:
    """Entries of positions from `low` on, of the ring up to the row's first, then of the step."""
    start, _, first, _, slot = row
    for j in range(entries.shape[0]):
        position = low + j
        if position < first:
            source = ring[slot, position % ring.shape[1], head]
        else:
            source = own[start + position - first, head]
        copy(source, entries[j])


@kernel(
    "void(f4[:,:,::1],f4[:,:,::1],f4[:,:,::1],f4[:,:,:,::1],f4[:,:,:,::1],i8,f4,i8[:,::1],"
    "f4[:,:,::1])"
)
def window_attention(
    q: Floats,
    k: Floats,
    v: Floats,
    k_ring: Floats,
    v_ring: Floats,
    window: int,
    scale: np.float32,
    rows: Integers,
    out: Floats,
) -> None:
    """See RowOperators.window_attention.

    Args:
        q: [T, H, D].
        k: [T, K, D].
        v: the same.
        k_ring: [slots, capacity, K, D].
        v_ring: the same.
        window: positions each token sees.
        scale: factor on the scores.
        rows: [R, 5] index of the first token, tokens, first position, least visible position, slot.
        out: [T, H, D].
    """
    heads, size = k.shape[1], k.shape[2]
    group = q.shape[1] // heads
    for row in range(rows.shape[0]):
        start, count, first, least, _ = rows[row]
        step = _tile_tokens(group, min(window + _TILE_TOKENS, first + count))
        for begin in range(0, count, step):
            tokens = min(step, count - begin)
            queries, token, stop = tokens * group, start + begin, first + begin + tokens
            even, low = (queries + 1) // 2 * 2, max(least, first + begin + 1 - window)
            tile = np.zeros((even, size), np.float32)
            scores = np.zeros((even, stop - low), np.float32)
            entries = np.empty((stop - low, size), np.float32)
            for head in range(heads):
                _take_queries(q, token, head * group, group, scale, tile[:queries])
                _gather(k_ring, k, rows[row], head, low, entries)
                _score(tile[:queries], entries, scores, 0)
                position = first + begin
                totals = _weigh_tile(scores[:queries], group, position, least, window, low)
                _gather(v_ring, v, rows[row], head, low, entries)
                sums = np.zeros((even, size), np.float32)
                _add_values(scores, 0, entries, sums)
                _put_outputs(sums, totals, group, token, head * group, out)
