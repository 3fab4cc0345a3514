"""Entries of pages that are read where they lie."""

from __future__ import annotations

from surefoot.backend.cpu.kernels.algebra import Floats, Integers
from surefoot.backend.cpu.kernels.compile import part


@part
def find(numbers: Integers, table: Integers, share: int, places: Integers) -> int:
    """Where entries lie that are counted from the first one of all pages; how many there are."""
    found = 0
    for j in range(places.shape[0]):
        number = numbers[j]
        if number >= 0:
            places[found] = table[number // share] * share + number % share
            found += 1
    return found


@part
def accumulate_placed(a: Floats, b: Floats, entries: Floats, places: Integers, out: Floats) -> None:
    """See accumulate_two; row j is entries[places[j]]."""
    size, count = out.shape[1], places.shape[0]
    first, second = out[0], out[1]
    whole = count // 4 * 4
    for j in range(0, whole, 4):
        a0, a1, a2, a3 = a[j], a[j + 1], a[j + 2], a[j + 3]
        b0, b1, b2, b3 = b[j], b[j + 1], b[j + 2], b[j + 3]
        r0, r1 = entries[places[j]], entries[places[j + 1]]
        r2, r3 = entries[places[j + 2]], entries[places[j + 3]]
        for d in range(size):
            w, x, y, z = r0[d], r1[d], r2[d], r3[d]
            first[d] = first[d] + a0 * w + a1 * x + a2 * y + a3 * z
            second[d] = second[d] + b0 * w + b1 * x + b2 * y + b3 * z
    for j in range(whole, count):
        a0, b0, r0 = a[j], b[j], entries[places[j]]
        for d in range(size):
            first[d] = first[d] + a0 * r0[d]
            second[d] = second[d] + b0 * r0[d]
