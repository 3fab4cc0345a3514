"""Where a step's tokens lie, in device memory: what every row operator reads, recorded or not.

The host writes two tensors a step, and everything else is a part of them or is computed from them
on the device. The operators that want lengths on the host get lists, which are not tensors and
change with `move`, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from surefoot.backend.operands import LayoutBounds, RowLayout
from surefoot.ids import SINK_SLOT


class Places:
    """The rows of a step of B rows and T tokens.

    Attributes:
        rows: B.
        tokens: T.
        page_tokens: P.
        bounded: whether some row may be kept from looking below a position.
        row: [T] int64, the row of each token.
        position: [T] int64, absolute.
        begin: [B] int64, index of each row's first token.
        first: [B] int64, its position.
        count: [B] int64, tokens of each row in the step.
        slot: [B] int64, rows of the bounded pools.
        visible_from: [B] int64.
        settled: [B] int64.
        settles: [B] int64.
        tables: [B, C] int32 pages; the sink behind each row's own.
        ends: for the host, the index behind each row's last token.
        lengths: for the host, the tokens that each row has up to its last one.
        reaches: for the host, the same of each token.
    """

    def __init__(
        self, layout: RowLayout, bounds: LayoutBounds, device: torch.device, moves: bool = True
    ) -> None:
        """Place `layout`.

        Args:
            layout: the rows; each has a token.
            bounds: of these rows and those to come.
            device: where the tensors live.
            moves: whether other steps will come here, so that only sizes may be relied on.
        """
        self._layout, self._moves = layout, moves
        self._walked: dict[int, int] = {}
        self.rows, self.tokens = len(layout.first), layout.starts[-1]
        self.page_tokens, self.device = layout.page_tokens, device
        self.bounded = bounds.bounded
        self._numbers = torch.zeros(
            2 * self.tokens + 7 * self.rows, dtype=torch.int64, device=device
        )
        parts = self._numbers.split([self.tokens, self.tokens, *[self.rows] * 7])
        self.row, self.position, self.begin, self.first, self.count = parts[:5]
        self.slot, self.visible_from, self.settled, self.settles = parts[5:]
        self.tables = torch.zeros(self.rows, bounds.longest_table, dtype=torch.int32, device=device)
        self.ends: list[int] = []
        self.lengths: list[int] = []
        self.reaches: list[int] = []
        self.move(layout)

    @staticmethod
    def of(layout: RowLayout, device: torch.device) -> Places:
        """The places of a step that is not recorded."""
        longest = max((len(table) for table in layout.tables), default=0)
        bounds = LayoutBounds(max(1, longest), any(layout.visible_from))
        return Places(_without_empty_rows(layout), bounds, device, moves=False)

    def move(self, layout: RowLayout) -> None:
        """Take the places of another step of as many rows and tokens.

        Raises:
            ValueError: it does not fit what was prepared.
        """
        self._check(layout)
        self._layout = layout
        starts = np.array(layout.starts, dtype=np.int64)
        counts, first = np.diff(starts), np.array(layout.first, dtype=np.int64)
        row = np.repeat(np.arange(self.rows), counts)
        position = np.arange(self.tokens) - starts[:-1][row] + first[row]
        others = (layout.slots, layout.visible_from, layout.settled, layout.settles)
        numbers = np.concatenate(
            (row, position, starts[:-1], first, counts, *map(np.array, others))
        )
        self._numbers.copy_(torch.from_numpy(numbers.astype(np.int64)), non_blocking=True)
        tables = np.zeros(self.tables.shape, dtype=np.int32)
        for held, table in zip(tables, layout.tables, strict=True):
            held[: len(table)] = table
        self.tables.copy_(torch.from_numpy(tables), non_blocking=True)
        self.ends[:] = layout.starts[1:]
        self.lengths[:] = (first + counts).tolist()
        self.reaches[:] = (position + 1).tolist()

    def most_entries(self, ratio: int) -> int:
        """Entries of `ratio` tokens that a token of the step may see; at most one per table."""
        if self._moves:
            return self.tables.shape[1] * self.page_tokens // ratio
        return max(self.lengths, default=0) // ratio

    def walk(self, size: int) -> list[Sequence[int]]:
        """Blocks of `size` positions that rows touch, from the boundary below `settled` on.

        Returns:
            For the first block of every row, the second, and so on, the rows that have one. In a
            step that moves all rows are in each, and there are as many as a row can have that
            gets an even share of the tokens; `move` refuses a step with more. Padding rows may go
            on behind the last.
        """
        if self._moves:
            share = (self.tokens - 1) // max(1, self.rows - 1)
            self._walked[size] = max(2, -(-(share + size - 1) // size))
            return [range(self.rows)] * self._walked[size]
        counts = _blocks(self._layout, size)
        return [
            [row for row, count in enumerate(counts) if count > number]
            for number in range(max(counts, default=0))
        ]

    def _check(self, layout: RowLayout) -> None:
        had = (self.rows, self.tokens)
        came = (len(layout.first), layout.starts[-1])
        if had != came:
            raise ValueError(f"recorded were {had} rows and tokens, there came {came}")
        longest = max((len(table) for table in layout.tables), default=0)
        if longest > self.tables.shape[1]:
            raise ValueError(
                f"a page table of {longest} pages, and room for {self.tables.shape[1]}"
            )
        if any(layout.visible_from) and not self.bounded:
            raise ValueError("a row looks at less than everything, and none did when recorded")
        for size, most in self._walked.items():
            blocks = zip(layout.slots, _blocks(layout, size), strict=True)
            longest = max((count for slot, count in blocks if slot != SINK_SLOT), default=0)
            if longest > most:
                raise ValueError(
                    f"a row touches {longest} blocks of {size} tokens, and recorded were {most}"
                )


def _without_empty_rows(layout: RowLayout) -> RowLayout:
    """Lists of lengths may not begin with 0, and a row without tokens needs nothing."""
    rows = [row for row in range(len(layout.first)) if layout.length(row)]
    if len(rows) == len(layout.first):
        return layout
    return RowLayout(
        starts=(*(layout.starts[row] for row in rows), layout.starts[-1]),
        first=tuple(layout.first[row] for row in rows),
        tables=tuple(layout.tables[row] for row in rows),
        slots=tuple(layout.slots[row] for row in rows),
        visible_from=tuple(layout.visible_from[row] for row in rows),
        settled=tuple(layout.settled[row] for row in rows),
        settles=tuple(layout.settles[row] for row in rows),
        page_tokens=layout.page_tokens,
    )


def _blocks(layout: RowLayout, size: int) -> list[int]:
    """How many blocks each row touches from the boundary below `settled` to its last token."""
    counts = []
    for row, settled in enumerate(layout.settled):
        length = layout.length(row)
        tokens = layout.first[row] + length - settled // size * size
        counts.append(-(-tokens // size) if length else 0)
    return counts


class Derived:
    """What is computed on the device from places, once for all layers of a step.

    A recording makes its own: the computation must be part of what is recorded.
    """

    def __init__(self, places: Places) -> None:
        """Compute nothing yet."""
        self._places = places
        self._closing: dict[int, tuple[Tensor, Tensor]] = {}
        self._walks: dict[int, list[Tensor]] = {}

    @cached_property
    def page(self) -> Tensor:
        """[T] int64, the page of each token's own entry."""
        return self.pages_of(self._places.position)

    @cached_property
    def offset(self) -> Tensor:
        """[T] int64, its place on the page."""
        offset: Tensor = self._places.position % self._places.page_tokens
        return offset

    @cached_property
    def tables(self) -> Tensor:
        """[T, C] int32, the page table of each token's row."""
        return self._places.tables.index_select(0, self._places.row)

    @cached_property
    def ends(self) -> Tensor:
        """[B] int32, the index behind each row's last token."""
        ends: Tensor = self._places.begin + self._places.count
        return ends.to(torch.int32)

    @cached_property
    def lengths(self) -> Tensor:
        """[B] int32, the tokens that each row has up to its last one."""
        lengths: Tensor = self._places.first + self._places.count
        return lengths.to(torch.int32)

    @cached_property
    def padding(self) -> Tensor:
        """[T] bool, which tokens are in rows that no request owns."""
        padding: Tensor = self.of_rows(self._places.slot) == SINK_SLOT
        return padding

    def of_rows(self, values: Tensor) -> Tensor:
        """For each token what its row has: [B] to [T]."""
        return values.index_select(0, self._places.row)

    def pages_of(self, positions: Tensor) -> Tensor:
        """Pages of positions [T] or [T, n] of each token's row, int64; any page where none is."""
        columns = (positions // self._places.page_tokens).clamp(0, self.tables.shape[1] - 1)
        flat = columns.view(len(columns), -1)
        pages: Tensor = self.tables.gather(1, flat).view(positions.shape).long()
        return pages

    def walk(self, size: int) -> list[Tensor]:
        """See Places.walk: rows [m] int64 for each block."""
        if size not in self._walks:
            places, made = self._places, []
            for rows in places.walk(size):
                if len(rows) == places.rows:
                    made.append(torch.arange(places.rows, device=places.device))
                else:
                    made.append(torch.tensor(rows, dtype=torch.long, device=places.device))
            self._walks[size] = made
        return self._walks[size]

    def closing(self, ratio: int) -> tuple[Tensor, Tensor]:
        """The tokens that close a window of `ratio` positions.

        Returns:
            [M] int64, which they are, in order, then any; and [M] bool, whether it is one. M is
            what rows as these can have at most.
        """
        if ratio not in self._closing:
            places = self._places
            most = min(places.tokens, places.tokens // ratio + places.rows)
            closes = (places.position + 1) % ratio == 0
            number = closes.cumsum(0)
            found = torch.zeros(most + 1, dtype=torch.long, device=places.device)
            tokens = torch.arange(places.tokens, device=places.device)
            # All tokens that close nothing go to entry 0.
            found.scatter_(0, number.masked_fill(~closes, 0), tokens)
            exists = torch.arange(1, most + 1, device=places.device) <= number[-1:]
            self._closing[ratio] = found[1:], exists
        return self._closing[ratio]
