"""What the scheduler decides and what a step brings back: plain data between the loop's phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from surefoot.request import FinishReason, Request
from surefoot.state.ledger import Lease


@dataclass(slots=True, eq=False)
class PlannedRow:
    """One request in the coming step.

    Attributes:
        request: who.
        lease: its pages and slot; capacity for everything below is reserved.
        first: position of the first of them, the cursor when the step was planned.
        count: known tokens to compute.
        final: whether they reach the last known token, so that a new token is chosen.
        depth: most drafted tokens.
        drafts: what the drafter proposed; the host may not know the tokens yet.
    """

    request: Request
    lease: Lease
    first: int
    count: int
    final: bool
    depth: int = 0
    drafts: Sequence[int] = ()


@dataclass(slots=True)
class RowResult:
    """What the forward pass and the choice say of one row.

    Attributes:
        chosen: the token chosen after the last known token and after each draft, UNCHOSEN where
            the logits are not numbers; none for a chunk that does not reach the last known token.
        logprobs: for each chosen token, if the request asked for them.
        prompt_logprobs: for the prompt tokens that follow this chunk's tokens, if asked for.
    """

    chosen: list[int]
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Emission:
    """What a step added to one request.

    Attributes:
        request: whose.
        token_ids: the new tokens.
        text: the new text; empty without a tokenizer, or while it may still become a stop string.
        reason: why the request ended with this, or None if it goes on.
    """

    request: Request
    token_ids: list[int]
    text: str
    reason: FinishReason | None
