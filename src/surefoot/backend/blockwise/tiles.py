"""Cuts the rows of a step into query tiles and groups them for batched attention.

Each row is cut into tiles of at most TILE_TOKENS tokens; a tile needs the pages up to its last
token. Tiles of like size are computed together: `queries` says which tokens a group holds, `pages`
which pages each of its tiles reads, `bias` which columns each token may see.

    row of 40 tokens at position 20, P = 16      tile 0: positions 20..35, pages 0..2
                                                 tile 1: positions 36..51, pages 0..3
                                                 tile 2: positions 52..59, pages 0..3
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.blockwise.spans import Span, find_span
from surefoot.backend.operands import RowLayout

TILE_TOKENS = 16
LANES = 16
"""Terms that a vector unit adds side by side; sums run lane by lane."""


@dataclass(frozen=True)
class Tile:
    """Some consecutive tokens of one row.

    Attributes:
        row: index of the row.
        token: index in the step of the first token.
        position: absolute position of the first token.
        length: how many tokens.
    """

    row: int
    token: int
    position: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.position + self.length


@dataclass(frozen=True)
class Place:
    """Where index tensors go.

    Attributes:
        tokens: T of the step.
        device: of the tensors.
    """

    tokens: int
    device: torch.device

    def tensor(self, values: list[int]) -> Tensor:
        """An int64 tensor on the device."""
        return torch.tensor(values, dtype=torch.long, device=self.device)


@dataclass(frozen=True)
class TileGroup:
    """Tiles computed in one call; short tiles repeat their last token to the common width.

    Attributes:
        tiles: how many.
        width: tokens of each tile.
        queries: [tiles * width] indices into the step, or None when the group is the whole step.
        real: [n] indices into the flattened group of the tokens that are not repeats, or None when
            there are no repeats.
        targets: [n] the step's indices they belong to.
        whole: the targets are all tokens of the step, in order.
    """

    tiles: int
    width: int
    queries: Tensor | None
    real: Tensor | None
    targets: Tensor
    whole: bool


@dataclass(frozen=True)
class PageGroup:
    """A tile group and the pages that its tiles read.

    Attributes:
        queries: the tiles.
        count: pages read by each tile, padded with the tile's own first page.
        pages: [tiles * count] page ids.
        run: the first page id if the ids are consecutive, so that the pool is used in place; or -1.
        span: the stretch of the pool that they fill in another order, if they fill one.
        bias: [tiles, count, 1, 1, width, P] float32, 0 where a token may look and -inf elsewhere.
    """

    queries: TileGroup
    count: int
    pages: Tensor
    run: int
    span: Span | None
    bias: Tensor


def cut_tiles(layout: RowLayout) -> list[Tile]:
    """The query tiles of a step, in order of its tokens."""
    return [
        Tile(row, layout.starts[row] + i, layout.first[row] + i, min(TILE_TOKENS, length - i))
        for row in range(len(layout.first))
        for length in (layout.length(row),)
        for i in range(0, length, TILE_TOKENS)
    ]


def round_up_width(length: int, least: int) -> int:
    """Common width for tiles of this length: a power of two, at least `least`."""
    return max(least, 1 << (length - 1).bit_length())


def least_multiple(blocks: int, size: int) -> int:
    """`blocks` rounded up so that they hold a multiple of LANES columns, at `size` columns each."""
    unit = LANES // math.gcd(LANES, size)
    return -(-blocks // unit) * unit


def group_queries(tiles: list[Tile], width: int, place: Place) -> TileGroup:
    """Index tensors for tiles of one width."""
    indices = [tile.token + min(i, tile.length - 1) for tile in tiles for i in range(width)]
    real = [t * width + i for t, tile in enumerate(tiles) for i in range(tile.length)]
    targets = [tile.token + i for tile in tiles for i in range(tile.length)]
    every = list(range(place.tokens))
    return TileGroup(
        tiles=len(tiles),
        width=width,
        queries=None if indices == every else place.tensor(indices),
        real=None if len(real) == len(indices) else place.tensor(real),
        targets=place.tensor(targets),
        whole=targets == every,
    )


def group_pages(layout: RowLayout, least_width: int, device: torch.device) -> list[PageGroup]:
    """Group the tiles of a step by width and by the number of pages that they read."""
    size = layout.page_tokens
    classes: dict[tuple[int, int], list[Tile]] = defaultdict(list)
    for tile in cut_tiles(layout):
        count = (tile.stop - 1) // size + 1
        bucket = 1 << (count - 1).bit_length()
        classes[round_up_width(tile.length, least_width), bucket].append(tile)
    place = Place(layout.starts[-1], device)
    return [_page_group(layout, tiles, width, place) for (width, _), tiles in classes.items()]


def _page_group(layout: RowLayout, tiles: list[Tile], width: int, place: Place) -> PageGroup:
    size = layout.page_tokens
    counts = [(tile.stop - 1) // size + 1 for tile in tiles]
    count = least_multiple(max(counts), size)
    tables = [layout.tables[tile.row][:used] for tile, used in zip(tiles, counts, strict=True)]
    pages: list[int] = []
    for table in tables:
        pages.extend(table)
        pages.extend([table[0]] * (count - len(table)))
    run = pages[0] if pages == list(range(pages[0], pages[0] + len(pages))) else -1
    return PageGroup(
        queries=group_queries(tiles, width, place),
        count=count,
        pages=place.tensor(pages),
        run=run,
        span=find_span(tables, count, place.device) if run < 0 else None,
        bias=_page_bias(layout, tiles, count, width).to(place.device),
    )


def _page_bias(layout: RowLayout, tiles: list[Tile], count: int, width: int) -> Tensor:
    size = layout.page_tokens
    positions = torch.tensor([tile.position for tile in tiles])[:, None]
    last = torch.tensor([tile.stop - 1 for tile in tiles])[:, None]
    seen_to = torch.minimum(positions + torch.arange(width), last)
    seen_from = torch.tensor([layout.visible_from[tile.row] for tile in tiles])
    columns = torch.arange(count * size)
    hidden = (columns > seen_to[..., None]) | (columns < seen_from[:, None, None])
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    return (
        bias.view(len(tiles), width, count, size).permute(0, 2, 1, 3)[:, :, None, None].contiguous()
    )
