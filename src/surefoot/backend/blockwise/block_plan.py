"""Plans one step of the gated delta rule: groups of tiles, their index tensors, and their order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from surefoot.backend.blockwise.blocks import (
    CHECKPOINT,
    BlockGroup,
    BlockTile,
    Columns,
    DeltaPlan,
    DeltaShape,
    Part,
    Run,
    cut_blocks,
)
from surefoot.backend.operands import RowLayout


def plan_delta(layout: RowLayout, shape: DeltaShape, width: int, device: torch.device) -> DeltaPlan:
    """Index tensors of a step; `width` is the least number of new positions of a tile."""
    classes: dict[tuple[bool, int], list[BlockTile]] = defaultdict(list)
    for tile in cut_blocks(layout, shape):
        classes[tile.in_ring, _width(tile, width, shape.block)].append(tile)
    tokens = layout.starts[-1]
    planner = _Planner(layout, shape, device)
    groups = []
    sorted_tiles = []
    for (_, least), tiles in classes.items():
        tiles.sort(key=lambda tile: (tile.wave, tile.slot))
        sorted_tiles.append((least, tiles))
        groups.append(planner.group(tiles, least))
    before = [
        (position + tile.shift, planner.column(tile, position))
        for _, tiles in sorted_tiles
        for tile in tiles
        if tile.in_ring
        for position in range(tile.fresh, tile.stop)
    ]
    after = [
        (position + tile.shift, planner.column(tile, position))
        for _, tiles in sorted_tiles
        for tile in tiles
        if not tile.in_ring
        for position in planner.kept(tile)
    ]
    return DeltaPlan(
        shape=shape,
        groups=tuple(groups),
        parts=tuple(planner.parts(sorted_tiles)),
        before=planner.columns(before, tokens),
        after=planner.columns(after, tokens),
    )


def _width(tile: BlockTile, least: int, block: int) -> int:
    if not tile.in_ring:
        return block
    count = max(tile.stop - tile.fresh, 1)
    return min(block, max(least, 1 << (count - 1).bit_length()))


class _Planner:
    """Makes the index tensors of one step."""

    def __init__(self, layout: RowLayout, shape: DeltaShape, device: torch.device) -> None:
        self._layout, self._shape, self._device = layout, shape, device

    def column(self, tile: BlockTile, position: int) -> int:
        return tile.slot * self._shape.capacity + position % self._shape.capacity

    def kept(self, tile: BlockTile) -> range:
        """Positions of an own tile that the ring still holds after the step."""
        row = tile.row
        stop = self._layout.first[row] + self._layout.length(row)
        return range(max(tile.start, stop - self._shape.capacity), tile.stop)

    def columns(self, pairs: Sequence[tuple[int, int]], count: int) -> Columns | None:
        """Pairs of an entry and its column, out of `count` entries; None if there are none."""
        if not pairs:
            return None
        entries = [entry for entry, _ in pairs]
        return Columns(self._unless_all(entries, count), self._tensor([c for _, c in pairs]))

    def group(self, tiles: list[BlockTile], width: int) -> BlockGroup:
        block, tokens = self._shape.block, self._layout.starts[-1]
        new = [_new_positions(tile, width) for tile in tiles]
        place = [
            at * width + i for at, tile in enumerate(tiles) for i in range(tile.stop - tile.fresh)
        ]
        targets = [
            position + tile.shift for tile in tiles for position in range(tile.fresh, tile.stop)
        ]
        inputs = [self._inputs(tile) for tile in tiles]
        offsets = self._tensor(new) - self._tensor([tile.start for tile in tiles])[:, None]
        moving = [at for at, tile in enumerate(tiles) if tile.moves]
        kept = [
            (at * width + position - tile.start, self.column(tile, position))
            for at, tile in enumerate(tiles)
            if not tile.in_ring
            for position in self.kept(tile)
        ]
        rows = torch.cat((self._arange(block).expand(len(tiles), -1), offsets), 1)
        return BlockGroup(
            tiles=len(tiles),
            width=width,
            in_ring=tiles[0].in_ring,
            inputs=self._tensor(inputs).flatten(),
            gates=self._by_head(self._tensor(inputs)),
            new=self._unless_all(_step_tokens(tiles, new, tokens), tokens),
            starts=self._starts(torch.cat((rows, offsets), 1)),
            bias=self._bias(rows),
            real=self._unless_all(place, len(tiles) * width),
            targets=self._unless_all(targets, tokens),
            moving=self._unless_all(moving, len(tiles)),
            moves=len(moving),
            kept=self.columns(kept, len(tiles) * width),
        )

    def parts(self, classes: Sequence[tuple[int, list[BlockTile]]]) -> list[Part]:
        """Parts in order of waves; tentative states move from one scratch tensor to the next."""
        running = {row: (CHECKPOINT, slot) for row, slot in enumerate(self._layout.slots)}
        by_wave = [
            (wave, number, width, list(tiles))
            for number, (width, every) in enumerate(classes)
            for wave, tiles in groupby(every, key=lambda tile: tile.wave)
        ]
        begun, moved, scratch = [0] * len(classes), [0] * len(classes), 0
        parts: list[Part] = []
        for _, number, width, tiles in sorted(by_wave, key=lambda item: item[:2]):
            movers = [tile for tile in tiles if tile.moves]
            begun[number] += len(tiles)
            moved[number] += len(movers)
            part = Part(
                group=number,
                tiles=slice(begun[number] - len(tiles), begun[number]),
                whole=len(tiles) == len(classes[number][1]),
                entering=_runs([(*running[tile.row], False) for tile in tiles]),
                written=self._written(tiles, width),
                moving=slice(moved[number] - len(movers), moved[number]),
                chosen=self._unless_all(
                    [at for at, tile in enumerate(tiles) if tile.moves], len(tiles)
                ),
                leaving=_runs([(*running[tile.row], tile.settles) for tile in movers]),
            )
            for run in part.leaving:
                if not run.settles:
                    for at in range(run.count):
                        running[movers[run.at + at].row] = (scratch, at)
                    scratch += 1
            parts.append(part)
        return parts

    def _written(self, tiles: list[BlockTile], width: int) -> Columns | None:
        pairs = [
            (at * width + position - tile.fresh, self.column(tile, position))
            for at, tile in enumerate(tiles)
            if tile.in_ring
            for position in range(tile.fresh, tile.stop)
        ]
        return self.columns(pairs, len(tiles) * width)

    def _inputs(self, tile: BlockTile) -> list[int]:
        last = tile.stop - 1
        positions = range(tile.start, tile.start + self._shape.block)
        if tile.in_ring:
            return [self.column(tile, min(position, last)) for position in positions]
        return [min(position, last) + tile.shift for position in positions]

    def _by_head(self, entries: Tensor) -> Tensor:
        """[tiles, n] entries as [tiles * Hv * n] numbers of entries with Hv numbers each."""
        heads = self._arange(self._shape.value_heads)[:, None]
        return (entries[:, None] * self._shape.value_heads + heads).flatten()

    def _starts(self, rows: Tensor) -> Tensor:
        tiles = len(rows) * self._shape.value_heads
        begins = self._arange(tiles).view(len(rows), -1, 1) * self._shape.block
        return (begins + rows[:, None]).flatten()

    def _bias(self, rows: Tensor) -> Tensor:
        """Rows of keys see what is before them, rows of queries themselves too."""
        block = self._shape.block
        limits = rows.clone()
        limits[:, block:] += 1
        hidden = self._arange(block) >= limits[..., None]
        bias = torch.zeros(hidden.shape, device=self._device)
        return bias.masked_fill_(hidden, float("-inf"))[:, None]

    def _arange(self, count: int) -> Tensor:
        return torch.arange(count, device=self._device)

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def _unless_all(self, indices: list[int], count: int) -> Tensor | None:
        return None if indices == list(range(count)) else self._tensor(indices)


def _new_positions(tile: BlockTile, width: int) -> list[int]:
    """Positions of the rows that read the state; the last one repeated."""
    last = tile.stop - 1
    return [min(tile.fresh + i, last) for i in range(width)]


def _step_tokens(tiles: list[BlockTile], new: list[list[int]], tokens: int) -> list[int]:
    """The step's token at each new position; any token where the position is not of the step."""
    return [
        min(max(position + tile.shift, 0), tokens - 1)
        for tile, positions in zip(tiles, new, strict=True)
        for position in positions
    ]


def _runs(places: Sequence[tuple[int, int, bool]]) -> tuple[Run, ...]:
    """Places (source, index, settles) joined where they are consecutive."""
    runs: list[Run] = []
    for at, (source, index, settles) in enumerate(places):
        last = runs[-1] if runs else None
        if last and (source, index, settles) == (
            last.source,
            last.first + last.count,
            last.settles,
        ):
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(Run(at, 1, source, index, settles))
    return tuple(runs)
