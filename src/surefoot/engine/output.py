"""Turns chosen tokens into output: appends them, makes text, and ends at the earliest event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from surefoot.backend.protocol import UNCHOSEN
from surefoot.params import SamplingParams
from surefoot.request import FinishReason, Request
from surefoot.text.detokenize import Detokenizer
from surefoot.text.stop import StopMatcher
from surefoot.text.tokenizer import Tokenizer


class TextStream(Protocol):
    """The text of one request, token by token."""

    def push(self, token: int, may_stop: bool) -> tuple[str, bool]:
        """Text that is now certain, and whether a stop string was completed by this token."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


class NoText:
    """For models without a tokenizer."""

    def push(self, token: int, may_stop: bool) -> tuple[str, bool]:
        """No text."""
        return "", False

    def finish(self) -> str:
        """No text."""
        return ""


class DecodedText:
    """Detokenizes incrementally and holds back what may become a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        """Follow one request's output."""
        self._detokenizer = Detokenizer(
            tokenizer, skip_special=params.skip_special_tokens, continues=True
        )
        self._stops = StopMatcher(params.stop, params.include_stop_str_in_output)

    def push(self, token: int, may_stop: bool) -> tuple[str, bool]:
        """See TextStream; stop strings are looked for only where the request may stop."""
        piece = self._detokenizer.push([token])
        return self._stops.push(piece) if may_stop else (piece, False)

    def finish(self) -> str:
        """See TextStream."""
        emit, hit = self._stops.push(self._detokenizer.finish())
        return emit if hit else emit + self._stops.flush()


@dataclass(slots=True)
class Taken:
    """What became of a run of chosen tokens.

    Attributes:
        tokens: those that were kept, in order.
        text: the text that is now certain.
        reason: why the request ends with the last of them, or None.
    """

    tokens: list[int]
    text: str
    reason: FinishReason | None


def take_run(request: Request, run: Sequence[int], stream: TextStream) -> Taken:
    """Append `run` to the request up to the earliest end token, stop string or length limit.

    A token that could not be chosen ends the request with an error.
    """
    taken = Taken([], "", None)
    for token in run:
        if token == UNCHOSEN:
            request.error = "the model's logits are not numbers; its weights may be damaged"
            taken.text += stream.finish()
            taken.reason = FinishReason.ERROR
            break
        request.tokens.append(token)
        taken.tokens.append(token)
        taken.reason = _reason(request, token, stream, taken)
        if taken.reason is not None:
            break
    return taken


def _reason(request: Request, token: int, stream: TextStream, taken: Taken) -> FinishReason | None:
    may_stop = request.output_length >= request.params.min_tokens
    if token in request.end_tokens and may_stop:
        taken.text += stream.finish()
        return FinishReason.STOP
    text, stopped = stream.push(token, may_stop)
    taken.text += text
    if stopped:
        return FinishReason.STOP
    if len(request.tokens) >= request.length_limit:
        taken.text += stream.finish()
        return FinishReason.LENGTH
    return None
