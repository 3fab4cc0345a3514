"""What a command is asked to continue: prompts from arguments, a JSONL file or standard input."""

# Annotations are not postponed: the parser would evaluate them anew at every start.
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Self

from cyclopts import Group, Parameter

from surefoot.cli.flags import flag, switch
from surefoot.cli.options import json_object, read_bias
from surefoot.errors import PromptError, SettingError
from surefoot.params import SamplingParams
from surefoot.text.messages import Message

_SAMPLING_KEYS = frozenset(field.name for field in fields(SamplingParams))
_CONTENT_KEYS = ("prompt", "messages")


@dataclass(frozen=True)
class Ask:
    """One prompt as it was given.

    Attributes:
        prompt: text or token ids; empty if there are messages.
        messages: a conversation for the chat template; empty if there is a prompt.
        sampling: fields of SamplingParams that hold for this prompt only.
        place: where it came from, for errors; "" for the command line.
    """

    prompt: str | Sequence[int] = ""
    messages: Sequence[Message] = ()
    sampling: Mapping[str, object] = field(default_factory=dict)
    place: str = ""

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """`defaults` with what holds for this prompt only.

        Raises:
            SettingError: a value is out of range; the error names it and the place.
        """
        try:
            return replace(defaults, **self.sampling)  # type: ignore[arg-type]
        except SettingError as error:
            raise _misplaced(error, self.place) from None

    def as_chat(self, system: str | None) -> Self:
        """The same as a conversation, opened by `system` unless it opens with such a message.

        Raises:
            SettingError: the prompt is token ids, which no template takes.
        """
        if not self.messages and not isinstance(self.prompt, str):
            raise SettingError("chat", f"takes text, not token ids{_at(self.place)}")
        messages = self.messages or ({"role": "user", "content": self.prompt},)
        if system is not None and messages[0].get("role") != "system":
            messages = ({"role": "system", "content": system}, *messages)
        return replace(self, prompt="", messages=messages)


@Parameter(name="*", group=Group("Prompts", sort_key=5))
@dataclass(frozen=True, kw_only=True)
class AskOptions:
    """Where prompts come from and whether the chat template is used."""

    prompt: Annotated[
        list[str] | None, flag("A prompt, like those behind the model. May be repeated.")
    ] = None
    file: Annotated[
        Path | None,
        flag(
            "JSONL: on each line a text, a list of token ids, or an object with prompt or "
            "messages, and sampling values that hold for it alone."
        ),
    ] = None
    chat: Annotated[bool | None, switch("Answer each prompt through the chat template.")] = None
    system: Annotated[str | None, flag("What the system message of a chat says.")] = None
    chat_template_kwargs: Annotated[
        str | None, flag("Further variables for the chat template.", metavar="JSON")
    ] = None

    def template_options(self) -> dict[str, object]:
        """Further variables for the chat template.

        Raises:
            SettingError: they are no JSON object.
        """
        if self.chat_template_kwargs is None:
            return {}
        return json_object("chat_template_kwargs", self.chat_template_kwargs)

    def gather(self, positional: Sequence[str]) -> list[Ask]:
        """All prompts in order: arguments, then the file; else standard input unless a terminal.

        Returns:
            An empty list if none was given anywhere.

        Raises:
            SettingError: the file is unreadable or a line of it is wrong, or chat flags are given
                and nothing is a chat.
        """
        asks = [Ask(prompt=text) for text in (*positional, *(self.prompt or ()))]
        if self.file is not None:
            asks += read_asks(self.file)
        if not asks:
            asks = _from_stdin()
        if self.chat:
            asks = [ask.as_chat(self.system) for ask in asks]
        else:
            asks = [ask.as_chat(self.system) if ask.messages else ask for ask in asks]
        self._check_chat_flags(asks)
        return asks

    def _check_chat_flags(self, asks: Sequence[Ask]) -> None:
        if not asks or any(ask.messages for ask in asks):
            return
        for name in ("system", "chat_template_kwargs"):
            if getattr(self, name) is not None:
                raise SettingError(name, "has no use without --chat or messages in the file")


ASK_DEFAULTS = AskOptions()


def read_asks(path: Path) -> list[Ask]:
    """The prompts of a JSONL file; blank lines are skipped.

    Raises:
        SettingError: the file is unreadable or empty, or a line is wrong; the error names it.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SettingError("file", f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingError("file", f"{path} is not UTF-8 text: {error.reason}") from None
    asks = [
        _ask(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not asks:
        raise SettingError("file", f"{path} holds no prompts")
    return asks


def _ask(line: str, place: str) -> Ask:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise SettingError("file", f"{place} is not JSON: {error}") from None
    if not isinstance(content, dict):
        return Ask(prompt=_prompt(content, place), place=place)
    named = [key for key in _CONTENT_KEYS if key in content]
    if len(named) != 1:
        raise SettingError("file", f"{place} must have one of {' and '.join(_CONTENT_KEYS)}")
    rest = {key: value for key, value in content.items() if key not in _CONTENT_KEYS}
    sampling = _sampling(rest, place)
    if named == ["messages"]:
        return Ask(messages=_messages(content["messages"], place), sampling=sampling, place=place)
    return Ask(prompt=_prompt(content["prompt"], place), sampling=sampling, place=place)


def _prompt(value: object, place: str) -> str | list[int]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise SettingError("prompt", f"must be text or a list of token ids{_at(place)}")


def _messages(value: object, place: str) -> list[Message]:
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) for m in value):
        raise SettingError("messages", f"must be a list of objects{_at(place)}")
    return value


def _sampling(values: Mapping[str, object], place: str) -> dict[str, object]:
    for key in values:
        if key not in _SAMPLING_KEYS:
            known = ", ".join(sorted((*_CONTENT_KEYS, *_SAMPLING_KEYS)))
            raise SettingError(key, f"unknown key{_at(place)}; known are {known}")
    bias = values.get("logit_bias")
    if not isinstance(bias, dict):
        return dict(values)
    try:
        return {**values, "logit_bias": read_bias(bias)}
    except SettingError as error:
        raise _misplaced(error, place) from None


def _from_stdin() -> list[Ask]:
    if sys.stdin is None or sys.stdin.isatty():
        return []
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not text: {error.reason}") from None
    return [Ask(prompt=text.removesuffix("\n"))] if text.strip() else []


def _misplaced(error: SettingError, place: str) -> SettingError:
    """The same error, with the place in the file."""
    reason = str(error).removeprefix(f"{error.parameter}: ")
    return SettingError(error.parameter, f"{reason}{_at(place)}")


def _at(place: str) -> str:
    return f" ({place})" if place else ""
