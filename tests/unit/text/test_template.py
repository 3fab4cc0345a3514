import enum
import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from surefoot.errors import PromptError, TokenizerError
from surefoot.text.template import ChatTemplate
from surefoot.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [{"role": "system", "content": "Be brief."}, USER],
        [USER, {"role": "assistant", "content": "Hello é 🎉\n"}, {"role": "user", "content": ""}],
        [{"role": "user", "content": "{{ not a template }} <b>&</b>"}],
    ],
)
def test_smollm2_template_renders_as_transformers(
    smollm2: Tokenizer,
    oracle: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    add_generation_prompt: bool,
) -> None:
    assert smollm2.chat_template is not None
    template = ChatTemplate(smollm2.chat_template, smollm2.special_tokens)
    ours = template.render(messages, add_generation_prompt=add_generation_prompt)
    theirs = oracle.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert ours == theirs
    ids = oracle.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert smollm2.encode(ours, add_special=False) == ids


FEATURES = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
    {% if loop.index > 3 %}
        {% break %}
    {% endif %}
[{{ message.role }}]{{ message | tojson }}
{% generation %}{{ message.content | trim }}{% endgeneration %}

    {% set ns = namespace(seen=false) %}
    {% set ns.seen = true %}
{{ ns.seen }} {{ message.content[::-1] }} {{ dict(a=1).a }}
{% endfor %}
{% if tools is not none %}tools {{ tools | tojson(indent=2) }}{% endif %}
{% if documents %}documents{% endif %}
{% if enable_thinking is defined %}think={{ enable_thinking }}{% endif %}
{% if add_generation_prompt %}go{% endif %}{{ eos_token }}
"""


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"tools": [{"type": "function", "function": {"name": "é<&>", "parameters": {}}}]},
        {"enable_thinking": False, "documents": [{"title": "t", "text": "x"}]},
        {"bos_token": "<own>"},
    ],
)
def test_template_features_render_as_transformers(
    oracle: PreTrainedTokenizerBase, kwargs: dict[str, Any]
) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": " <é> 🎉 "},
        {"role": "skip", "content": "x"},
        {"role": "assistant", "content": "a", "tool_calls": None, "reasoning": "because"},
        {"role": "user", "content": "cut"},
    ]
    ours = ChatTemplate(FEATURES, oracle.special_tokens_map).render(messages, kwargs)
    theirs = oracle.apply_chat_template(
        messages,
        chat_template=FEATURES,
        tokenize=False,
        add_generation_prompt=True,
        **kwargs,
    )
    assert ours == theirs


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_plain_data_reaches_the_template_unchanged(value: object) -> None:
    rendered = ChatTemplate("{{ extra | tojson }}").render([USER], {"extra": value})
    assert json.loads(rendered) == value
    assert rendered == json.dumps(value, ensure_ascii=False)


def test_the_clock_can_be_set() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 3, 14))
    assert template.render([USER]) == "14 Mar 2026"


def test_keys_without_a_value_count_as_absent() -> None:
    template = ChatTemplate("{{ 'x' in messages[0] }} {{ messages[0].y }}")
    assert template.render([USER | {"x": None, "y": 0}]) == "False 0"


def test_tuples_and_enumerations_become_plain_data() -> None:
    class Role(str, enum.Enum):  # noqa: UP042 - str() of a member is its name, unlike StrEnum's
        USER = "user"

    template = ChatTemplate("{{ messages[0].role }} {{ messages[0].content | tojson }}")
    assert template.render(({"role": Role.USER, "content": (1, True)},)) == "user [1, true]"


def test_the_caller_keeps_its_messages() -> None:
    messages = [{"role": "user", "content": ["a"], "thinking": "b"}]
    source = "{% set _ = messages[0].content.append('x') %}"
    with pytest.raises(TokenizerError, match="unsafe"):
        ChatTemplate(source).render(messages)
    assert messages == [{"role": "user", "content": ["a"], "thinking": "b"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__ }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__closure__[0] }}",
        "{{ (''|attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TokenizerError, match="chat template is unsafe"):
        ChatTemplate(source).render([USER])


def test_an_unsafe_attribute_prints_as_nothing() -> None:
    assert ChatTemplate("[{{ ''.__class__ }}]").render([USER]) == "[]"


def test_no_file_can_be_included() -> None:
    with pytest.raises(PromptError):
        ChatTemplate("{% include '/etc/passwd' %}").render([USER])


def test_the_templates_own_refusal_is_passed_on() -> None:
    source = "{{ raise_exception('Roles must alternate!') }}"
    with pytest.raises(PromptError, match="rejects the messages: Roles must alternate!") as caught:
        ChatTemplate(source).render([USER])
    assert caught.value.parameter == "prompt"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' + messages[0].missing }}",
        "{{ 'a' + messages[0].content }}",
        "{{ 1 // 0 }}",
        "{{ range(10**9) }}",
        "{{ unknown_function() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_a_prompt_error(source: str) -> None:
    with pytest.raises(PromptError, match="chat template rejects the messages"):
        ChatTemplate(source).render([{"role": "user", "content": ["parts"]}])


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% endfor %}", "\n{{ a | nofilter }}"])
def test_an_invalid_template_names_its_line(source: str) -> None:
    with pytest.raises(TokenizerError, match=rf"line {1 + source.count(chr(10))} of the chat"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("hello", "must be a list of objects, not str"),
        ({"role": "user"}, "must be a list of objects, not dict"),
        (["hello"], r"messages\[0\] must be an object with a role, not str"),
        ([USER, {"content": "x"}], r"messages\[1\] needs a role"),
        ([{"role": 3}], r"messages\[0\] needs a role, such as 'user', not 3"),
        ([USER | {"content": object()}], r"messages\[0\]\.content must be plain JSON data, not ob"),
        ([USER | {"parts": [{"a": b""}]}], r"messages\[0\]\.parts\[0\]\.a must be plain"),
    ],
)
def test_malformed_messages_are_named(messages: list[dict[str, object]], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        ChatTemplate("").render(messages)


def test_malformed_variables_are_named() -> None:
    with pytest.raises(PromptError, match="tools must be plain JSON data, not function"):
        ChatTemplate("").render([USER], {"tools": test_malformed_variables_are_named})


def test_variables_may_have_any_name_but_cannot_replace_the_messages() -> None:
    names = ["self", "messages", "add_generation_prompt", "context", "not a name"]
    source = "{{ messages[0].content }} {{ add_generation_prompt }}"
    assert ChatTemplate(source).render([USER], dict.fromkeys(names, 1)) == "Hi True"


@pytest.mark.parametrize("place", ["variable", "message"])
def test_data_nested_too_deep_is_refused(place: str) -> None:
    value: object = 0
    for _ in range(600):
        value = {"a": [value]}
    message = USER | ({"x": value} if place == "message" else {})
    with pytest.raises(PromptError, match=r"x is nested more than 64 levels deep; send"):
        ChatTemplate("").render([message], {"x": value} if place == "variable" else {})


def test_data_as_deep_as_may_be_reaches_the_template() -> None:
    value: object = 0
    for _ in range(64):
        value = [value]
    assert ChatTemplate("{{ x }}").render([USER], {"x": value}) == "[" * 64 + "0" + "]" * 64
