"""Attention over chosen positions of latents, which are read where they lie."""

from __future__ import annotations

import numpy as np

from surefoot.backend.cpu.kernels.algebra import Floats, Integers, dot, exp, greatest, sum_of
from surefoot.backend.cpu.kernels.compile import kernel, part
from surefoot.backend.cpu.kernels.placed import accumulate_placed, find

_ZERO = np.float32(0)
_ONE = np.float32(1)


@part
def _scaled(source: Floats, scale: np.float32, target: Floats) -> None:
    for d in range(target.shape[0]):
        target[d] = source[d] * scale


@part
def _weigh(
    query: Floats,
    other: Floats,
    values: Floats,
    turned: Floats,
    places: Integers,
    scores: Floats,
) -> np.float32:
    """Turn the scores of a query, [R] and [dr], with the entries at `places` into weights.

    Returns:
        Their sum.
    """
    count = places.shape[0]
    for j in range(count):
        scores[j] = dot(query, values[places[j]]) + dot(other, turned[places[j]])
    top = greatest(scores, 0, count)
    for j in range(count):
        scores[j] = exp(scores[j] - top)
    return np.float32(sum_of(scores[:count]))


@part
def _attend(
    q: Floats,
    turned_q: Floats,
    values: Floats,
    turned: Floats,
    places: Integers,
    scale: np.float32,
    scores: Floats,
    out: Floats,
) -> None:
    """Attention of one token.

    Args:
        q: [H, R].
        turned_q: [H, dr].
        values: [pages * P, R] of all pages.
        turned: [pages * P, dr] of all pages.
        places: [n] where those lie that are looked at.
        scale: factor on the scores.
        scores: [2, n] or longer, written to.
        out: [H, R].
    """
    heads, count = q.shape[0], places.shape[0]
    query, other = np.empty(q.shape[1], np.float32), np.empty(turned_q.shape[1], np.float32)
    sums, totals = np.empty((2, q.shape[1]), np.float32), np.empty(2, np.float32)
    for head in range(0, heads, 2):
        pair = min(2, heads - head)
        scores[1, :count] = _ZERO
        sums[:] = _ZERO
        for i in range(pair):
            _scaled(q[head + i], scale, query)
            _scaled(turned_q[head + i], scale, other)
            totals[i] = _weigh(query, other, values, turned, places, scores[i])
        accumulate_placed(scores[0, :count], scores[1, :count], values, places, sums)
        for i in range(pair):
            _scaled(sums[i], _ONE / totals[i], out[head + i])


@kernel(
    "void(f4[:,:,::1],f4[:,:,::1],f4[:,:,::1],f4[:,:,::1],i8[:,:],b1,f4,i8[:,::1],i8[::1],"
    "f4[:,:,::1])"
)
def attend_chosen(
    q: Floats,
    turned_q: Floats,
    value_pool: Floats,
    turned_pool: Floats,
    chosen: Integers,
    everything: bool,
    scale: np.float32,
    rows: Integers,
    pages: Integers,
    out: Floats,
) -> None:
    """See RowOperators.attend_chosen.

    Args:
        q: [T, H, R].
        turned_q: [T, H, dr].
        value_pool: [pages, P, R].
        turned_pool: [pages, P, dr].
        chosen: [T, n] positions, or anything where everything is seen.
        everything: whether it is.
        scale: factor on the scores.
        rows: as for paged_attention.
        pages: the page tables one after the other.
        out: [T, H, R].
    """
    share = value_pool.shape[1]
    values = value_pool.reshape(value_pool.shape[0] * share, value_pool.shape[2])
    turned = turned_pool.reshape(turned_pool.shape[0] * share, turned_pool.shape[2])
    for row in range(rows.shape[0]):
        start, count, first, least, begins = rows[row]
        most = max(0, first + count - least) if everything else chosen.shape[1]
        places, scores = np.empty(most, np.int64), np.empty((2, most), np.float32)
        if everything:
            find(np.arange(least, first + count), pages[begins:], share, places)
        for i in range(count):
            token, seen = start + i, first + i + 1 - least
            if not everything:
                seen = find(chosen[token], pages[begins:], share, places)
            if seen == 0:
                out[token] = _ZERO
            else:
                _attend(
                    q[token],
                    turned_q[token],
                    values,
                    turned,
                    places[:seen],
                    scale,
                    scores,
                    out[token],
                )
