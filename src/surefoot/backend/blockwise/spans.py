"""Where the keys of a tile group lie, and how scores and values travel between tiles and pages.

Attention works on pages without copying them if it can. `InOrder` has the pages tile by tile: a run
of the pool, or a copy. `Spanned` leaves them where they are in one stretch of the pool, whatever
their order, and moves the much smaller queries, scores and sums instead:

    tile 0 reads pages 7, 5       stretch 5..8      owner  0 1 0 1
    tile 1 reads pages 6, 8       take 2 0 1 3      give   1 2 0 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST_SHARE = 0.5


@dataclass(frozen=True)
class Span:
    """A stretch of the pool that holds the pages of a group, each read by one tile only.

    Attributes:
        first: its first page.
        count: its pages, those of others included.
        owner: [count] the tile that reads each page; any tile for pages of others.
        take: [tiles * blocks] place in the stretch of each block; the tile's own first if missing.
        give: [count] the block, counted over all tiles, that each page is.
        kept: [tiles * blocks, 1, 1, 1] float32, 0 for missing blocks and 1 for others.
        absent: the same shape, -inf for missing blocks and 0 for others.
        missing: whether there are missing blocks.
    """

    first: int
    count: int
    owner: Tensor
    take: Tensor
    give: Tensor
    kept: Tensor
    absent: Tensor
    missing: bool


def find_span(tables: Sequence[Sequence[int]], blocks: int, device: torch.device) -> Span | None:
    """The span of tiles that read these pages, each padded to `blocks`.

    Returns:
        None if pages are shared, or lie so far apart that using the stretch would be a waste.
    """
    pages = [page for table in tables for page in table]
    first, count = min(pages), max(pages) + 1 - min(pages)
    if len(set(pages)) != len(pages) or len(pages) < _LEAST_SHARE * count:
        return None
    owner, give = [0] * count, [0] * count
    take, kept = [0] * (len(tables) * blocks), [0.0] * (len(tables) * blocks)
    for tile, table in enumerate(tables):
        # A missing block is masked, so it has to be finite: the sink, for one, may not be.
        take[tile * blocks : (tile + 1) * blocks] = [table[0] - first] * blocks
        for block, page in enumerate(table):
            flat = tile * blocks + block
            owner[page - first], give[page - first] = tile, flat
            take[flat], kept[flat] = page - first, 1.0
    there = torch.tensor(kept, device=device).view(-1, 1, 1, 1)
    return Span(
        first=first,
        count=count,
        owner=torch.tensor(owner, device=device),
        take=torch.tensor(take, device=device),
        give=torch.tensor(give, device=device),
        kept=there,
        absent=there.log(),
        missing=len(pages) < len(take),
    )


@dataclass(frozen=True)
class InOrder:
    """Keys and values tile by tile.

    Attributes:
        k: [tiles * blocks * K, P, D] float32.
        v: the same.
        blocks: blocks of each tile.
    """

    k: Tensor
    v: Tensor
    blocks: int

    def spread(self, q: Tensor) -> Tensor:
        """Queries [tiles, K, R, D] for every page and head: [pages * K, R, D]."""
        return q.unsqueeze(1).expand(-1, self.blocks, -1, -1, -1).reshape(-1, *q.shape[2:])

    def scores(self, by_page: Tensor, heads: int) -> Tensor:
        """[pages * K, R, P] in the order of tiles and blocks: [tiles * blocks, K, R, P]."""
        return by_page.view(-1, heads, *by_page.shape[1:])

    def to_pages(self, by_block: Tensor) -> Tensor:
        """[tiles * blocks, K, R, n] in the order of pages: [pages * K, R, n]."""
        return by_block.reshape(-1, *by_block.shape[2:])

    def sums(self, by_page: Tensor, heads: int) -> Tensor:
        """[pages * K, R, D] likewise, with zeros for missing blocks."""
        return by_page.view(-1, heads, *by_page.shape[1:])


@dataclass(frozen=True)
class Spanned:
    """Keys and values where they are in the pool; see InOrder for the methods.

    Attributes:
        k: [pages * K, P, D] float32, the pages of the span.
        v: the same.
        blocks: blocks of each tile.
        span: who reads which of them.
    """

    k: Tensor
    v: Tensor
    blocks: int
    span: Span

    def spread(self, q: Tensor) -> Tensor:
        """See InOrder."""
        return q.index_select(0, self.span.owner).view(-1, *q.shape[2:])

    def scores(self, by_page: Tensor, heads: int) -> Tensor:
        """See InOrder; those of missing blocks are -inf."""
        scores = self._taken(by_page, heads)
        return scores.add_(self.span.absent) if self.span.missing else scores

    def to_pages(self, by_block: Tensor) -> Tensor:
        """See InOrder; pages of others get the weights of any block."""
        return by_block.index_select(0, self.span.give).view(-1, *by_block.shape[2:])

    def sums(self, by_page: Tensor, heads: int) -> Tensor:
        """See InOrder."""
        values = self._taken(by_page, heads)
        return values.mul_(self.span.kept) if self.span.missing else values

    def _taken(self, by_page: Tensor, heads: int) -> Tensor:
        return by_page.view(-1, heads, *by_page.shape[1:]).index_select(0, self.span.take)


Blocks = InOrder | Spanned
