"""One request on its way through the engine: plain data, no tensors."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from surefoot.ids import RequestId
from surefoot.params import SamplingParams


class Status(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass
class SpeculationCounts:
    """What drafting did for one request.

    Attributes:
        drafts: verify rows that carried at least one drafted token.
        drafted: drafted tokens verified.
        accepted: drafted tokens that equalled the chosen ones and were kept.
        accepted_at: accepted tokens by their place in the draft, first place first.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def record(self, drafted: int, accepted: int) -> None:
        """Count one verify row of `drafted` tokens, of which `accepted` were kept."""
        if drafted == 0:
            return
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_at.extend([0] * (accepted - len(self.accepted_at)))
        for place in range(accepted):
            self.accepted_at[place] += 1

    @property
    def accept_length(self) -> float:
        """Tokens committed per verify row, the bonus included: 1 + accepted / drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


@dataclass(eq=False)
class Request:
    """A prompt, how to continue it, and how far that has come.

    `tokens[:prompt_length]` is the prompt, the rest was emitted by the engine. The last token is
    known but not computed while the request runs; `Lease.computed` in the ledger is the cursor.

    Attributes:
        id: unique within the engine.
        tokens: prompt and output, in order; the engine appends.
        prompt_length: how many of them the user gave.
        params: what the user asked for.
        seed: 64-bit key of this sample's noise, already derived from (params.seed, sample index).
        end_tokens: tokens that end the text (the model's own unless ignored, and the user's).
        bad_sequences: token sequences whose last token must not be chosen after the others.
        length_limit: prompt and output together never grow beyond this many tokens.
        preemptions: how often it was released and later resumed or recomputed.
        retries: how often a failed step made it start anew.
    """

    id: RequestId
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    length_limit: int
    end_tokens: frozenset[int] = frozenset()
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    retries: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=list)

    @property
    def output(self) -> Sequence[int]:
        """The emitted tokens so far."""
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        """How many tokens were emitted so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def finished(self) -> bool:
        """Whether nothing more will be emitted."""
        return self.status is Status.FINISHED
