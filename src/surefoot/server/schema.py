"""What clients may send: the bodies of the two POST requests, checked, and turned into parameters.

Types are checked here and ranges where they are defined, in `SamplingParams`. A field that is not
known is refused, since an option that is silently dropped changes the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from surefoot.errors import PromptError, SettingError
from surefoot.params import SamplingParams

COMPLETION_TOKENS = 16
"""Most new tokens of a completion that names no limit, as OpenAI's interface has it."""

_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
# Fields of features that are not offered; these values ask for nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
_TOKEN_DIGITS = 10
_SAMPLING = frozenset(field.name for field in fields(SamplingParams))


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """How a streamed answer is sent.

    Attributes:
        include_usage: count the tokens in a last event of its own.
        include_obfuscation: accepted and without effect.
    """

    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingBody(_Body):
    """The fields that both kinds of request share; those that are None were not given.

    Sampling values are those of `SamplingParams`, under the same names.

    Attributes:
        model: the served name, or nothing.
        stream: send the answer piece by piece, as server-sent events.
        stream_options: how.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: str | list[str] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    speculate: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_says_nothing(cls, body: Any) -> Any:
        """Leave out nulls, which clients send for what was not given, and what has no meaning."""
        if not isinstance(body, Mapping):
            return body
        return {name: value for name, value in body.items() if not _says_nothing(name, value)}

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """`defaults`, with what was given in their place.

        Raises:
            SettingError: a value is out of range; the error names the field.
        """
        given = {
            name: value
            for name in self.model_fields_set & _SAMPLING
            if (value := getattr(self, name)) is not None
        }
        given |= self._own_params()
        if self.logit_bias is not None:
            given["logit_bias"] = _bias(self.logit_bias)
        return replace(defaults, **given)

    def _own_params(self) -> dict[str, Any]:
        """Sampling values that the two kinds of request spell differently."""
        raise NotImplementedError


class ChatBody(SamplingBody):
    """The body of a chat completion.

    Attributes:
        messages: the conversation.
        logprobs: whether to return log-probabilities.
        top_logprobs: for how many of the best tokens, besides the emitted one.
        max_completion_tokens: the newer name of max_tokens.
        chat_template_kwargs: further variables of the chat template.
    """

    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def conversation(self) -> list[dict[str, object]]:
        """The messages, with content that was sent in parts put together.

        Raises:
            PromptError: a part is no text.
        """
        return [_message(message, f"messages[{at}]") for at, message in enumerate(self.messages)]

    def _own_params(self) -> dict[str, Any]:
        if self.top_logprobs is not None and not self.logprobs:
            raise SettingError("top_logprobs", "has no effect without logprobs: true")
        return {
            "max_tokens": self._limit(),
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }

    def _limit(self) -> int | None:
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            raise SettingError("max_tokens", "contradicts max_completion_tokens; send one of them")
        return older if newer is None else newer


class CompletionBody(SamplingBody):
    """The body of a text completion.

    Attributes:
        prompt: a text, token ids, or a list of either.
        logprobs: for how many of the best tokens to return log-probabilities.
    """

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one.

        Raises:
            PromptError: there is none.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise PromptError("is empty; give at least one token")
        texts: list[str | list[int]] = [one for one in self.prompt if isinstance(one, str | list)]
        return texts or [[token for token in self.prompt if isinstance(token, int)]]

    def _own_params(self) -> dict[str, Any]:
        return {"max_tokens": COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens}


def _says_nothing(name: object, value: object) -> bool:
    if value is None or name in _IGNORED:
        return True
    # Compared with their types, since 0 is no False here and 1 is no True.
    neutral = _NEUTRAL.get(str(name), ())
    return any(type(value) is type(other) and value == other for other in neutral)


def _message(message: Mapping[str, object], where: str) -> dict[str, object]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": "".join(_parts(content, f"{where}.content"))}


def _parts(content: list[object], where: str) -> list[str]:
    texts = []
    for at, part in enumerate(content):
        text = (
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        )
        if not isinstance(text, str):
            raise PromptError(f"{where}[{at}] is not of type 'text', the only kind that is read")
        texts.append(text)
    return texts


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    for token in bias:
        if not (token.isascii() and token.isdecimal() and len(token) <= _TOKEN_DIGITS):
            raise SettingError("logit_bias", f"{token!r} is no token id; keys are token ids")
    return {int(token): value for token, value in bias.items()}
