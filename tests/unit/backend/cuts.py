"""Ways to cut the same sequences into steps, and a machine that computes them.

A script says, step by step, which tokens of which sequence are computed, and how many wrong drafts
follow them. However a sequence is cut, its outputs must come out the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from surefoot.backend.protocol import Backend
from surefoot.ids import PageId, SlotId
from surefoot.state.ledger import Clear, Work
from surefoot.state.plan import MemoryPlan
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec, Paged, Ring
from surefoot.step import Batch, Row, Step

GARBAGE = 1e30


@dataclass(frozen=True)
class Piece:
    """A row: `count` tokens of a sequence from `first` on, then `wrong` rejected drafts."""

    sequence: int
    first: int
    count: int
    wrong: int = 0


Script = Sequence[Sequence[Piece]]
Pad = Callable[[Step], Step]


class Computes(Protocol):
    """A model, or something smaller that writes caches and gives one output a token."""

    @property
    def caches(self) -> Sequence[CacheSpec]: ...

    def compute(self, batch: Batch, pools: Pools) -> Tensor: ...


@dataclass(frozen=True)
class Setting:
    """Where sequences are computed.

    Attributes:
        sequences: token ids of each.
        page_tokens: P.
        depth: most drafted tokens of a row.
        dirty: fill what lies past the cursor with garbage after every step.
        garbage: what that is; tiles need it finite, since only a weight of zero hides it.
        scatter: hand pages out in random order instead of runs.
    """

    sequences: Sequence[Sequence[int]]
    page_tokens: int = 8
    depth: int = 4
    dirty: bool = True
    garbage: float = GARBAGE
    scatter: bool = True

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.sequences]


def sequences_of(seed: int, vocab: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for length in lengths]


def alone(lengths: Sequence[int]) -> Script:
    """Each sequence in one step of its own."""
    return [[Piece(index, 0, length)] for index, length in enumerate(lengths)]


def together(lengths: Sequence[int]) -> Script:
    """All sequences whole, in one step."""
    return [[Piece(index, 0, length) for index, length in enumerate(lengths)]]


def one_by_one(lengths: Sequence[int]) -> Script:
    """Token by token, all sequences side by side."""
    return [
        [Piece(index, place, 1) for index, length in enumerate(lengths) if place < length]
        for place in range(max(lengths))
    ]


def rejecting(lengths: Sequence[int], depth: int) -> Script:
    """Token by token, each time with as many wrong drafts as a row can carry."""
    return [
        [Piece(piece.sequence, piece.first, 1, depth) for piece in step]
        for step in one_by_one(lengths)
    ]


def shuffled(lengths: Sequence[int], depth: int, rng: random.Random) -> Script:
    """Any mix of chunks, decode rows and verify rows of some of the sequences at a time."""
    cursors = [0] * len(lengths)
    script: list[list[Piece]] = []
    while unfinished := [i for i, at in enumerate(cursors) if at < lengths[i]]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        step = [_piece(i, cursors[i], lengths[i], depth, rng) for i in chosen]
        for piece in step:
            cursors[piece.sequence] += piece.count
        script.append(step)
    return script


def _piece(sequence: int, first: int, length: int, depth: int, rng: random.Random) -> Piece:
    left = length - first
    if rng.random() < 0.4:
        return Piece(sequence, first, rng.randint(1, left))
    right = rng.randint(0, min(depth, left - 1))
    return Piece(sequence, first, 1 + right, rng.randint(0, depth - right))


def unpadded(step: Step) -> Step:
    return step


def padded(step: Step) -> Step:
    """Two more rows, of uneven length when there is an odd number of tokens."""
    return step.pad(len(step.rows) + 2, step.token_count + 3 + step.token_count % 7)


PADS: Sequence[Pad] = (unpadded, padded)


class Machine:
    """Computes scripts on caches of its own, in which everything unowned is NaN."""

    def __init__(self, model: Computes, backend: Backend, setting: Setting) -> None:
        self._model, self._backend, self._setting = model, backend, setting
        size, count = setting.page_tokens, len(setting.sequences)
        needs = [-(-(length + setting.depth) // size) for length in setting.lengths]
        pages = sum(needs) + 2
        self.pools = Pools(model.caches, plan_of(setting, pages, count + 1), backend.device)
        self.pools.poison(
            [PageId(i) for i in range(pages + 1)],
            [SlotId(i) for i in range(count + 2)],
            [],
            float("nan"),
        )
        ids = list(range(1, pages + 1))
        if setting.scatter:
            random.Random(count).shuffle(ids)
        self.tables = [[PageId(ids.pop()) for _ in range(need)] for need in needs]
        self.slots = [SlotId(i + 2) for i in range(count)]
        pages_of_all = [page for table in self.tables for page in table]
        self.pools.apply(Work(pages_of_all, [Clear(slot) for slot in self.slots]))
        self.cursors = [0] * count
        self._noise = random.Random(5)

    @torch.inference_mode()
    def play(self, script: Script, pad: Pad = unpadded) -> list[Tensor]:
        """Outputs of every sequence, [length, ...] each."""
        parts: list[list[Tensor]] = [[] for _ in self._setting.sequences]
        for pieces in script:
            rows = [self._row(piece) for piece in pieces]
            step = Step.of(rows, self._setting.page_tokens)
            out = self._model.compute(pad(step).build(self._backend), self.pools)
            at = 0
            for piece in pieces:
                parts[piece.sequence].append(out[at : at + piece.count])
                at += piece.count + piece.wrong
                self.cursors[piece.sequence] += piece.count
            self._commit(pieces, rows)
            if self._setting.dirty:
                self._spoil()
        return [torch.cat(part) for part in parts]

    def _commit(self, pieces: Sequence[Piece], rows: Sequence[Row]) -> None:
        """Nothing is left to do for caches whose entries stay where they are."""

    def _row(self, piece: Piece) -> Row:
        assert piece.first == self.cursors[piece.sequence], "a script computes in order"
        assert piece.wrong <= self._setting.depth
        tokens = self._setting.sequences[piece.sequence]
        known = list(tokens[piece.first : piece.first + piece.count])
        vocab = 1 + max(map(max, self._setting.sequences))
        return Row(
            tokens=known + [self._noise.randrange(vocab) for _ in range(piece.wrong)],
            first=piece.first,
            certain=piece.count,
            table=self.tables[piece.sequence],
            slot=self.slots[piece.sequence],
            visible_from=0,
            wanted=len(known) + piece.wrong,
            settled=piece.first,
        )

    def _spoil(self) -> None:
        """Overwrite everything of the sequences that is not below their cursors."""
        for spec in self._model.caches:
            assert isinstance(spec, Paged | Ring), "no test here has another kind"
            for name in (part.name for part in spec.parts):
                for index, cursor in enumerate(self.cursors):
                    if isinstance(spec, Paged):
                        pool = self.pools.paged(spec.name, name)
                        self._spoil_pages(pool, index, cursor, spec.ratio)
                    else:
                        ring = self.pools.rows(spec.name, name)
                        self._spoil_ring(ring, index, cursor, spec.window)

    def _spoil_pages(self, pool: Tensor, index: int, cursor: int, ratio: int) -> None:
        size = self._setting.page_tokens
        for place, page in enumerate(self.tables[index]):
            complete = max(0, cursor - place * size) // ratio
            pool[:, page].movedim(-2, 0)[complete:] = self._setting.garbage

    def _spoil_ring(self, ring: Tensor, index: int, cursor: int, window: int) -> None:
        capacity = ring.shape[2]
        kept = {position % capacity for position in range(max(0, cursor - window + 1), cursor)}
        spoiled = [column for column in range(capacity) if column not in kept]
        ring[:, self.slots[index], spoiled] = self._setting.garbage


def plan_of(setting: Setting, pages: int, slots: int) -> MemoryPlan:
    return MemoryPlan(
        page_tokens=setting.page_tokens,
        draft_tokens=setting.depth,
        pages=pages,
        slots=slots,
        points=0,
        page_bytes=0,
        slot_bytes=0,
        point_bytes=0,
        bounded=True,
        capacities={},
    )


def same_bits(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def differing_cuts(
    model: Computes, backend: Backend, setting: Setting, seed: int, pads: Sequence[Pad] = PADS
) -> list[str]:
    """Names of the cuts whose bits are not those of each sequence computed alone and whole."""
    lengths, rng = setting.lengths, random.Random(seed)
    want = Machine(model, backend, setting).play(alone(lengths))
    assert all(bool(out.isfinite().all()) for out in want)
    cuts = {
        "together": together(lengths),
        "one by one": one_by_one(lengths),
        "rejecting": rejecting(lengths, setting.depth),
        "shuffled": shuffled(lengths, setting.depth, rng),
        "shuffled again": shuffled(lengths, setting.depth, rng),
    }
    return [
        f"{name}, {pad.__name__}"
        for name, script in cuts.items()
        for pad in pads
        if not same_bits(Machine(model, backend, setting).play(script, pad), want)
    ]


def assert_row_invariant(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Slices, copies of slices and another order of x give the bits that the whole gives."""
    whole, count = run(x), len(x)
    for start, stop in ((0, 1), (3, 4), (1, 3), (2, 7), (5, 22), (1, count), (0, count - 1)):
        assert torch.equal(run(x[start:stop]), whole[start:stop]), (start, stop)
        assert torch.equal(run(x[start:stop].clone()), whole[start:stop]), (start, stop)
    assert torch.equal(run(torch.cat((x[7:], x[:7]))), torch.cat((whole[7:], whole[:7])))
    assert run(x[:0]).shape == (0, *whole.shape[1:])
