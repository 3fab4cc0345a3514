"""Sliding windows: which keys each query tile reads, from the ring and from the step itself.

Keys are read in blocks aligned to absolute positions, and a tile's first block is a multiple of its
block count (a power of two), so that the tree over blocks pairs the same blocks for a token
whatever tile it stands in.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.blockwise.tiles import (
    Place,
    Tile,
    TileGroup,
    cut_tiles,
    group_queries,
    least_multiple,
    round_up_width,
)
from surefoot.backend.operands import RowLayout


@dataclass(frozen=True)
class WindowGroup:
    """A tile group and the keys that its tiles read.

    Attributes:
        queries: the tiles.
        ring_index: [tiles * blocks * P] row of the flattened ring for each key; 0 where another
            source is meant.
        step_place: which of them come from the step.
        step_index: the step's tokens that they are.
        unread: which of them no token of their tile may see.
        block: P.
        bias: [tiles, blocks, 1, 1, width, P] float32, 0 where a token may look, -inf elsewhere.
    """

    queries: TileGroup
    ring_index: Tensor
    step_index: Tensor
    step_place: Tensor
    unread: Tensor
    block: int
    bias: Tensor

    def gather(self, ring: Tensor, own: Tensor) -> Tensor:
        """Keys or values by block: [tiles * blocks * K, P, D] float32.

        Args:
            ring: [slots, capacity, K, D].
            own: [T, K, D] of the step.
        """
        heads, size = own.shape[1:]
        keys = ring.reshape(-1, heads, size).index_select(0, self.ring_index).float()
        keys.index_copy_(0, self.step_place, own.index_select(0, self.step_index).float())
        keys.index_fill_(0, self.unread, 0.0)
        blocks = keys.view(-1, self.block, heads, size).transpose(1, 2)
        return blocks.reshape(-1, self.block, size)


@dataclass(frozen=True)
class RingShape:
    """What decides which keys a token reads.

    Attributes:
        window: positions each token sees.
        capacity: columns of the ring.
    """

    window: int
    capacity: int


def group_windows(
    layout: RowLayout, least_width: int, ring: RingShape, device: torch.device
) -> list[WindowGroup]:
    """Group the tiles of a step by width and by the number of key blocks that they read."""
    size = layout.page_tokens
    classes: dict[tuple[int, int], list[Tile]] = defaultdict(list)
    for tile in cut_tiles(layout):
        begin = max(0, tile.position - ring.window + 1) // size
        count = (tile.stop - 1) // size + 1 - begin
        bucket = 1 << (least_multiple(count, size) - 1).bit_length()
        classes[round_up_width(tile.length, least_width), bucket].append(tile)
    place = Place(layout.starts[-1], device)
    return [
        _window_group(layout, tiles, (width, bucket), ring, place)
        for (width, bucket), tiles in classes.items()
    ]


def _window_group(
    layout: RowLayout, tiles: list[Tile], shape: tuple[int, int], ring: RingShape, place: Place
) -> WindowGroup:
    (width, bucket), window = shape, ring.window
    size, blocks = layout.page_tokens, 2 * bucket
    starts = [
        max(0, tile.position - window + 1) // size // bucket * bucket * size for tile in tiles
    ]
    columns = torch.tensor(starts)[:, None] + torch.arange(blocks * size)
    positions = torch.tensor([tile.position for tile in tiles])[:, None]
    last = torch.tensor([tile.stop - 1 for tile in tiles])[:, None]
    seen_to = torch.minimum(positions + torch.arange(width), last)[..., None]
    least = torch.tensor([layout.visible_from[tile.row] for tile in tiles])[:, None, None]
    seen_from = torch.maximum(seen_to - window + 1, least)
    hidden = (columns[:, None] > seen_to) | (columns[:, None] < seen_from)
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    ring_index, step_place, step_index, unread = _sources(
        layout, tiles, columns, hidden, ring.capacity
    )
    by_block = bias.view(len(tiles), width, blocks, size).permute(0, 2, 1, 3)
    return WindowGroup(
        queries=group_queries(tiles, width, place),
        ring_index=ring_index.to(place.device),
        step_index=step_index.to(place.device),
        step_place=step_place.to(place.device),
        unread=unread.to(place.device),
        block=size,
        bias=by_block[:, :, None, None].contiguous().to(place.device),
    )


def _sources(
    layout: RowLayout, tiles: list[Tile], columns: Tensor, hidden: Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where each key column of each tile comes from.

    Returns:
        The ring's flat index of every column, the places that the step fills, the step's indices
        for them, and the places that no token of the tile may see.
    """
    slots = torch.tensor([layout.slots[tile.row] for tile in tiles])[:, None]
    first = torch.tensor([layout.first[tile.row] for tile in tiles])[:, None]
    begin = torch.tensor([layout.starts[tile.row] for tile in tiles])[:, None]
    unread = hidden.all(dim=1)
    own = (columns >= first) & ~unread
    ring_index = (slots * capacity + columns % capacity).masked_fill(unread | own, 0)
    step_index = (begin + columns - first)[own]
    return (
        ring_index.flatten(),
        own.flatten().nonzero()[:, 0],
        step_index,
        unread.flatten().nonzero()[:, 0],
    )
