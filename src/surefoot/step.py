"""The ragged batch of one step. Every kind of row is the same thing, and padding happens only here.

decode row    1 known token
verify row    1 known token and its drafts
prefill row   n known tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.backend.operands import Fold, RowLayout
from surefoot.backend.protocol import Backend
from surefoot.backend.row_operators import RowOperators
from surefoot.ids import SINK_PAGE, SINK_SLOT

NO_GUESSES = torch.empty(0, dtype=torch.long)
_NO_PADDING = torch.empty(0, dtype=torch.bool)


@dataclass(frozen=True)
class Row:
    """One request in one step.

    Attributes:
        tokens: token ids to compute, known tokens first, then drafts that the host knows.
        first: absolute position of tokens[0].
        certain: how many leading tokens are known to stay.
        table: page table of the request.
        slot: its row in the bounded pools.
        visible_from: attention sees no position below.
        wanted: logits are wanted after this many last tokens.
        settled: positions below it are final; `first` for a target's row, less for a drafter's.
        guessed: how many drafts that the host does not know come behind `tokens`.
    """

    tokens: Sequence[int]
    first: int
    certain: int
    table: Sequence[int]
    slot: int
    visible_from: int
    wanted: int
    settled: int
    guessed: int = 0

    @property
    def count(self) -> int:
        """How many tokens are computed."""
        return len(self.tokens) + self.guessed

    @property
    def settles(self) -> int:
        """Positions below it are final after the step."""
        return self.first + self.certain if self.certain else self.settled


class StepSize(NamedTuple):
    """How large the tensors of a step are.

    Attributes:
        rows: R.
        tokens: T.
        wanted: tokens after which logits are wanted.
        tentative: drafted tokens.
    """

    rows: int
    tokens: int
    wanted: int
    tentative: int


@dataclass(frozen=True)
class Batch:
    """A step on its device, as models read it.

    Attributes:
        numbers: [n] int64, one after the other what the next four hold, which are views of it.
        tokens: [T] int64 token ids.
        positions: [T] int64 absolute positions.
        wanted: [R] int64 indices into T of the tokens after which logits are wanted.
        tentative: [n] int64 indices into T of drafted tokens, which may turn out to be wrong.
        padding: [T] bool, which tokens nobody asked for; empty if there are none. They route to no
            expert.
        rows: cache writes and attention for this layout.
    """

    numbers: Tensor
    tokens: Tensor
    positions: Tensor
    wanted: Tensor
    tentative: Tensor
    padding: Tensor
    rows: RowOperators

    @property
    def filled(self) -> tuple[Tensor, ...]:
        """The tensors that `Step.fill` writes."""
        return self.numbers, self.padding

    def wanted_of(self, hidden: Tensor, backend: Backend) -> Tensor:
        """States of the tokens after which logits are wanted, of states [T, ...]; often all."""
        every = len(self.wanted) == len(hidden)
        return hidden if every else backend.pick_rows(hidden, self.wanted)

    def routed(self, choice: Tensor) -> Tensor:
        """A choice of experts [T, n] without that of padding tokens, -1."""
        return choice.masked_fill(self.padding[:, None], -1) if len(self.padding) else choice


@dataclass(frozen=True)
class Step:
    """All rows of one step, on the host.

    Attributes:
        rows: the requests' rows, then padding rows if any.
        live: how many of the rows belong to requests.
        page_tokens: P.
        guesses: [n] int64 on the device, the drafts that the host does not know, row by row;
            UNCHOSEN stands for any token.
    """

    rows: tuple[Row, ...]
    live: int
    page_tokens: int
    guesses: Tensor

    @staticmethod
    def of(rows: Sequence[Row], page_tokens: int, guesses: Tensor = NO_GUESSES) -> Step:
        """A step of these rows and no padding."""
        return Step(tuple(rows), len(rows), page_tokens, guesses)

    @property
    def token_count(self) -> int:
        """T, padding included."""
        return sum(row.count for row in self.rows)

    @property
    def size(self) -> StepSize:
        """What decides how the step is computed, apart from its numbers."""
        certain = sum(min(row.certain, row.count) for row in self.rows)
        tokens, wanted = self.token_count, sum(row.wanted for row in self.rows)
        return StepSize(len(self.rows), tokens, wanted, tokens - certain)

    def pad(self, rows: int, tokens: int) -> Step:
        """The same step grown to `rows` rows of `tokens` tokens in all.

        Padding rows own the sink: padding token j of a row writes offset j mod P of page 0, and
        slot 0. All lengths are derived from the padded rows, so nothing can disagree about them.

        Raises:
            ValueError: the step is larger than asked, or tokens remain with no row to hold them.
        """
        spare_rows, spare_tokens = rows - len(self.rows), tokens - self.token_count
        if spare_rows < 0 or spare_tokens < 0 or (spare_rows == 0) != (spare_tokens == 0):
            have = f"{len(self.rows)} rows and {self.token_count} tokens"
            raise ValueError(f"cannot pad {have} to {rows} rows and {tokens} tokens")
        lengths = _share(spare_tokens, spare_rows)
        added = tuple(_padding_row(length, self.page_tokens) for length in lengths)
        return Step(self.rows + added, self.live, self.page_tokens, self.guesses)

    def build(self, backend: Backend, room: tuple[int, int] = (0, 0)) -> Batch:
        """Make the tensors and the backend's own metadata, all from the same rows.

        Args:
            backend: whose tensors they are.
            room: how many places `wanted` and `tentative` have at least. The last token, which
                must be padding then, stands in those that this step has no use for.
        """
        places, device, padding = self._places(room), backend.device, self._padding()
        numbers = torch.tensor(places.in_a_row, dtype=torch.long, device=device)
        marks = torch.tensor(padding, device=device) if padding else _NO_PADDING
        tokens, positions, wanted, tentative = numbers.split(places.counts)
        rows = backend.rows(self.layout())
        batch = Batch(numbers, tokens, positions, wanted, tentative, marks, rows)
        self._put_guesses(batch, places.guesses)
        return batch

    def fill(self, batch: Batch) -> None:
        """Write this step into the tensors of a batch of as many rows and tokens."""
        places = self._places((len(batch.wanted), len(batch.tentative)))
        batch.numbers.copy_(torch.tensor(places.in_a_row, dtype=torch.long))
        self._put_guesses(batch, places.guesses)
        if padding := self._padding():
            batch.padding.copy_(torch.tensor(padding))

    def layout(self) -> RowLayout:
        """Where the tokens lie, for the backend."""
        starts = [0]
        for row in self.rows:
            starts.append(starts[-1] + row.count)
        return RowLayout(
            starts=tuple(starts),
            first=tuple(row.first for row in self.rows),
            tables=tuple(row.table for row in self.rows),
            slots=tuple(row.slot for row in self.rows),
            visible_from=tuple(row.visible_from for row in self.rows),
            settled=tuple(row.settled for row in self.rows),
            settles=tuple(row.settles for row in self.rows),
            page_tokens=self.page_tokens,
        )

    def _places(self, room: tuple[int, int]) -> _Places:
        places, end = _Places(), 0
        for row in self.rows:
            begin, end = end, end + row.count
            places.tokens.extend((*row.tokens, *[0] * row.guessed))
            places.positions.extend(range(row.first, row.first + row.count))
            places.guesses.extend(range(begin + len(row.tokens), end))
            places.tentative.extend(range(begin + row.certain, end))
            places.wanted.extend(range(end - row.wanted, end))
        _fill_up(places.wanted, room[0], end - 1)
        _fill_up(places.tentative, room[1], end - 1)
        return places

    def _put_guesses(self, batch: Batch, places: list[int]) -> None:
        """Put the drafts that the host does not know in their places among the tokens."""
        if places:
            guesses, tokens = self.guesses.clamp(min=0), batch.tokens
            if len(places) == len(tokens):
                tokens.copy_(guesses)
            else:
                tokens.index_copy_(0, torch.tensor(places, device=tokens.device), guesses)

    def _padding(self) -> list[bool]:
        """For each token whether nobody asked for it; [] if all were asked for."""
        if self.live == len(self.rows):
            return []
        real = sum(row.count for row in self.rows[: self.live])
        return [place >= real for place in range(self.token_count)]


@dataclass(frozen=True, slots=True)
class _Places:
    """All tokens, 0 for one that the host does not know, positions, and the indices of some."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)
    tentative: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)

    @property
    def in_a_row(self) -> list[int]:
        """What a batch's numbers are; one tensor, as each costs."""
        return [*self.tokens, *self.positions, *self.wanted, *self.tentative]

    @property
    def counts(self) -> list[int]:
        """How many there are of each."""
        return [len(part) for part in (self.tokens, self.positions, self.wanted, self.tentative)]


def fold_due(slot: int, settled: int, final: int, block: int) -> Fold | None:
    """The fold that a slot's checkpoint needs once accepted drafts are final.

    Args:
        slot: row in the bounded pools.
        settled: positions below were final after the forward pass, which brought the checkpoint
            to the last block boundary up to there.
        final: positions below are final now; at most one block more.
        block: tokens of a block.
    """
    base = settled // block * block
    return Fold(slot, base) if final >= base + block else None


def _padding_row(length: int, page_tokens: int) -> Row:
    table = [SINK_PAGE] * -(-length // page_tokens)
    return Row([0] * length, 0, length, table, SINK_SLOT, 0, 0, 0)


def _share(total: int, parts: int) -> list[int]:
    """Split `total` into `parts` numbers that differ by at most one."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def _fill_up(places: list[int], count: int, by: int) -> None:
    """Add `by` until there are `count` places."""
    places.extend([by] * (count - len(places)))
