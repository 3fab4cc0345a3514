"""Whether a recorded step holds numbers of the host, which would stay the same in every replay.

The step's work is done twice more for rows that lie elsewhere, with other tokens. No kernel runs
and no cache is written, so that costs little. Each call must then be given what it
was given before: the same numbers, the same weights and caches, and what was made or is written
anew at the same place. Whatever else differs depends on the rows, and was frozen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from surefoot.backend.operands import LayoutBounds, RowLayout

Span = tuple[int, int]
"""Where memory begins and ends."""


def span_of(held: Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Span:
    """The memory that belongs to a tensor, shown or not, or to an array that owns its own."""
    if isinstance(held, Tensor):
        storage = held.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return held.ctypes.data, held.ctypes.data + held.nbytes


class Memory:
    """Tells memory that a step has made by its number, and other memory by its address."""

    def __init__(self, made: Sequence[Span]) -> None:
        """Know what was made, in order; of what overlaps only the last still exists."""
        self._spans: list[tuple[int, int, int]] = []
        for number in range(len(made) - 1, -1, -1):
            begin, end = made[number]
            place = bisect_right(self._spans, (begin, end, number))
            before = self._spans[place - 1][1] if place else begin
            after = self._spans[place][0] if place < len(self._spans) else end
            if before <= begin < end <= after:
                self._spans.insert(place, (begin, end, number))

    def _place(self, address: int) -> tuple[int, int]:
        place = bisect_right(self._spans, (address, float("inf"), 0)) - 1
        if place >= 0 and address < self._spans[place][1]:
            begin, _, number = self._spans[place]
            return number, address - begin
        return -1, address

    def told(self, value: object) -> object:
        """What a call was given, such that equal things are equal in every recording of a step."""
        if isinstance(value, np.ndarray):
            where = self._place(value.ctypes.data) if value.size else None
            return "array", where, value.dtype.str, value.shape, value.strides
        if isinstance(value, Tensor):
            if value.layout != torch.strided:
                return "packed", id(value)
            where = self._place(value.data_ptr()) if value.numel() else None
            return "tensor", where, value.dtype, tuple(value.shape), value.stride()
        if isinstance(value, list | tuple):
            return tuple(self.told(part) for part in value)
        if isinstance(value, Mapping):
            return tuple((name, self.told(part)) for name, part in value.items())
        if isinstance(value, int | float | np.generic):
            return type(value).__name__, repr(value)
        return value


def moved(layout: RowLayout, bounds: LayoutBounds) -> tuple[RowLayout, RowLayout]:
    """Two steps of the same size, their rows near the start of their tables and near the end.

    Whatever grows with positions or pages differs between the two, and so from one of them at
    least; the rows' order and slots differ from both.
    """
    lengths = [layout.length(row) for row in range(len(layout.first))][::-1]
    rooms = [bounds.longest_table * layout.page_tokens - length for length in lengths]
    early = [min(row, room) for row, room in enumerate(rooms)]
    late = [max(room - row, 0) for row, room in enumerate(rooms)]
    return _at(layout, lengths, early, 0), _at(layout, lengths, late, int(bounds.bounded))


def _at(layout: RowLayout, lengths: list[int], first: list[int], hidden: int) -> RowLayout:
    """Rows of these lengths and first positions; of those before, 0 or all are hidden."""
    spans = list(zip(first, lengths, strict=True))
    pages = [-(-(begin + length) // layout.page_tokens) for begin, length in spans]
    ahead = [a - b for a, b in zip(layout.settles, layout.first, strict=True)][::-1]
    return RowLayout(
        starts=tuple(accumulate(lengths, initial=0)),
        first=tuple(first),
        tables=tuple(list(range(1, 1 + count)) for count in pages),
        slots=tuple(slot + 1 + hidden for slot in layout.slots[::-1]),
        visible_from=tuple(hidden * begin for begin in first),
        settled=tuple(first),
        settles=tuple(begin + max(0, more) for begin, more in zip(first, ahead, strict=True)),
        page_tokens=layout.page_tokens,
    )


@contextmanager
def emptied(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let tensors hold zeros inside, and afterwards what they held before."""
    kept = [(tensor, tensor.clone()) for tensor in tensors]
    for tensor, _ in kept:
        tensor.zero_()
    try:
        yield
    finally:
        for tensor, held in kept:
            tensor.copy_(held)
