"""Writes of a step's entries into pages and rings."""

from __future__ import annotations

from surefoot.backend.cpu.kernels.algebra import Floats, Integers, copy
from surefoot.backend.cpu.kernels.compile import kernel


@kernel("void(f4[:,:,:,::1],f4[:,:,:],i8[:,::1],i8[::1])")
def paged_write(pool: Floats, entries: Floats, rows: Integers, pages: Integers) -> None:
    """See RowOperators.paged_write.

    Args:
        pool: [pages, heads, P, n].
        entries: [T, heads, n].
        rows: as for paged_attention.
        pages: the page tables one after the other.
    """
    page_tokens = pool.shape[2]
    for row in range(rows.shape[0]):
        start, count, first, _, table = rows[row]
        for i in range(count):
            page, place = pages[table + (first + i) // page_tokens], (first + i) % page_tokens
            for head in range(pool.shape[1]):
                copy(entries[start + i, head], pool[page, head, place])


@kernel("void(f4[:,:,::1],f4[:,:],i8[:,::1])")
def ring_write(ring: Floats, entries: Floats, rows: Integers) -> None:
    """See RowOperators.ring_write.

    Args:
        ring: [slots, capacity, n].
        entries: [T, n].
        rows: as for window_attention.
    """
    capacity = ring.shape[1]
    for row in range(rows.shape[0]):
        start, count, first, _, slot = rows[row]
        for i in range(max(0, count - capacity), count):
            copy(entries[start + i], ring[slot, (first + i) % capacity])
