"""Answers as clients see them: whole ones and the chunks of streams, in OpenAI's shapes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Protocol

from surefoot.async_llm import LivePiece
from surefoot.results import Completion
from surefoot.text.tokenizer import Tokenizer

Json = dict[str, object]
Logprobs = Sequence[Mapping[int, float]]


class Shape(Protocol):
    """How the choices of one kind of answer look.

    Attributes:
        prefix: begins the answer's id.
        whole: the type of a whole answer.
        chunk: the type of a streamed one's chunks.
    """

    prefix: str
    whole: str
    chunk: str

    def choice(self, completion: Completion) -> Json:
        """One choice of a whole answer."""
        ...

    def opening(self, index: int) -> Json | None:
        """What a streamed choice begins with, if anything."""
        ...

    def part(self, piece: LivePiece) -> Json:
        """What a step added to a streamed choice."""
        ...


class ChatShape:
    """A message, or deltas of one."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, spelling: Spelling, best: int | None) -> None:
        """Show log-probabilities of the `best` tokens, and of the emitted one; None shows none."""
        self._spelling = spelling
        self._best = best

    def choice(self, completion: Completion) -> Json:
        """See Shape."""
        return {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion.token_ids, completion.logprobs or ()),
            "finish_reason": completion.finish_reason,
        }

    def opening(self, index: int) -> Json:
        """See Shape: the role comes first."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, piece: LivePiece) -> Json:
        """See Shape."""
        return {
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(piece.token_ids, piece.logprobs),
            "finish_reason": piece.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[int], entries: Logprobs) -> Json | None:
        if self._best is None:
            return None
        shown = [
            {
                **self._entry(token, entry[token]),
                "top_logprobs": [self._entry(*pair) for pair in best(entry, self._best)],
            }
            for token, entry in zip(tokens, entries, strict=True)
        ]
        return {"content": shown, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        raw = self._spelling.raw(token)
        return {"token": self._spelling.text(token), "logprob": logprob, "bytes": list(raw)}


class CompletionShape:
    """Plain text, whole or in pieces."""

    prefix = "cmpl"
    whole = chunk = "text_completion"

    def __init__(self, spelling: Spelling, best: int | None) -> None:
        """As ChatShape."""
        self._spelling = spelling
        self._best = best
        self._offsets: dict[int, int] = {}

    def choice(self, completion: Completion) -> Json:
        """See Shape."""
        logprobs = self._logprobs(completion.index, completion.token_ids, completion.logprobs or ())
        return {
            "index": completion.index,
            "text": completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
        }

    def opening(self, index: int) -> None:
        """See Shape: nothing."""

    def part(self, piece: LivePiece) -> Json:
        """See Shape."""
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.index, piece.token_ids, piece.logprobs),
            "finish_reason": piece.finish_reason,
        }

    def _logprobs(self, index: int, tokens: Sequence[int], entries: Logprobs) -> Json | None:
        if self._best is None:
            return None
        texts = [self._spelling.text(token) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [entry[token] for token, entry in zip(tokens, entries, strict=True)],
            "top_logprobs": [
                {self._spelling.text(token): logprob for token, logprob in entry.items()}
                for entry in entries
            ],
            "text_offset": self._places(index, texts),
        }

    def _places(self, index: int, texts: Sequence[str]) -> list[int]:
        """Where each token begins in the text of its choice."""
        places = []
        for text in texts:
            places.append(self._offsets.setdefault(index, 0))
            self._offsets[index] += len(text)
        return places


class Spelling:
    """How single tokens are shown."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer tokens have no text."""
        self._tokenizer = tokenizer

    def raw(self, token: int) -> bytes:
        """The bytes that the token stands for."""
        if self._tokenizer is None:
            return b""
        return b"".join(self._tokenizer.pieces([token], skip_special=False, begins=False))

    def text(self, token: int) -> str:
        r"""Its text; a token that is no whole character is spelt bytes:\xe2\x82."""
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Envelope:
    """What the whole answer and each chunk of one request have in common."""

    def __init__(self, shape: Shape, model: str) -> None:
        """A new answer under the served name `model`."""
        self._whole, self._chunk = shape.whole, shape.chunk
        self._common: Json = {
            "id": f"{shape.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        """A whole answer."""
        return {**self._common, "object": self._whole, "choices": choices, "usage": usage}

    def chunk(self, choices: Sequence[Json], usage: Mapping[str, Json | None]) -> Json:
        """One chunk; `usage` is empty where the client did not ask for it."""
        return {**self._common, "object": self._chunk, "choices": choices, **usage}


def usage_entry(prompt_tokens: int, cached_tokens: int, new_tokens: int) -> Json:
    """Counts of tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def best(entry: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    """The `count` best tokens, which come first in what the engine reports."""
    return list(entry.items())[:count]
