"""What a drafter is: it guesses tokens ahead; whatever it guesses, the output stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from surefoot.ids import RequestId
from surefoot.request import Request
from surefoot.state.ledger import Lease, Work


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A decoding request that may be drafted for in this step.

    Attributes:
        request: its tokens are all known; the last one (the bonus) is not computed yet.
        lease: its pages and slot; positions up to computed + limit are reserved.
        limit: most tokens wanted; at least 1.
    """

    request: Request
    lease: Lease
    limit: int


@dataclass(frozen=True, slots=True)
class CommittedRow:
    """What a step made final for one request.

    Attributes:
        request: its tokens now include what was emitted.
        lease: `lease.computed` already counts the committed positions.
        first: absolute position of the first committed token.
        count: committed positions.
        offset: where the row's hidden states start in the step.
        computed: positions of the step from `first` on; what is behind `count` was not committed.
        keep_up: whether the request may be drafted for, so that the drafter should follow.
    """

    request: Request
    lease: Lease
    first: int
    count: int
    offset: int
    computed: int
    keep_up: bool


class Drafter(Protocol):
    """Proposes chains of tokens. State is per request and addressed by position.

    A drafter with state moves `lease.drafted` when something is written, not before. Where a call
    failed, it finds `lease.drafted == lease.draft_from`: nothing that was kept counts.
    """

    @property
    def name(self) -> str:
        """Short name for reports."""
        ...

    def prepare(self, work: Work) -> None:
        """Clear, save and restore rows as the ledger recorded; called in portions before each step.

        A portion that fails comes again before anything else is asked.
        """
        ...

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int]]:
        """Guess what follows each row: at most `limit` tokens each, none is fine.

        A draft is a list of tokens, or a `Guessed` of tokens that the host does not know.
        """
        ...

    def observe(self, rows: Sequence[CommittedRow], hidden: Tensor) -> None:
        """Follow the committed tokens; called after commit and before anything is published.

        Not while drafts do not pay: then nothing was proposed either, and what was missed shows in
        `lease.drafted`.

        Args:
            rows: one entry for each request of the step, ended ones included.
            hidden: [T, hidden] the target's hidden states of the whole step.
        """
        ...

    def forget(self, request: RequestId) -> None:
        """Drop what is kept for a request that left the engine or was pre-empted."""
        ...


class NoDrafter:
    """Proposes nothing and costs nothing."""

    name = "none"

    def prepare(self, work: Work) -> None:
        """Nothing to do."""

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int]]:
        """No tokens."""
        return [[] for _ in rows]

    def observe(self, rows: Sequence[CommittedRow], hidden: Tensor) -> None:
        """Nothing to do."""

    def forget(self, request: RequestId) -> None:
        """Nothing to do."""
