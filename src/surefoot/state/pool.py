"""The tensors behind the cache specs; who may use which page or row is the ledger's business."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.ids import PageId, PointId, SlotId
from surefoot.state.ledger import Clear, Restore, Save, Work
from surefoot.state.plan import MemoryPlan
from surefoot.state.spec import CacheSpec, Paged, Part, Recurrent, Ring, in_points

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
}


@dataclass(frozen=True)
class _Saved:
    """What resume points hold of one tensor, or of a span of its last axis.

    Attributes:
        rows: [layers, slots, columns, *shape] of a ring, [layers, slots, *shape] of a checkpoint.
        points: the same by point, with `columns` of a ring's columns: the last ones in order.
        columns: None for a checkpoint.
    """

    rows: Tensor
    points: Tensor
    columns: int | None

    def pieces(self, slot: SlotId, point: PointId, end: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A slot row and a point in pieces that match; the state is that behind `end` positions."""
        row, saved = self.rows[:, slot], self.points[:, point]
        if self.columns is None:
            yield row, saved
            return
        begin = (end - self.columns) % row.shape[1]
        first = min(self.columns, row.shape[1] - begin)
        yield row[:, begin : begin + first], saved[:, :first]
        if first < self.columns:
            yield row[:, : self.columns - first], saved[:, first:]


class Pools:
    """One tensor for each part of each cache; the first axis is the layer.

    A page of a part with shape (*lead, dim) is laid out (*lead, entries, dim), so that a page of
    one head is a matrix. Page 0 and slot 0 are the sink. Resume points have tensors of their own,
    with what a slot row must hold at the end of a page and no more.
    """

    def __init__(self, specs: Sequence[CacheSpec], plan: MemoryPlan, device: torch.device) -> None:
        """Allocate zeroed pools of `plan` for all `specs` on `device`."""
        self.device = device
        self._paged: dict[tuple[str, str], Tensor] = {}
        self._rows: dict[tuple[str, str], Tensor] = {}
        self._cleared: list[Tensor] = []
        self._saved: dict[tuple[str, str], list[_Saved]] = {}
        for spec in specs:
            if isinstance(spec, Paged):
                entries = plan.page_tokens // spec.ratio
                for part in spec.parts:
                    shape = (spec.layers, 1 + plan.pages, *_page_shape(part, entries))
                    self._paged[spec.name, part.name] = _zeros(shape, part, device)
            elif isinstance(spec, Ring):
                self._add_ring(spec, spec.parts, plan)
            else:
                self._add_ring(spec, spec.inputs, plan)
                self._add_checkpoint(spec, plan)
        both = (self._paged | self._rows).items()
        self._layers = {name: pool.unbind(0) for name, pool in both}
        self._every = {name: pool.flatten(0, 1) for name, pool in self._rows.items()}

    def _add_ring(self, spec: Ring | Recurrent, parts: Sequence[Part], plan: MemoryPlan) -> None:
        """The tensors of a ring, and what points hold of it; of a checkpoint's inputs nothing."""
        held = spec.held if isinstance(spec, Ring) else None
        for part in parts:
            shape = (spec.layers, 1 + plan.slots, spec.capacity(plan.draft_tokens), *part.shape)
            rows = self._rows[spec.name, part.name] = _zeros(shape, part, self.device)
            if in_points(spec):
                self._cleared.append(rows)
            if held is None:
                continue
            for start, stop in held.spans_of(part):
                kept = (spec.layers, plan.points, held.columns, *part.shape[:-1], stop - start)
                saved = _Saved(rows[..., start:stop], _zeros(kept, part, self.device), held.columns)
                self._saved.setdefault((spec.name, part.name), []).append(saved)

    def _add_checkpoint(self, spec: Recurrent, plan: MemoryPlan) -> None:
        for part in spec.state:
            shape, kept = ((spec.layers, n, *part.shape) for n in (1 + plan.slots, plan.points))
            rows = self._rows[spec.name, part.name] = _zeros(shape, part, self.device)
            self._cleared.append(rows)
            saved = _Saved(rows, _zeros(kept, part, self.device), None)
            self._saved[spec.name, part.name] = [saved]

    def paged(self, cache: str, part: str) -> Tensor:
        """[layers, pages, *lead, entries, dim] of a `Paged` cache."""
        return self._paged[cache, part]

    def rows(self, cache: str, part: str) -> Tensor:
        """[layers, slots, capacity, *shape] of a ring, [layers, slots, *shape] of a checkpoint."""
        return self._rows[cache, part]

    def layers(self, cache: str, part: str) -> Sequence[Tensor]:
        """The same as `paged` or `rows`, layer by layer; made once, as models ask in every step."""
        return self._layers[cache, part]

    def every_row(self, cache: str, part: str) -> Tensor:
        """The same as `rows`, [layers * slots, ...]: slot row s of layer l is row l * slots + s."""
        return self._every[cache, part]

    def apply(self, work: Work) -> None:
        """Zero newly handed-out pages; save, restore and clear slot rows in the order recorded.

        A column that attention masks is still multiplied by zero, so it has to be finite: a slot
        row is cleared before a point is restored to it, which does not fill it.
        """
        if work.clear_pages:
            self._fill(self._paged.values(), work.clear_pages, 0)
        for move in work.moves:
            match move:
                case Clear(slot):
                    self._clear(slot)
                case Save(slot, point, end):
                    for row, saved in self._pieces(slot, point, end):
                        saved.copy_(row)
                case Restore(point, slot, end):
                    self._clear(slot)
                    for row, saved in self._pieces(slot, point, end):
                        row.copy_(saved)

    def _clear(self, slot: SlotId) -> None:
        for pool in self._cleared:
            pool[:, slot] = 0

    def _pieces(self, slot: SlotId, point: PointId, end: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A slot row and a resume point, all that points hold of all caches."""
        for each in self._saved.values():
            for saved in each:
                yield from saved.pieces(slot, point, end)

    def poison(
        self,
        pages: Sequence[PageId],
        slots: Sequence[SlotId],
        points: Sequence[PointId],
        value: float,
    ) -> None:
        """Fill these with `value`: tests show with it that nobody reads them."""
        self._fill(_floats(self._paged.values()), pages, value)
        self._fill(_floats(self._rows.values()), slots, value)
        self._fill(_floats(self._points()), points, value)

    def _fill(self, pools: Iterable[Tensor], index: Sequence[int], value: float) -> None:
        places = torch.tensor(index, dtype=torch.long, device=self.device)
        for pool in pools:
            pool.index_fill_(1, places, value)

    def _points(self) -> list[Tensor]:
        return [saved.points for each in self._saved.values() for saved in each]

    @property
    def bytes(self) -> int:
        """What all pools take."""
        pools = (*self._paged.values(), *self._rows.values(), *self._points())
        return sum(pool.numel() * pool.element_size() for pool in pools)


def _page_shape(part: Part, entries: int) -> tuple[int, ...]:
    return (*part.shape[:-1], entries, part.shape[-1])


def _zeros(shape: tuple[int, ...], part: Part, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=DTYPES[part.dtype], device=device)


def _floats(pools: Iterable[Tensor]) -> list[Tensor]:
    return [pool for pool in pools if pool.is_floating_point()]
