"""Attention over pages and rings in batched products, whose bits do not depend on the cut.

Scores and weighted values are computed page by page (one small product per page and head, all in
one batched call), the row maximum is exact, and the pages' sums are added in a tree over absolute
page numbers. Pages that a token does not see add exact zeros, so neither the number of pages read
nor the other rows of the step can change a result. The products themselves keep a row's bits from
some least number of query rows on; `least_tile_width` measures it for the shape at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.blockwise.tiles import TILE_TOKENS, PageGroup, TileGroup, group_pages
from surefoot.backend.blockwise.window import RingShape, WindowGroup, group_windows
from surefoot.backend.protocol import RowLayout

SAFE_QUERY_ROWS = 16


@dataclass(frozen=True)
class ProductShape:
    """What decides which kernel a batched product takes.

    Attributes:
        key_heads: K.
        group: query heads per key head.
        size: D.
        page_tokens: P.
    """

    key_heads: int
    group: int
    size: int
    page_tokens: int


def tree_sum(x: Tensor) -> Tensor:
    """Sum over axis 1 by pairs of neighbours; zeros at the end change nothing."""
    while x.shape[1] > 1:
        count = x.shape[1]
        pairs = x[:, 0 : count - 1 : 2] + x[:, 1:count:2]
        x = torch.cat((pairs, x[:, -1:]), dim=1) if count % 2 else pairs
    return x[:, 0]


def take_queries(q: Tensor, group: TileGroup, heads: int) -> Tensor:
    """Query rows by tile and key head: [tiles, K, G * width, D] from q [T, H, D]."""
    rows = q if group.queries is None else q.index_select(0, group.queries)
    size = q.shape[-1]
    rows = rows.view(group.tiles, group.width, heads, -1, size)
    return rows.permute(0, 2, 3, 1, 4).reshape(group.tiles, heads, -1, size)


def put_outputs(out: Tensor, group: TileGroup, values: Tensor) -> None:
    """Write [tiles, K, G * width, D] back to the tokens that it belongs to; out is [T, H, D]."""
    tiles, heads, _, size = values.shape
    rows = values.view(tiles, heads, -1, group.width, size).permute(0, 3, 1, 2, 4)
    flat = rows.reshape(tiles * group.width, -1, size)
    if group.real is not None:
        flat = flat.index_select(0, group.real)
    out.index_copy_(0, group.targets, flat)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Softmax attention by blocks of keys.

    Args:
        q: [tiles, K, R, D], scaled; R = G * width.
        k: [tiles * blocks * K, P, D].
        v: the same.
        bias: [tiles, blocks, 1, 1, width, P].

    Returns:
        [tiles, K, R, D].
    """
    tiles, heads, rows, size = q.shape
    blocks, width, columns = bias.shape[1], bias.shape[-2], bias.shape[-1]
    spread = q[:, None].expand(tiles, blocks, heads, rows, size).reshape(-1, rows, size)
    scores = torch.bmm(spread, k.transpose(1, 2))
    grid = scores.view(tiles, blocks, heads, rows // width, width, columns)
    grid.add_(bias)
    grid.sub_(grid.amax(dim=(1, 5), keepdim=True)).exp_()
    totals = scores.sum(-1).view(tiles, blocks, heads, rows, 1)
    values = torch.bmm(scores, v).view(tiles, blocks, heads, rows, size)
    return tree_sum(values) / tree_sum(totals)


class BlockwiseRows:
    """Cache writes and attention of one step; page groups are built at their first use."""

    def __init__(
        self, layout: RowLayout, tile_width: Callable[[ProductShape], int], device: torch.device
    ) -> None:
        """Prepare the step `layout`; `tile_width` gives the least tokens per tile for a shape."""
        self._layout = layout
        self._device = device
        self._tile_width = tile_width
        self._groups: dict[int, list[PageGroup]] = {}
        self._windows: dict[tuple[int, RingShape], list[WindowGroup]] = {}
        self._columns: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._pages, self._offsets = (index.to(device) for index in _addresses(layout))

    def paged_write(self, pool: Tensor, entries: Tensor) -> None:
        """See RowOperators."""
        if pool.dim() == 4:
            pool[self._pages, :, self._offsets] = entries
        else:
            pool[self._pages, self._offsets] = entries

    def paged_attention(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float) -> Tensor:
        """See RowOperators."""
        heads = k_pool.shape[1]
        scaled, out = q.float() * scale, q.new_empty(q.shape, dtype=torch.float32)
        shape = ProductShape(heads, q.shape[1] // heads, q.shape[2], self._layout.page_tokens)
        for group in self._page_groups(self._tile_width(shape)):
            k, v = (_blocks(pool, group) for pool in (k_pool, v_pool))
            tiles = take_queries(scaled, group.queries, heads)
            put_outputs(out, group.queries, attend(tiles, k, v, group.bias))
        return out.to(q.dtype)

    def ring_write(self, ring: Tensor, entries: Tensor) -> None:
        """See RowOperators."""
        capacity = ring.shape[1]
        if capacity not in self._columns:
            addresses = _ring_addresses(self._layout, capacity)
            self._columns[capacity] = (
                addresses[0].to(self._device),
                addresses[1].to(self._device),
                addresses[2].to(self._device),
            )
        slots, columns, tokens = self._columns[capacity]
        ring[slots, columns] = entries.index_select(0, tokens)

    def window_attention(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        rings: tuple[Tensor, Tensor],
        window: int,
        scale: float,
    ) -> Tensor:
        """See RowOperators."""
        heads, capacity = rings[0].shape[2], rings[0].shape[1]
        scaled, out = q.float() * scale, q.new_empty(q.shape, dtype=torch.float32)
        shape = ProductShape(heads, q.shape[1] // heads, q.shape[2], self._layout.page_tokens)
        for group in self._window_groups(self._tile_width(shape), RingShape(window, capacity)):
            k, v = (group.gather(ring, own) for ring, own in zip(rings, kv, strict=True))
            tiles = take_queries(scaled, group.queries, heads)
            put_outputs(out, group.queries, attend(tiles, k, v, group.bias))
        return out.to(q.dtype)

    def _page_groups(self, width: int) -> list[PageGroup]:
        if width not in self._groups:
            self._groups[width] = group_pages(self._layout, width, self._device)
        return self._groups[width]

    def _window_groups(self, width: int, ring: RingShape) -> list[WindowGroup]:
        key = (width, ring)
        if key not in self._windows:
            self._windows[key] = group_windows(self._layout, width, ring, self._device)
        return self._windows[key]


def _blocks(pool: Tensor, group: PageGroup) -> Tensor:
    """The pages of a group as [tiles * count * K, P, D] float32; a run is used in place."""
    if group.run >= 0:
        pages = pool[group.run : group.run + group.pages.shape[0]]
    else:
        pages = pool.index_select(0, group.pages)
    return pages.view(-1, *pool.shape[2:]).float()


def _addresses(layout: RowLayout) -> tuple[Tensor, Tensor]:
    """Page id and offset of every token of the step."""
    size = layout.page_tokens
    pages: list[int] = []
    offsets: list[int] = []
    for row, first in enumerate(layout.first):
        table = layout.tables[row]
        for position in range(first, first + layout.length(row)):
            page, offset = divmod(position, size)
            pages.append(table[page])
            offsets.append(offset)
    return torch.tensor(pages, dtype=torch.long), torch.tensor(offsets, dtype=torch.long)


def _ring_addresses(layout: RowLayout, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slot, column and step index of the entries that stay in a ring of this capacity."""
    addresses: list[Sequence[int]] = []
    for row, first in enumerate(layout.first):
        length, slot = layout.length(row), layout.slots[row]
        kept = range(max(0, length - capacity), length)
        addresses.extend((slot, (first + i) % capacity, layout.starts[row] + i) for i in kept)
    slots, columns, tokens = torch.tensor(addresses, dtype=torch.long).view(-1, 3).unbind(1)
    return slots, columns, tokens


def least_tile_width(shape: ProductShape) -> int:
    """Fewest tokens per tile from which batched products keep a row's bits at this shape.

    Compares products of every row count that a tile can have with tiles of SAFE_QUERY_ROWS rows,
    for both products of attention, alone and among other pages.
    """
    generator = torch.Generator().manual_seed(shape.size)
    rows = -(-TILE_TOKENS * shape.group // SAFE_QUERY_ROWS) * SAFE_QUERY_ROWS
    batch = 2 * shape.key_heads
    q = torch.randn(batch, rows, shape.size, generator=generator)
    pages = torch.randn(batch, shape.page_tokens, shape.size, generator=generator)
    weights = torch.rand(batch, rows, shape.page_tokens, generator=generator)
    least = 1
    for width in range(1, TILE_TOKENS + 1):
        count = width * shape.group
        if not (_agree(q, pages.transpose(1, 2), count) and _agree(weights, pages, count)):
            least = width + 1
    return min(least, -(-SAFE_QUERY_ROWS // shape.group))


def _agree(left: Tensor, right: Tensor, count: int) -> bool:
    tiles = [torch.bmm(tile.contiguous(), right) for tile in left.split(SAFE_QUERY_ROWS, dim=1)]
    safe = torch.cat(tiles, dim=1)[:, :count]
    part = left[:, :count].contiguous()
    alone = torch.bmm(part[:1], right[:1])
    return torch.equal(torch.bmm(part, right), safe) and torch.equal(alone, safe[:1])
