"""The tensors behind the cache specs; who may use which page or row is the ledger's business."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from surefoot.ids import PageId, SlotId
from surefoot.state.ledger import Work
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


class Pools:
    """One tensor for each part of each cache; the first axis is the layer.

    A page of a part with shape (*lead, dim) is laid out (*lead, entries, dim), so that a page of
    one head is a matrix. Page 0 and slot 0 are the sink.
    """

    def __init__(self, specs: Sequence[CacheSpec], plan: MemoryPlan, device: torch.device) -> None:
        """Allocate zeroed pools of `plan` for all `specs` on `device`."""
        self.device = device
        self._paged: dict[tuple[str, str], Tensor] = {}
        self._rows: dict[tuple[str, str], Tensor] = {}
        self._saved: list[Tensor] = []
        rows = 1 + plan.slots + plan.points
        for spec in specs:
            if isinstance(spec, Paged):
                entries = plan.page_tokens // spec.ratio
                for part in spec.parts:
                    shape = (spec.layers, 1 + plan.pages, *_page_shape(part, entries))
                    self._paged[spec.name, part.name] = _zeros(shape, part, device)
            else:
                made = self._add_rows(spec, rows, plan.draft_tokens, device)
                self._saved += made if in_points(spec) else []
        both = (self._paged | self._rows).items()
        self._layers = {name: pool.unbind(0) for name, pool in both}

    def _add_rows(
        self, spec: Ring | Recurrent, rows: int, draft: int, device: torch.device
    ) -> list[Tensor]:
        """Make and return the pools of one bounded cache."""
        made: dict[tuple[str, str], Tensor] = {}
        for part in spec.parts if isinstance(spec, Ring) else spec.inputs:
            shape = (spec.layers, rows, spec.capacity(draft), *part.shape)
            made[spec.name, part.name] = _zeros(shape, part, device)
        for part in spec.state if isinstance(spec, Recurrent) else ():
            made[spec.name, part.name] = _zeros((spec.layers, rows, *part.shape), part, device)
        self._rows |= made
        return list(made.values())

    def paged(self, cache: str, part: str) -> Tensor:
        """[layers, pages, *lead, entries, dim] of a `Paged` cache."""
        return self._paged[cache, part]

    def rows(self, cache: str, part: str) -> Tensor:
        """[layers, rows, capacity, *shape] of a ring, [layers, rows, *shape] of a checkpoint."""
        return self._rows[cache, part]

    def layers(self, cache: str, part: str) -> Sequence[Tensor]:
        """The same as `paged` or `rows`, layer by layer; made once, as models ask in every step."""
        return self._layers[cache, part]

    def apply(self, work: Work) -> None:
        """Zero newly handed-out pages; clear and copy slot rows in the order recorded.

        A column that attention masks is still multiplied by zero, so it has to be finite.
        """
        if work.clear_pages:
            _fill(self._paged.values(), work.clear_pages, 0)
        for source, target in work.copies:
            for pool in self._saved:
                pool[:, target] = 0 if source is None else pool[:, source]

    def poison(self, pages: Sequence[PageId], rows: Sequence[SlotId], value: float) -> None:
        """Fill pages and slot rows with `value`: tests show with it that nobody reads them."""
        floats = [pool for pool in self._paged.values() if pool.is_floating_point()]
        _fill(floats, pages, value)
        _fill([pool for pool in self._rows.values() if pool.is_floating_point()], rows, value)

    @property
    def bytes(self) -> int:
        """What all pools take."""
        pools = (*self._paged.values(), *self._rows.values())
        return sum(pool.numel() * pool.element_size() for pool in pools)


def _page_shape(part: Part, entries: int) -> tuple[int, ...]:
    return (*part.shape[:-1], entries, part.shape[-1])


def _zeros(shape: tuple[int, ...], part: Part, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=DTYPES[part.dtype], device=device)


def _fill(pools: Iterable[Tensor], index: Sequence[int], value: float) -> None:
    for pool in pools:
        pool.index_fill_(1, torch.tensor(index, dtype=torch.long, device=pool.device), value)
