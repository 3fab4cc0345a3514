"""The ragged batch of one step. Every kind of row is the same thing, and padding happens only here.

decode row    1 known token
verify row    1 known token and its drafts
prefill row   n known tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import Fold, RowLayout
from surefoot.backend.protocol import Backend
from surefoot.backend.row_operators import RowOperators
from surefoot.ids import SINK_PAGE, SINK_SLOT


@dataclass(frozen=True)
class Row:
    """One request in one step.

    Attributes:
        tokens: token ids to compute, known tokens first, then drafts.
        first: absolute position of tokens[0].
        certain: how many leading tokens are known to stay.
        table: page table of the request.
        slot: its row in the bounded pools.
        visible_from: attention sees no position below.
        wanted: logits are wanted after this many last tokens.
        settled: positions below it are final; `first` for a target's row, less for a drafter's.
    """

    tokens: Sequence[int]
    first: int
    certain: int
    table: Sequence[int]
    slot: int
    visible_from: int
    wanted: int
    settled: int

    @property
    def settles(self) -> int:
        """Positions below it are final after the step."""
        return self.first + self.certain if self.certain else self.settled


@dataclass(frozen=True)
class Batch:
    """A step on its device, as models read it.

    Attributes:
        tokens: [T] int64 token ids.
        positions: [T] int64 absolute positions.
        wanted: [R] int64 indices into T of the tokens after which logits are wanted.
        tentative: [n] int64 indices into T of drafted tokens, which may turn out to be wrong.
        rows: cache writes and attention for this layout.
    """

    tokens: Tensor
    positions: Tensor
    wanted: Tensor
    tentative: Tensor
    rows: RowOperators


@dataclass(frozen=True)
class Step:
    """All rows of one step, on the host.

    Attributes:
        rows: the requests' rows, then padding rows if any.
        live: how many of the rows belong to requests.
        page_tokens: P.
    """

    rows: tuple[Row, ...]
    live: int
    page_tokens: int

    @staticmethod
    def of(rows: Sequence[Row], page_tokens: int) -> Step:
        """A step of these rows and no padding."""
        return Step(tuple(rows), len(rows), page_tokens)

    @property
    def token_count(self) -> int:
        """T, padding included."""
        return sum(len(row.tokens) for row in self.rows)

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
        return Step(self.rows + added, self.live, self.page_tokens)

    def build(self, backend: Backend) -> Batch:
        """Make the tensors and the backend's own metadata, all from the same rows."""
        starts = [0]
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        tentative: list[int] = []
        for row in self.rows:
            tokens.extend(row.tokens)
            positions.extend(range(row.first, row.first + len(row.tokens)))
            tentative.extend(range(starts[-1] + row.certain, len(tokens)))
            starts.append(len(tokens))
            wanted.extend(range(len(tokens) - row.wanted, len(tokens)))
        layout = RowLayout(
            starts=tuple(starts),
            first=tuple(row.first for row in self.rows),
            tables=tuple(row.table for row in self.rows),
            slots=tuple(row.slot for row in self.rows),
            visible_from=tuple(row.visible_from for row in self.rows),
            settled=tuple(row.settled for row in self.rows),
            settles=tuple(row.settles for row in self.rows),
            page_tokens=self.page_tokens,
        )
        return Batch(
            tokens=torch.tensor(tokens, dtype=torch.long, device=backend.device),
            positions=torch.tensor(positions, dtype=torch.long, device=backend.device),
            wanted=torch.tensor(wanted, dtype=torch.long, device=backend.device),
            tentative=torch.tensor(tentative, dtype=torch.long, device=backend.device),
            rows=backend.rows(layout),
        )


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
