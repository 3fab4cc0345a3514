"""The chat format whose tool calls are written in DSML, for checkpoints that bring no template.

    <begin>system<User>question<Assistant><think>reasoning</think>answer<end><User>...

Messages come in OpenAI's form:

* A system message has no mark. Tools are described at the end of the first message if that is
  the system's or a developer's, else before all of them.
* User messages and tool results that follow each other are one turn. Results stand in the order
  of their calls: nothing else says which call they answer.
* Without thinking, `</think>` stands in place of `<think>`, and no reasoning is written.
* With thinking, answers before the last question are written as if without, unless there are
  tools. But for this, a prompt begins with the one before it and its answer.

What the format has beyond that, for services of its vendor, is left out: the latest_reminder role,
tasks (marks for titles, search queries and the like), and response_format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.errors import PromptError
from surefoot.text.messages import Message, checked, conversation

_BEGIN, _END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_THINK, _THOUGHT = "<think>", "</think>"
_TAG = "｜DSML｜"
_ANSWER = "assistant"

_TOOLS = (
    "## Tools\n\nYou have access to a set of tools to help answer the user's question. "
    f'You can invoke tools by writing a "<{_TAG}tool_calls>" block like the following:\n\n'
    f"<{_TAG}tool_calls>\n"
    f'<{_TAG}invoke name="$TOOL_NAME">\n'
    f'<{_TAG}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE'
    f"</{_TAG}parameter>\n"
    "...\n"
    f"</{_TAG}invoke>\n"
    f'<{_TAG}invoke name="$TOOL_NAME2">\n'
    "...\n"
    f"</{_TAG}invoke>\n"
    f"</{_TAG}tool_calls>\n\n"
    'String parameters should be specified as is and set `string="true"`. For all other types '
    "(numbers, booleans, arrays, objects), pass the value in JSON format and set "
    '`string="false"`.\n\n'
    f"If thinking_mode is enabled (triggered by {_THINK}), you MUST output your complete "
    f"reasoning inside {_THINK}...{_THOUGHT} BEFORE any tool calls or final response.\n\n"
    f"Otherwise, output directly after {_THOUGHT} with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n"
)
_TOOLS_END = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke "
    "tool calls.\n"
)


class DsmlFormat:
    """A ChatFormat with these variables, all optional; others have no effect.

    tools: functions that may be called, as OpenAI's interface describes them.
    thinking, enable_thinking: whether to reason first. The format has no default; here it is to
        reason, as in the vendor's own service.
    drop_thinking: false keeps the reasoning of all turns.
    reasoning_effort: a level; without it, and without thinking, nothing is said of effort.
    """

    def __init__(self, efforts: Mapping[str, str]) -> None:
        """Begin thinking prompts with these texts, by the level of effort."""
        self._efforts = efforts

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, object] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """See ChatFormat."""
        given = {name: value for name, value in (variables or {}).items() if value is not None}
        thinking = _flag(given, "thinking", _flag(given, "enable_thinking", True))
        effort = self._effort(given)
        tools = _functions(checked(given.get("tools", []), "tools"), "tools")
        turns = _turns(conversation(messages))
        if tools:
            _describe(tools, turns)
        last = max((at for at, turn in enumerate(turns) if turn.asks), default=0)
        keeping = bool(tools) or not _flag(given, "drop_thinking", True)
        if thinking and not keeping:
            _refuse_lost(turns[:last])
        if add_generation_prompt:
            _require_question(turns[-1])
        texts = [_BEGIN, effort if thinking else ""]
        followers = [*(turn.role for turn in turns[1:]), _ANSWER if add_generation_prompt else ""]
        for at, (turn, follower) in enumerate(zip(turns, followers, strict=True)):
            thinks = thinking and (keeping or at >= last)
            texts.append(turn.written(thinks))
            if turn.asks and follower == _ANSWER:
                texts.append(_ASSISTANT + (_THINK if thinks else _THOUGHT))
        return "".join(texts)

    def _effort(self, given: Mapping[str, object]) -> str:
        level = given.get("reasoning_effort")
        if level is None:
            return ""
        if not isinstance(level, str) or level not in self._efforts:
            known = ", ".join(self._efforts)
            raise PromptError(f"reasoning_effort must be one of {known}, not {level!r}")
        return self._efforts[level]


@dataclass
class _Part:
    """A piece of a turn; a tool's result has the place of its call."""

    text: str
    place: int | None = None


@dataclass
class _Turn:
    """What stands behind one mark: a message, or several of the user and tools."""

    role: str
    where: str
    parts: list[_Part]
    reasoning: str = ""

    @property
    def asks(self) -> bool:
        return self.role in ("user", "developer")

    def written(self, thinks: bool) -> str:
        results = [part for part in self.parts if part.place is not None]
        ordered = iter(sorted(results, key=lambda part: part.place or 0))
        parts = (part if part.place is None else next(ordered) for part in self.parts)
        text = "\n\n".join(part.text for part in parts)
        if self.asks:
            return _USER + text
        if self.role == "system":
            return text
        return (self.reasoning + _THOUGHT if thinks else "") + text + _END


def _turns(messages: Sequence[Message]) -> list[_Turn]:
    turns: list[_Turn] = []
    places: Mapping[str, int] = {}
    for at, message in enumerate(messages):
        where, role = f"messages[{at}]", message["role"]
        match role:
            case "user" | "tool":
                if not turns or turns[-1].role != "user":
                    turns.append(_Turn("user", where, []))
                part = _said(message, where) if role == "user" else _result(message, where, places)
                turns[-1].parts.append(part)
            case "assistant":
                turns.append(_answer(message, where))
                places = _places(message.get("tool_calls")) or places
            case "system" | "developer":
                turns.append(_Turn(role, where, [_said(message, where)]))
            case _:
                raise PromptError(
                    f"{where} has the role {role!r}; known are system, developer, user, assistant "
                    "and tool"
                )
    return turns


def _said(message: Message, where: str) -> _Part:
    return _Part(_text(message, "content", where))


def _result(message: Message, where: str, places: Mapping[str, int]) -> _Part:
    """A tool's result; only its place tells the model which call it answers."""
    call = _text(message, "tool_call_id", where)
    if call and places and call not in places:
        raise PromptError(
            f"{where}.tool_call_id is {call!r}, and the calls before it are "
            f"{', '.join(map(repr, places))}; name the one that it answers"
        )
    text = _text(message, "content", where)
    return _Part(f"<tool_result>{text}</tool_result>", places.get(call, 0))


def _answer(message: Message, where: str) -> _Turn:
    content = _text(message, "content", where)
    reasoning = _text(message, "reasoning_content", where)
    if "reasoning_content" not in message and _THOUGHT in content:
        # An answer as it was generated: front doors do not divide it.
        reasoning, _, content = content.partition(_THOUGHT)
    parts = [_Part(content)]
    if calls := _functions(message.get("tool_calls", []), f"{where}.tool_calls"):
        written = "\n".join(
            _call(function, f"{where}.tool_calls[{at}]") for at, function in enumerate(calls)
        )
        parts.append(_Part(f"<{_TAG}tool_calls>\n{written}\n</{_TAG}tool_calls>"))
    return _Turn(_ANSWER, where, parts, reasoning)


def _call(function: Message, where: str) -> str:
    arguments = _arguments(function, f"{where}.function.arguments")
    parameters = "\n".join(_parameter(name, value) for name, value in arguments.items())
    return f'<{_TAG}invoke name="{function["name"]}">\n{parameters}\n</{_TAG}invoke>'


def _parameter(name: str, value: object) -> str:
    text, is_text = (value, "true") if isinstance(value, str) else (_json(value), "false")
    return f'<{_TAG}parameter name="{name}" string="{is_text}">{text}</{_TAG}parameter>'


def _arguments(function: Message, where: str) -> Message:
    """The arguments of a call, which clients send as JSON text, some also as an object."""
    value = function.get("arguments")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{where} is no JSON: {error}; send an object, maybe {{}}") from error
        value = checked(value, where)
    if not isinstance(value, Mapping):
        raise PromptError(f"{where} must be a JSON object, not {_kind(value)}")
    return value


def _places(calls: object) -> dict[str, int]:
    """Which call has which id."""
    listed = calls if isinstance(calls, list) else []
    return {call["id"]: at for at, call in enumerate(listed) if isinstance(call.get("id"), str)}


def _functions(value: object, where: str) -> list[Message]:
    """What tools or calls in OpenAI's form are about."""
    if not isinstance(value, list):
        raise PromptError(f"{where} must be a list, not {_kind(value)}")
    functions: list[Message] = []
    for at, entry in enumerate(value):
        function = entry.get("function") if isinstance(entry, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise PromptError(
                f"{where}[{at}] must be an object with a 'function' that has a 'name', as OpenAI's "
                "interface has it"
            )
        functions.append(function)
    return functions


def _describe(tools: Sequence[Message], turns: list[_Turn]) -> None:
    """Add what the model is told of the tools."""
    if turns[0].role not in ("system", "developer"):
        turns.insert(0, _Turn("system", "tools", [_Part("")]))
    schemas = "\n".join(_json(tool) for tool in tools)
    turns[0].parts.append(_Part(_TOOLS + schemas + _TOOLS_END))


def _refuse_lost(turns: Sequence[_Turn]) -> None:
    """Refuse what the format would leave out without a word: what developers said before."""
    for turn in turns:
        if turn.role == "developer":
            raise PromptError(
                f"{turn.where} has the role 'developer' and would be left out, since a later turn "
                "asks; use the role 'system', or set drop_thinking to false"
            )


def _require_question(turn: _Turn) -> None:
    if not turn.asks:
        raise PromptError(
            f"{turn.where} is the last message and has the role {turn.role!r}; an answer follows "
            "one with the role 'user' or 'tool'"
        )


def _flag(given: Mapping[str, object], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise PromptError(f"{name} must be true or false, not {value!r}")
    return value


def _text(message: Message, key: str, where: str) -> str:
    value = message.get(key, "")
    if not isinstance(value, str):
        raise PromptError(
            f"{where}.{key} must be one text, not {_kind(value)}; join the texts of parts"
        )
    return value


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _kind(value: object) -> str:
    return type(value).__name__
