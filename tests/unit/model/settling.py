"""A machine for models with recurrent layers: accepted drafts are not certain until they settle.

It plays the scripts of `cuts`. A piece that fits a verify row is one: its first token is certain,
the others are drafts, of which the right ones stay. Checkpoints that fall due are folded then.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surefoot.backend.protocol import Backend, Fold
from surefoot.ids import SINK_PAGE, SINK_SLOT, PageId, SlotId
from surefoot.model.model import Model
from surefoot.state.ledger import Work
from surefoot.state.plan import MemoryPlan
from surefoot.state.pool import Pools
from surefoot.state.spec import Paged, Recurrent, Ring
from surefoot.step import Row, Step
from tests.unit.backend.cuts import (
    GARBAGE,
    Pad,
    Piece,
    Script,
    Setting,
    alone,
    same_bits,
    unpadded,
)

BLOCK = 16
NAN = float("nan")


def make_pools(model: Model, backend: Backend, setting: Setting, pages: int, slots: int) -> Pools:
    plan = MemoryPlan(
        page_tokens=setting.page_tokens,
        draft_tokens=setting.depth,
        pages=pages,
        slots=slots,
        points=0,
        page_bytes=0,
        slot_bytes=0,
        bounded=True,
        capacities={},
    )
    description = model.description
    return Pools((*description.caches, *description.draft_caches), plan, backend.device)


class SettlingMachine:
    """Computes scripts on caches of its own; what is unowned or past the cursor is spoiled."""

    def __init__(self, model: Model, backend: Backend, setting: Setting) -> None:
        self._model, self._backend, self._setting = model, backend, setting
        size, count = setting.page_tokens, len(setting.sequences)
        needs = [-(-(length + setting.depth) // size) for length in setting.lengths]
        pages = sum(needs) + 2
        self.pools = make_pools(model, backend, setting, pages, count + 1)
        self.pools.poison(
            [PageId(i + 1) for i in range(pages)], [SlotId(i + 1) for i in range(count + 1)], NAN
        )
        self.pools.poison([SINK_PAGE], [SINK_SLOT], float("nan"))
        ids = list(range(1, pages + 1))
        random.Random(count).shuffle(ids)
        self.tables = [[PageId(ids.pop()) for _ in range(need)] for need in needs]
        self.slots = [SlotId(i + 2) for i in range(count)]
        clear = Work([page for table in self.tables for page in table])
        clear.copies = [(None, slot) for slot in self.slots]
        self.pools.apply(clear)
        self.cursors = [0] * count
        self._noise = random.Random(5)

    @torch.inference_mode()
    def play(self, script: Script, pad: Pad = unpadded) -> list[Tensor]:
        """Logits of every sequence, [length, vocabulary] each."""
        parts: list[list[Tensor]] = [[] for _ in self._setting.sequences]
        for pieces in script:
            rows = [self._row(piece) for piece in pieces]
            step = pad(Step.of(rows, self._setting.page_tokens))
            hidden = self._model.forward(step.build(self._backend), self.pools)
            logits, at = self._model.logits(hidden), 0
            for piece in pieces:
                parts[piece.sequence].append(logits[at : at + piece.count])
                at += piece.count + piece.wrong
            self._commit(pieces, rows)
            self._spoil()
        return [torch.cat(part) for part in parts]

    def kept(self) -> list[Tensor]:
        """Everything the caches hold of the sequences up to their cursors."""
        return [
            torch.cat([part.flatten() for part in self._kept(index, cursor)])
            for index, cursor in enumerate(self.cursors)
        ]

    def _commit(self, pieces: Sequence[Piece], rows: Sequence[Row]) -> None:
        folds = []
        for piece, row in zip(pieces, rows, strict=True):
            self.cursors[piece.sequence] += piece.count
            base = BLOCK * (row.settles // BLOCK)
            if self.cursors[piece.sequence] >= base + BLOCK:
                folds.append(Fold(row.slot, base))
        if folds:
            self._model.fold(folds, self.pools)

    def _row(self, piece: Piece) -> Row:
        assert piece.first == self.cursors[piece.sequence], "a script computes in order"
        tokens = self._setting.sequences[piece.sequence]
        known = list(tokens[piece.first : piece.first + piece.count])
        vocab = 1 + max(map(max, self._setting.sequences))
        verify = piece.count + piece.wrong <= self._setting.depth + 1
        return Row(
            tokens=known + [self._noise.randrange(vocab) for _ in range(piece.wrong)],
            first=piece.first,
            certain=1 if verify else piece.count,
            table=self.tables[piece.sequence],
            slot=self.slots[piece.sequence],
            visible_from=0,
            wanted=len(known) + piece.wrong,
            settled=piece.first,
        )

    def _spoil(self) -> None:
        """Overwrite everything of the sequences that is not kept."""
        for spec in self._model.description.caches:
            for part in spec.inputs if isinstance(spec, Recurrent) else spec.parts:
                for index, cursor in enumerate(self.cursors):
                    if isinstance(spec, Paged):
                        self._spoil_pages(self.pools.paged(spec.name, part.name), index, cursor)
                    else:
                        ring = self.pools.rows(spec.name, part.name)[:, self.slots[index]]
                        columns = set(range(ring.shape[1])) - set(_columns(spec, ring, cursor))
                        ring[:, sorted(columns)] = GARBAGE

    def _spoil_pages(self, pool: Tensor, index: int, cursor: int) -> None:
        size = self._setting.page_tokens
        for place, page in enumerate(self.tables[index]):
            pool[:, page, :, max(0, cursor - place * size) :] = GARBAGE

    def _kept(self, index: int, cursor: int) -> list[Tensor]:
        parts, size = [], self._setting.page_tokens
        for spec in self._model.description.caches:
            if isinstance(spec, Paged):
                for name in (part.name for part in spec.parts):
                    pages = self.pools.paged(spec.name, name)[:, self.tables[index]]
                    entries = pages.movedim(3, 2).flatten(1, 2)[:, :cursor]
                    assert entries.shape[1] == cursor <= len(self.tables[index]) * size
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
