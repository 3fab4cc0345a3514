"""Random steps for operators: ragged rows, their pages and rings, and what must not be read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from surefoot.backend.operands import RowLayout

GARBAGE = 1e30
"""Stands past the cursor and below what is visible: finite, so that a weight of zero hides it."""

HEADS = ((4, 4), (4, 2), (9, 3), (16, 2))
SIZES = (8, 10, 16, 24, 64, 128)
PAGE_TOKENS = (4, 8, 16, 32, 64)

_ROW_LENGTHS = (range(1, 2), range(1, 2), range(2, 10), range(2, 10), range(10, 25), range(1))
_LONGEST_HISTORY = 80


@dataclass(frozen=True)
class Case:
    """One step and the sizes of its tensors.

    Attributes:
        layout: the rows.
        query_heads: H.
        key_heads: K.
        size: D.
        pages: rows of the paged pools, sink included.
        slots: rows of the rings, sink included.
        window: positions that each token of a window layer sees.
        capacity: columns of the rings.
        draws: source of the tensors' values.
    """

    layout: RowLayout
    query_heads: int
    key_heads: int
    size: int
    pages: int
    slots: int
    window: int
    capacity: int
    draws: torch.Generator

    @property
    def tokens(self) -> int:
        """T."""
        return self.layout.starts[-1]

    def queries(self) -> Tensor:
        """[T, H, D]."""
        return torch.randn(self.tokens, self.query_heads, self.size, generator=self.draws)

    def entries(self) -> Tensor:
        """[T, K, D]."""
        return torch.randn(self.tokens, self.key_heads, self.size, generator=self.draws)

    def pool(self) -> Tensor:
        """[pages, K, P, D]: history where the rows have it, garbage in the rest of their pages.

        All other pages, the sink among them, are NaN.
        """
        layout, size = self.layout, self.layout.page_tokens
        pool = torch.full((self.pages, self.key_heads, size, self.size), float("nan"))
        for table in layout.tables:
            pool[list(table)] = GARBAGE
        for row, first in enumerate(layout.first):
            for position in range(layout.visible_from[row], first):
                page, offset = divmod(position, size)
                shape = (self.key_heads, self.size)
                pool[layout.tables[row][page], :, offset] = torch.randn(shape, generator=self.draws)
        return pool

    def ring(self) -> Tensor:
        """[slots, capacity, K, D]: the window before each row, garbage in its other columns."""
        layout = self.layout
        shape = (self.slots, self.capacity, self.key_heads, self.size)
        ring = torch.full(shape, float("nan"))
        for row, first in enumerate(layout.first):
            slot = layout.slots[row]
            ring[slot] = GARBAGE
            start = max(0, first - self.window + 1, layout.visible_from[row])
            for position in range(start, first):
                ring[slot, position % self.capacity] = torch.randn(shape[2:], generator=self.draws)
        return ring


def case_of(seed: int) -> Case:
    """The case with this number; case 0 is the empty step."""
    rng = random.Random(seed)
    page_tokens = rng.choice(PAGE_TOKENS)
    count = rng.randint(1, 9) if seed else 0
    lengths = [rng.choice(rng.choice(_ROW_LENGTHS)) for _ in range(count)]
    first = [_first(rng, page_tokens) for _ in range(count)]
    shares = rng.random() < 0.3
    visible = [0 if shares else rng.choice((0, 0, rng.randint(0, start))) for start in first]
    tables, pages = _tables(rng, first, lengths, page_tokens, shares)
    heads = rng.choice(HEADS)
    window = rng.choice((1, 2, 8, page_tokens - 1, page_tokens, page_tokens + 1, 33))
    layout = RowLayout(
        starts=tuple(accumulate(lengths, initial=0)),
        first=tuple(first),
        tables=tuple(tables),
        slots=tuple(rng.sample(range(1, count + 3), count)),
        visible_from=tuple(visible),
        settled=tuple(first),
        settles=tuple(map(sum, zip(first, lengths, strict=True))),
        page_tokens=page_tokens,
    )
    return Case(
        layout=layout,
        query_heads=heads[0],
        key_heads=heads[1],
        size=rng.choice(SIZES),
        pages=pages,
        slots=count + 3,
        window=window,
        capacity=window + rng.choice((0, 3, 8)) + 1,
        draws=torch.Generator().manual_seed(seed),
    )


def _first(rng: random.Random, page_tokens: int) -> int:
    edges = [0, page_tokens - 1, page_tokens, 2 * page_tokens - 1, 2 * page_tokens]
    return min(rng.choice([*edges, rng.randint(0, 5 * page_tokens)]), _LONGEST_HISTORY)


def _tables(
    rng: random.Random,
    first: Sequence[int],
    lengths: Sequence[int],
    page_tokens: int,
    shares: bool,
) -> tuple[list[Sequence[int]], int]:
    """Page tables, in a run or scattered, some with a spare page or a shared beginning.

    Returns:
        The tables and the size of the pool.
    """
    needs = [
        -(-(start + length) // page_tokens) + rng.randint(0, 1)
        for start, length in zip(first, lengths, strict=True)
    ]
    total = sum(needs)
    ids = list(range(1, total + 4))
    if rng.random() < 0.5:
        rng.shuffle(ids)
    tables: list[Sequence[int]] = []
    for row, need in enumerate(needs):
        table, ids = ids[:need], ids[need:]
        if shares and row:
            other = rng.randrange(row)
            common = min(first[row], first[other]) // page_tokens
            table[:common] = tables[other][:common]
        tables.append(table)
    return tables, total + 4
