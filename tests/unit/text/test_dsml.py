"""The chat format of checkpoints whose tool calls are DSML, against texts written out in full."""

from collections.abc import Mapping, Sequence

import pytest

from surefoot.errors import PromptError
from surefoot.model.deepseek_v4_chat import EFFORTS, PREVIEW_EFFORTS
from surefoot.text.dsml import DsmlFormat
from surefoot.text.messages import ChatFormat, Message

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "Hi"}
DEVELOPER: Message = {"role": "developer", "content": "Cite."}
NO_THINKING: dict[str, object] = {"thinking": False}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für {city} <b>&</b>",
            "parameters": {"type": "object", "properties": {"city": {"default": None}}},
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
TOOLS_TEXT = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types \
(numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning \
inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{"name": "weather", "description": "Wetter für {city} <b>&</b>", \
"parameters": {"type": "object", "properties": {"city": {"default": null}}}}
{"name": "time"}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
ABSOLUTE = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve \
the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and \
adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, \
considered alternative, and rejected hypothesis to ensure absolutely no assumption is left \
unchecked.

"""
BEYOND = """\
Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: \
exhaustively decompose the problem into its most fundamental components, trace every causal chain \
to its root, and resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and \
are certain that no assumption remains unchecked and no error remains undiscovered.

"""


def answer(content: str, reasoning: str | None = None) -> dict[str, object]:
    return {"role": "assistant", "content": content, "reasoning_content": reasoning}


def call(identity: str | None, name: str, arguments: object) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def calling(*calls: object, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def result(content: str, identity: object = None) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": identity, "content": content}


def written(messages: Sequence[Message], **variables: object) -> str:
    made: ChatFormat = DsmlFormat(EFFORTS)
    return made.render(messages, variables)


def closed(messages: Sequence[Message]) -> str:
    """Without the header of another answer."""
    return DsmlFormat(EFFORTS).render(messages, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("variables", "opening"),
    [
        ({}, "<think>"),
        ({"thinking": True}, "<think>"),
        ({"thinking": None, "enable_thinking": None}, "<think>"),
        ({"thinking": False}, "</think>"),
        ({"enable_thinking": False}, "</think>"),
        ({"enable_thinking": False, "thinking": True}, "<think>"),
    ],
)
def test_one_question(variables: dict[str, object], opening: str) -> None:
    assert written([USER], **variables) == f"{BEGIN}<｜User｜>Hi<｜Assistant｜>{opening}"


def test_the_system_message_stands_before_all_marks() -> None:
    assert written([SYSTEM, USER]) == f"{BEGIN}Be brief.<｜User｜>Hi<｜Assistant｜><think>"


def test_no_answer_is_opened_where_none_is_wanted() -> None:
    assert closed([SYSTEM, USER]) == f"{BEGIN}Be brief.<｜User｜>Hi"
    ended = f"{BEGIN}<｜User｜>Hi<｜Assistant｜><think>So.</think>Yo{END}"
    assert closed([USER, answer("Yo", "So.")]) == ended
    assert closed([SYSTEM]) == f"{BEGIN}Be brief."


TALK: list[Message] = [
    SYSTEM,
    USER,
    answer("Yo", "A greeting."),
    {"role": "user", "content": "And?"},
]


def test_earlier_reasoning_is_dropped() -> None:
    assert written(TALK) == (
        f"{BEGIN}Be brief.<｜User｜>Hi<｜Assistant｜></think>Yo{END}"
        "<｜User｜>And?<｜Assistant｜><think>"
    )
    assert closed([*TALK, answer("So", "Hm.")]) == (
        f"{BEGIN}Be brief.<｜User｜>Hi<｜Assistant｜></think>Yo{END}"
        f"<｜User｜>And?<｜Assistant｜><think>Hm.</think>So{END}"
    )


def test_earlier_reasoning_can_be_kept() -> None:
    assert written(TALK, drop_thinking=False) == (
        f"{BEGIN}Be brief.<｜User｜>Hi<｜Assistant｜><think>A greeting.</think>Yo{END}"
        "<｜User｜>And?<｜Assistant｜><think>"
    )


def test_an_answer_without_reasoning_has_both_marks() -> None:
    ended = f"{BEGIN}<｜User｜>Hi<｜Assistant｜><think></think>Yo{END}"
    assert closed([USER, answer("Yo")]) == ended


def test_without_thinking_no_reasoning_is_written() -> None:
    for dropping in (True, False):
        assert written(TALK, thinking=False, drop_thinking=dropping) == (
            f"{BEGIN}Be brief.<｜User｜>Hi<｜Assistant｜></think>Yo{END}"
            "<｜User｜>And?<｜Assistant｜></think>"
        )


def test_an_answer_as_generated_is_divided() -> None:
    """Front doors give reasoning and answer in one text, and clients send it back."""
    whole = [SYSTEM, USER, {"role": "assistant", "content": "A greeting.</think>Yo"}, TALK[-1]]
    for variables in ({}, NO_THINKING, {"drop_thinking": False}):
        assert written(whole, **variables) == written(TALK, **variables)
    twice = {"role": "assistant", "content": "A.</think>B.</think>C."}
    assert f"<｜Assistant｜></think>B.</think>C.{END}" in written([USER, twice, USER])
    quoted = [USER, answer("The mark is </think>.", "Quote it.")]
    assert closed(quoted).endswith(f"Quote it.</think>The mark is </think>.{END}")


def test_questions_in_a_row_are_one_turn() -> None:
    assert written([USER, {"role": "user", "content": "There?"}]) == (
        f"{BEGIN}<｜User｜>Hi\n\nThere?<｜Assistant｜><think>"
    )
    assert written([USER, SYSTEM, USER]) == (
        f"{BEGIN}<｜User｜>HiBe brief.<｜User｜>Hi<｜Assistant｜><think>"
    )


@pytest.mark.parametrize(
    ("messages", "before", "after"),
    [
        ([SYSTEM, USER], "Be brief.", "<｜User｜>Hi"),
        ([USER], "", "<｜User｜>Hi"),
        ([DEVELOPER], "<｜User｜>Cite.", ""),
        ([DEVELOPER, USER], "<｜User｜>Cite.", "<｜User｜>Hi"),
    ],
)
def test_tools_are_described_at_the_head(messages: list[Message], before: str, after: str) -> None:
    assert written(messages, tools=TOOLS) == (
        f"{BEGIN}{before}\n\n{TOOLS_TEXT}{after}<｜Assistant｜><think>"
    )
    assert written(messages, tools=TOOLS, thinking=False) == (
        f"{BEGIN}{before}\n\n{TOOLS_TEXT}{after}<｜Assistant｜></think>"
    )


AGENT: list[Message] = [
    SYSTEM,
    {"role": "user", "content": "Weather?"},
    calling(
        call("a", "weather", '{"city": "Köln", "days": 2, "raw": true, "x": [1.0, "é", null]}'),
        call("b", "time", "{}"),
        reasoning_content="Look it up.",
        content="One moment.",
    ),
    result("noon", "b"),
    result('{"sun": 1}', "a"),
    answer("Sunny.", "Good."),
    USER,
]
CALLS = """

<｜DSML｜tool_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>
<｜DSML｜parameter name="raw" string="false">true</｜DSML｜parameter>
<｜DSML｜parameter name="x" string="false">[1.0, "é", null]</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="time">

</｜DSML｜invoke>
</｜DSML｜tool_calls>"""
RESULTS = '<tool_result>{"sun": 1}</tool_result>\n\n<tool_result>noon</tool_result>'


def test_calls_and_results_with_tools_keep_all_reasoning() -> None:
    assert written(AGENT, tools=TOOLS) == (
        f"{BEGIN}Be brief.\n\n{TOOLS_TEXT}"
        f"<｜User｜>Weather?<｜Assistant｜><think>Look it up.</think>One moment.{CALLS}{END}"
        f"<｜User｜>{RESULTS}<｜Assistant｜><think>Good.</think>Sunny.{END}"
        "<｜User｜>Hi<｜Assistant｜><think>"
    )


@pytest.mark.parametrize(("variables", "opening"), [({}, "<think>"), (NO_THINKING, "</think>")])
def test_calls_and_results_without_tools(variables: dict[str, object], opening: str) -> None:
    assert written(AGENT, **variables) == (
        f"{BEGIN}Be brief.<｜User｜>Weather?<｜Assistant｜></think>One moment.{CALLS}{END}"
        f"<｜User｜>{RESULTS}<｜Assistant｜></think>Sunny.{END}<｜User｜>Hi<｜Assistant｜>{opening}"
    )


def test_a_result_asks_for_the_next_answer() -> None:
    assert written(AGENT[:5]) == (
        f"{BEGIN}Be brief.<｜User｜>Weather?<｜Assistant｜></think>One moment.{CALLS}{END}"
        f"<｜User｜>{RESULTS}<｜Assistant｜><think>"
    )


def test_results_and_a_question_are_one_turn() -> None:
    """Results change places among themselves only."""
    messages = [*AGENT[:4], {"role": "user", "content": "Well?"}, AGENT[4]]
    assert written(messages, thinking=False).endswith(
        '<｜User｜><tool_result>{"sun": 1}</tool_result>\n\nWell?\n\n'
        "<tool_result>noon</tool_result><｜Assistant｜></think>"
    )


def test_results_may_come_after_another_answer() -> None:
    late = [*AGENT[:3], answer("Wait."), *AGENT[3:5]]
    assert written(late).endswith(f"Wait.{END}<｜User｜>{RESULTS}<｜Assistant｜><think>")


def test_results_without_ids_stay_in_order() -> None:
    calls = [call(None, "time", "{}"), call(None, "time", {})]
    text = written([USER, calling(*calls), result("1"), result("2", "x")], thinking=False)
    assert text == (
        f"{BEGIN}<｜User｜>Hi<｜Assistant｜></think>\n\n"
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="time">\n\n</｜DSML｜invoke>\n'
        f'<｜DSML｜invoke name="time">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>{END}'
        "<｜User｜><tool_result>1</tool_result>\n\n<tool_result>2</tool_result>"
        "<｜Assistant｜></think>"
    )


@pytest.mark.parametrize("variables", [NO_THINKING, {"drop_thinking": False}, {"tools": TOOLS}])
def test_a_prompt_begins_with_the_one_before_it_and_its_answer(
    variables: dict[str, object],
) -> None:
    """So the prefix cache holds all but the new question."""
    generated = f"Look it up.</think>One moment.{CALLS}"
    if variables == NO_THINKING:
        generated = f"One moment.{CALLS}"
    for messages, follow in ((AGENT[:2], AGENT[2:3]), (AGENT[:2], [answer(generated)])):
        before = written(messages, **variables) + generated + END
        assert written([*messages, *follow, *AGENT[3:5]], **variables).startswith(before)
    steps = [written(AGENT[:end], **variables) for end in (2, 5, 7)]
    assert steps[2].startswith(steps[1])
    assert steps[1].startswith(steps[0])


def test_where_reasoning_is_dropped_a_prompt_is_kept_up_to_the_last_question() -> None:
    before = written(TALK[:2])
    assert before.endswith("<think>")
    assert written(TALK).startswith(before.removesuffix("<think>") + "</think>")


@pytest.mark.parametrize(
    ("efforts", "level", "text"),
    [
        (EFFORTS, None, ""),
        (EFFORTS, "low", ""),
        (EFFORTS, "high", ABSOLUTE),
        (EFFORTS, "max", BEYOND),
        (PREVIEW_EFFORTS, None, ""),
        (PREVIEW_EFFORTS, "high", ""),
        (PREVIEW_EFFORTS, "max", ABSOLUTE),
    ],
)
def test_effort_is_a_text_before_everything(
    efforts: Mapping[str, str], level: str | None, text: str
) -> None:
    made, given = DsmlFormat(efforts), {"reasoning_effort": level}
    rest = "Be brief.<｜User｜>Hi<｜Assistant｜>"
    assert made.render([SYSTEM, USER], given) == f"{BEGIN}{text}{rest}<think>"
    assert made.render([SYSTEM, USER], given | NO_THINKING) == f"{BEGIN}{rest}</think>"
    described = f"{BEGIN}{text}\n\n{TOOLS_TEXT}<｜User｜>Hi<｜Assistant｜><think>"
    assert made.render([USER], given | {"tools": TOOLS}) == described


def test_a_developer_asks_like_a_user() -> None:
    assert written([SYSTEM, DEVELOPER]) == f"{BEGIN}Be brief.<｜User｜>Cite.<｜Assistant｜><think>"
    for variables in (NO_THINKING, {"drop_thinking": False}):
        assert written([DEVELOPER, USER], **variables).startswith(
            f"{BEGIN}<｜User｜>Cite.<｜User｜>Hi<｜Assistant｜>"
        )


PARTS = [{"type": "text", "text": "Hi"}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ([{"role": "critic"}], r"\[0\] has the role 'critic'; known are system, developer, user"),
        ([{"role": "user", "content": PARTS}], r"\[0\]\.content must be one text, not list; join"),
        ([USER, calling(reasoning_content=1)], r"\[1\]\.reasoning_content must be one text, not i"),
        ([SYSTEM], r"messages\[0\] is the last message and has the role 'system'; an answer foll"),
        ([USER, answer("a")], r"messages\[1\] is the last message and has the role 'assistant'"),
        ([DEVELOPER, USER], r"messages\[0\] has the role 'developer' and would be left out.*'syst"),
        ([calling(), calling(*[1])], r"\[1\]\.tool_calls\[0\] must be an object with a 'function'"),
        ([{"role": "assistant", "tool_calls": {}}], r"\[0\]\.tool_calls must be a list, not dict"),
        ([calling(call("a", "f", "{"))], r"\[0\]\.function\.arguments is no JSON: .*send an obj"),
        ([calling(call("a", "f", ""))], r"\.arguments is no JSON: .*send an object, maybe \{\}"),
        ([calling(call("a", "f", "[1]"))], r"\.arguments must be a JSON object, not list"),
        ([calling(call("a", "f", None))], r"\.arguments must be a JSON object, not NoneType"),
        ([calling(call("a", "f", "[" * 10**6))], r"\.arguments is no JSON: "),
        ([calling(call("a", "f", "[" * 66 + "]" * 66))], r"\.arguments is nested more than 64"),
        ([*AGENT[:3], result("1", "c")], r"\[3\]\.tool_call_id is 'c', .* are 'a', 'b'; name"),
        ([result("1", ["c"])], r"\[0\]\.tool_call_id must be one text, not list"),
    ],
)
def test_messages_that_cannot_be_written_are_refused(messages: list[Message], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        written(messages)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"thinking": "no"}, "thinking must be true or false, not 'no'"),
        ({"enable_thinking": 0}, "enable_thinking must be true or false, not 0"),
        ({"drop_thinking": 1}, "drop_thinking must be true or false, not 1"),
        ({"reasoning_effort": "xhigh"}, "must be one of low, high, max, not 'xhigh'"),
        ({"reasoning_effort": ["max"]}, "must be one of low, high, max, not"),
        ({"tools": {"name": "f"}}, "tools must be a list, not dict"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\] must be an object with a 'function'"),
        ({"tools": [TOOLS[0], {"function": {}}]}, r"tools\[1\] must be .* that has a 'name'"),
        ({"tools": [object()]}, r"tools\[0\] must be plain JSON data"),
    ],
)
def test_variables_that_make_no_sense_are_refused(
    variables: dict[str, object], message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        written([USER], **variables)


def test_the_caller_keeps_its_messages() -> None:
    messages = [dict(message) for message in AGENT]
    written(messages, tools=TOOLS)
    assert messages == AGENT
