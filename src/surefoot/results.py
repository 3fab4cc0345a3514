"""What comes back to a caller: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.request import Request


@dataclass(frozen=True)
class Speculation:
    """What drafting did for a prompt, all its samples together.

    Attributes:
        drafter: who guessed.
        drafts: verify rows with at least one drafted token.
        drafted_tokens: tokens guessed.
        accepted_tokens: guesses that were right and were kept.
        accept_length: tokens committed per verify row: 1 + accepted_tokens / drafts.
        accepted_per_position: accepted tokens by their place in the draft.
    """

    drafter: str
    drafts: int
    drafted_tokens: int
    accepted_tokens: int
    accept_length: float
    accepted_per_position: tuple[int, ...]

    @classmethod
    def total(cls, drafter: str, requests: Sequence[Request]) -> Speculation:
        """Add up the counts of several requests."""
        counts = [request.speculation for request in requests]
        drafts, accepted = sum(c.drafts for c in counts), sum(c.accepted for c in counts)
        places = max((len(c.accepted_at) for c in counts), default=0)
        return cls(
            drafter=drafter,
            drafts=drafts,
            drafted_tokens=sum(c.drafted for c in counts),
            accepted_tokens=accepted,
            accept_length=1 + accepted / drafts if drafts else 1.0,
            accepted_per_position=tuple(
                sum(c.accepted_at[place] for c in counts if place < len(c.accepted_at))
                for place in range(places)
            ),
        )


@dataclass(frozen=True)
class Timing:
    """Wall-clock times of one prompt.

    Attributes:
        ttft_s: seconds from submission to the first new token.
        decode_tokens_per_s: tokens after the first step that emitted, per second; 0 if none.
    """

    ttft_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True)
class Completion:
    """One sample.

    Attributes:
        index: which of the `n` samples.
        text: what was generated; empty if the model has no tokenizer.
        token_ids: the generated tokens, an end token included.
        finish_reason: "stop", "length", "abort" or "error".
        logprobs: for each generated token {token id: log-probability}, if asked for.
        error: what went wrong if finish_reason is "error".
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[dict[int, float], ...] | None
    error: str | None


@dataclass(frozen=True)
class Result:
    """Everything about one prompt.

    Attributes:
        prompt: the text, if it was given as text.
        prompt_token_ids: the prompt's tokens.
        prompt_logprobs: for each prompt token {token id: log-probability}, None for the first.
        outputs: one completion per sample.
        cached_tokens: prompt tokens that came from the prefix cache (of the first sample).
        speculation: what drafting did.
        timing: how long it took.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None
    outputs: tuple[Completion, ...]
    cached_tokens: int
    speculation: Speculation
    timing: Timing


@dataclass(frozen=True)
class Piece:
    """What one step added to a streamed completion.

    Attributes:
        index: which of the `n` samples.
        text: new text; may be empty while it could still become a stop string.
        token_ids: new tokens.
        finish_reason: why the sample ended with this piece, or None.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
