"""Cuts the rows of a step into aligned blocks for the gated delta rule, and says where things lie.

A row is walked in blocks of B positions from its checkpoint. A block's tile is computed from the
state at its start; wave i of a step is the i-th tile of every row. Tiles of one group are alike in
where their inputs come from and in how many of their positions are new:

    ring tiles   everything is in the ring, once the step's own columns are written
    own tiles    everything is in the step: all but the first tile of a long row

Short tiles repeat their last position; a triangular factor of exact zeros hides the repeats.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from surefoot.backend.operands import RowLayout

CHECKPOINT = -1
"""The source of a run that lies in the pool of checkpoints."""


@dataclass(frozen=True)
class DeltaShape:
    """What decides the kernels and the addresses of a gated delta rule.

    Attributes:
        key_heads: Hk.
        value_heads: Hv.
        key_size: dk.
        value_size: dv.
        block: B.
        capacity: columns of the ring.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    block: int
    capacity: int


@dataclass(frozen=True)
class BlockTile:
    """One block of one row.

    Attributes:
        row: index of the row.
        wave: how many blocks of the row come before.
        slot: the row's slot.
        start: first position of the block.
        stop: one past the last position that the row has in it.
        fresh: the first position that the step computes; `stop` if it computes none here.
        shift: index in the step of a position, less the position.
        in_ring: whether its inputs are read from the ring.
        moves: whether the state after the block is wanted.
        settles: whether that state is final, and moves the checkpoint.
    """

    row: int
    wave: int
    slot: int
    start: int
    stop: int
    fresh: int
    shift: int
    in_ring: bool
    moves: bool
    settles: bool


@dataclass(frozen=True)
class Run:
    """Consecutive states.

    Attributes:
        at: the first tile that they belong to, among those of a part that read or move.
        count: how many.
        source: CHECKPOINT, or the number of the scratch tensor that they are in.
        first: the first of them in the source.
        settles: whether they are moved where they are, or else into a new scratch tensor.
    """

    at: int
    count: int
    source: int
    first: int
    settles: bool


@dataclass(frozen=True)
class Columns:
    """Entries of some tensor that go to columns of a ring.

    Attributes:
        entries: [n] indices of the entries, or None for all in order.
        columns: [n] columns, counted over all slots.
    """

    entries: Tensor | None
    columns: Tensor


@dataclass(frozen=True)
class BlockGroup:
    """Tiles computed in one call, in order of waves.

    Attributes:
        tiles: how many.
        width: m, the new positions of each tile; the last one is repeated where there are fewer.
        in_ring: whether `inputs` and `gates` count ring columns or the step's tokens.
        inputs: [tiles * B] entries of k.
        gates: [tiles * Hv * B] numbers of decay and beta, and rows of the errors.
        new: [tiles * m] tokens of the step, or None for all in order.
        starts: [tiles * Hv * (B + 2 m)] which sum of decays each row of the products starts from:
            the block's keys, then new queries, then new keys.
        bias: [tiles, 1, B + m, B] 0 where a row sees a column and -inf elsewhere.
        real: [n] which of tiles * m are no repeats, or None for all.
        targets: [n] their tokens, or None for all tokens of the step in order.
        moving: [n] the tiles after which the state is wanted, or None for all.
        moves: n.
        kept: errors of own tiles that stay in the ring; entries count tiles * m.
    """

    tiles: int
    width: int
    in_ring: bool
    inputs: Tensor
    gates: Tensor
    new: Tensor | None
    starts: Tensor
    bias: Tensor
    real: Tensor | None
    targets: Tensor | None
    moving: Tensor | None
    moves: int
    kept: Columns | None


@dataclass(frozen=True)
class Part:
    """The tiles of one group and wave.

    Attributes:
        group: its number.
        tiles: which tiles of the group.
        whole: they are all of the group.
        entering: where the states at the start of the tiles are.
        written: new errors of ring tiles; entries count len(tiles) * m.
        moving: which of the group's moving tiles are here.
        chosen: which of `tiles` move, or None for all.
        leaving: where the states at the start of the moving tiles are, and where they go.
    """

    group: int
    tiles: slice
    whole: bool
    entering: tuple[Run, ...]
    written: Columns | None
    moving: slice
    chosen: Tensor | None
    leaving: tuple[Run, ...]


@dataclass(frozen=True)
class DeltaPlan:
    """One step's delta rule, for every layer of one shape.

    Attributes:
        shape: the shape.
        groups: the tiles.
        parts: in the order of computation.
        before: inputs to write to the ring before anything is read.
        after: inputs to write when all is done; the rest of long rows.
    """

    shape: DeltaShape
    groups: tuple[BlockGroup, ...]
    parts: tuple[Part, ...]
    before: Columns | None
    after: Columns | None


def cut_blocks(layout: RowLayout, shape: DeltaShape) -> list[BlockTile]:
    """The tiles of a step, row by row."""
    block, tiles = shape.block, []
    for row, first in enumerate(layout.first):
        stop = first + layout.length(row)
        base = layout.settled[row] // block * block
        if stop == first:
            continue
        fits = stop - base <= shape.capacity
        assert base <= first, f"row {row} starts at {first}, below its checkpoint at {base}"
        assert fits or first <= base + block, f"row {row} at {first}: too long for a draft"
        checkpoint = layout.settles[row] // block * block
        for wave, start in enumerate(range(base, stop, block)):
            end = start + block
            tile = BlockTile(
                row=row,
                wave=wave,
                slot=layout.slots[row],
                start=start,
                stop=min(end, stop),
                fresh=min(max(start, first), end),
                shift=layout.starts[row] - first,
                in_ring=fits or start < first,
                moves=end < stop or end == stop <= checkpoint,
                settles=end <= checkpoint,
            )
            tiles.append(tile)
    return tiles
