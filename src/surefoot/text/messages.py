"""Conversations as front doors take them, and what writes them as text for a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from surefoot.errors import PromptError

Message = Mapping[str, object]

MAX_LEVELS = 64
"""Lists and objects in each other that messages and variables may hold."""

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatFormat(Protocol):
    """Messages to the text that a model was trained on."""

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: plain data; each has a "role" and mostly a "content". Keys whose value is
                None count as absent.
            variables: what else the text depends on, e.g. `tools` or `enable_thinking`.
            add_generation_prompt: end with the header of the answer that is to be generated.

        Raises:
            PromptError: the messages or variables are malformed, or the format cannot hold them.
            TokenizerError: the format itself is at fault.
        """
        ...


def conversation(messages: object) -> list[dict[str, object]]:
    """Copies of the messages: plain data, without keys whose value is None.

    Reasoning, under whichever name it came, is under "reasoning_content" and "thinking".

    Raises:
        PromptError: they are no list of objects with a role, or hold more than plain data.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise PromptError(f"messages must be a list of objects, not {type(messages).__name__}")
    if not messages:
        raise PromptError("messages is empty; at least one is needed")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise PromptError(f"{where} must be an object with a role, not {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise PromptError(f"{where} needs a role, such as 'user', not {message.get('role')!r}")
    given = {
        str(key): checked(value, f"{where}.{key}")
        for key, value in message.items()
        if value is not None
    }
    reasoning = next((given[key] for key in _REASONING_KEYS if key in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


def checked(value: object, where: str) -> object:
    """A plain copy of `value`, which must not be so deep that Python cannot follow it.

    Raises:
        PromptError: it is too deep, or holds more than plain data; `where` names it.
    """
    level = [value]
    for _ in range(MAX_LEVELS + 1):
        level = [inner for outer in level for inner in _held_by(outer)]
        if not level:
            return _plain(value, where)
    raise PromptError(f"{where} is nested more than {MAX_LEVELS} levels deep; send flatter data")


def _held_by(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _plain(value: object, where: str) -> object:
    """A copy of `value` made of nothing but JSON types, so that no method of it can be called."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{where}[{place}]") for place, inner in enumerate(value)]
    if isinstance(value, str):
        return str.__str__(value)  # str() of an enumeration's member would be its name
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    raise PromptError(f"{where} must be plain JSON data, not {type(value).__name__}")
