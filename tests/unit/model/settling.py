"""A machine for models with recurrent layers: accepted drafts are not certain until they settle.

It plays the scripts of `cuts`. A piece that fits a verify row is one: its first token is certain,
the others are drafts, of which the right ones stay. Checkpoints that fall due are folded then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surefoot.backend.operands import Fold
from surefoot.backend.protocol import Backend
from surefoot.model.model import Model
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec, Paged, Recurrent, Ring
from surefoot.step import Batch, Row
from tests.unit.backend.cuts import (
    GARBAGE,
    Machine,
    Pad,
    Piece,
    Script,
    Setting,
    alone,
    plan_of,
    same_bits,
)

BLOCK = 16


def make_pools(model: Model, backend: Backend, setting: Setting, pages: int, slots: int) -> Pools:
    return Pools(_Described(model).caches, plan_of(setting, pages, slots), backend.device)


@dataclass(frozen=True)
class _Described:
    """A model as `Machine` computes it, its draft head's caches beside its own."""

    model: Model

    @property
    def caches(self) -> Sequence[CacheSpec]:
        return (*self.model.description.caches, *self.model.description.draft_caches)

    def compute(self, batch: Batch, pools: Pools) -> Tensor:
        return self.model.logits(self.model.forward(batch, pools))


class SettlingMachine(Machine):
    """Computes scripts on caches of its own; what is unowned or past the cursor is spoiled."""

    def __init__(self, model: Model, backend: Backend, setting: Setting) -> None:
        super().__init__(_Described(model), backend, setting)
        self._settling = model

    def kept(self) -> list[Tensor]:
        """Everything the caches hold of the sequences up to their cursors."""
        return [
            torch.cat([part.flatten() for part in self._kept(index, cursor)])
            for index, cursor in enumerate(self.cursors)
        ]

    def _commit(self, pieces: Sequence[Piece], rows: Sequence[Row]) -> None:
        folds = []
        for piece, row in zip(pieces, rows, strict=True):
            base = BLOCK * (row.settles // BLOCK)
            if self.cursors[piece.sequence] >= base + BLOCK:
                folds.append(Fold(row.slot, base))
        if folds:
            self._settling.fold(folds, self.pools)

    def _row(self, piece: Piece) -> Row:
        row = super()._row(piece)
        verify = len(row.tokens) <= self._setting.depth + 1
        return replace(row, certain=1) if verify else row

    def _spoil(self) -> None:
        """Overwrite everything of the sequences that is not kept."""
        for spec in self._settling.description.caches:
            for part in spec.inputs if isinstance(spec, Recurrent) else spec.parts:
                for index, cursor in enumerate(self.cursors):
                    if isinstance(spec, Paged):
                        pool = self.pools.paged(spec.name, part.name)
                        self._spoil_pages(pool, index, cursor, spec.ratio)
                    else:
                        ring = self.pools.rows(spec.name, part.name)[:, self.slots[index]]
                        columns = set(range(ring.shape[1])) - set(_columns(spec, ring, cursor))
                        ring[:, sorted(columns)] = GARBAGE

    def _kept(self, index: int, cursor: int) -> list[Tensor]:
        parts, size = [], self._setting.page_tokens
        for spec in self._settling.description.caches:
            if isinstance(spec, Paged):
                for name in (part.name for part in spec.parts):
                    pages = self.pools.paged(spec.name, name)[:, self.tables[index]]
                    complete = cursor // spec.ratio
                    entries = pages.movedim(-2, 2).flatten(1, 2)[:, :complete]
                    assert entries.shape[1] == complete <= len(self.tables[index]) * size
                    parts.append(entries)
                continue
            for part in spec.inputs if isinstance(spec, Recurrent) else spec.parts:
                ring = self.pools.rows(spec.name, part.name)[:, self.slots[index]]
                parts.append(ring[:, _columns(spec, ring, cursor)])
            state = spec.state if isinstance(spec, Recurrent) else ()
            names = [part.name for part in state]
            parts += [self.pools.rows(spec.name, name)[:, self.slots[index]] for name in names]
        return parts


def _columns(spec: Ring | Recurrent, ring: Tensor, cursor: int) -> list[int]:
    """Columns that hold positions which later tokens read, in order of position."""
    first = BLOCK * (cursor // BLOCK) if isinstance(spec, Recurrent) else cursor - spec.window
    return [position % ring.shape[1] for position in range(max(0, first), cursor)]


def differing(
    model: Model, backend: Backend, setting: Setting, scripts: Mapping[str, Script], pad: Pad
) -> list[str]:
    """Names of the scripts whose logits or caches differ in a bit from those of one uncut run."""
    whole = SettlingMachine(model, backend, setting)
    want = whole.play(alone(setting.lengths)) + whole.kept()
    assert all(bool(part.isfinite().all()) for part in want)
    differs = []
    for name, script in scripts.items():
        machine = SettlingMachine(model, backend, setting)
        if not same_bits(machine.play(script, pad) + machine.kept(), want):
            differs.append(name)
    return differs
