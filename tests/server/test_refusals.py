"""Mistakes are named, in OpenAI's shape and with the right status, and the server lives on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from surefoot.engine.models import LoadedModel
from tests.server.serving import (
    CHAT,
    COMPLETIONS,
    PATIENCE_S,
    Call,
    Served,
    handed_over,
    served,
    step_until,
    until,
)

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tiny(target: LoadedModel) -> Iterator[Served]:
    with served(target, drafter="ngram") as opened:
        yield opened


def refusal(tiny: Served, path: str, body: object) -> tuple[int, dict[str, Any]]:
    reply = asyncio.run(tiny.post(path, body))
    error = reply.json()
    assert list(error) == ["error"]
    assert list(error["error"]) == ["message", "type", "param", "code"]
    return reply.status_code, error["error"]


def nested(levels: int) -> object:
    """An empty list in a list in a list."""
    value: object = []
    for _ in range(levels):
        value = [value]
    return value


SHARED: list[tuple[dict[str, object], str, str]] = [
    ({"temperature": -1}, "temperature", "must be a number from 0 to 100, not -1"),
    ({"temperature": "warm"}, "temperature", "must be a valid number, not 'warm'"),
    ({"temperature": 1e400}, "temperature", "must be a "),
    ({"max_tokens": 0}, "max_tokens", "must be a whole number of at least 1, not 0"),
    ({"max_tokens": 1.5}, "max_tokens", "must be a valid integer"),
    ({"max_tokens": True}, "max_tokens", "must be a valid integer, not True"),
    ({"n": 65}, "n", "from 1 to 64, not 65"),
    ({"top_p": 0}, "top_p", "above 0 and at most 1"),
    ({"top_k": -1}, "top_k", "at least 0"),
    ({"min_p": 2}, "min_p", "from 0 to 1"),
    ({"presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 100"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty", "from 0.01 to 100"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
    ({"top_k": [[[]] * 60]}, "top_k", "must be a valid integer"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "9 is more than max_tokens 8"),
    ({"seed": -1}, "seed", "from 0 to"),
    ({"stop": [""]}, "stop", "an empty string matches everything"),
    ({"stop": ["x"] * 17}, "stop", "at most 16 strings"),
    ({"stop": 3}, "stop", "must be a valid string or a valid list, not 3"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is no token id"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "is no token id"),
    ({"logit_bias": {"1": "a"}}, "logit_bias.1", "must be a valid number"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "300"),
    ({"speculate": "yes"}, "speculate", "must be a valid boolean"),
    ({"stream": 1}, "stream", "must be a valid boolean"),
    ({"stream_options": {"bogus": 1}}, "stream_options.bogus", "not a field"),
    ({"bogus": 1}, "bogus", "is not a field that this server knows"),
    ({"top-k": 1}, "top-k", "is not a field"),
    ({"response_format": {"type": "json_object"}}, "response_format", "is not a field"),
    ({"tools": [{"type": "function"}]}, "tools", "is not a field"),
    ({"best_of": 2}, "best_of", "is not a field"),
]
OF_COMPLETIONS: list[tuple[object, str | None, str]] = [
    ({}, "prompt", "is required"),
    ({"prompt": ""}, "prompt", "is empty"),
    ({"prompt": []}, "prompt", "is empty"),
    ({"prompt": [[]]}, "prompt", "is empty"),
    ({"prompt": 7}, "prompt", "must be a valid string or a valid list, not 7"),
    ({"prompt": [1, "a"]}, "prompt", "must be a valid string or a valid integer or a valid list"),
    ({"prompt": [1, 259]}, "prompt", "token id 259 is outside the vocabulary"),
    ({"prompt": [-1]}, "prompt", "token id -1 is outside"),
    ({"prompt": "x" * 300}, "prompt", "has 300 tokens, and the context holds 256"),
    ({"prompt": "\ud800"}, "prompt", "lone surrogate"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "from 0 to 20"),
    ({"prompt": "a", "logprobs": True}, "logprobs", "must be a valid integer"),
    ({"prompt": "a", "echo": True}, "echo", "is not a field"),
    ({"prompt": "a", "messages": USER}, "messages", "is not a field"),
    ([], None, "must be a JSON object"),
    ("text", None, "must be a JSON object"),
    (None, None, "must be a JSON object"),
]
OF_CHAT: list[tuple[dict[str, object], str, str]] = [
    ({}, "messages", "is required"),
    ({"messages": []}, "messages", "is empty"),
    ({"messages": "hi"}, "messages", "must be a valid list, not 'hi'"),
    ({"messages": ["hi"]}, "messages[0]", "must be a valid dictionary, not 'hi'"),
    ({"messages": [{"content": "hi"}]}, "messages", "messages[0] needs a role"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "the context holds 256"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "messages[0].content[0] is not of type 'text'",
    ),
    ({"messages": USER, "top_logprobs": 2}, "top_logprobs", "without logprobs: true"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "logprobs", "from 0 to 20"),
    ({"messages": USER, "logprobs": 3}, "logprobs", "must be a valid boolean"),
    (
        {"messages": USER, "max_tokens": 3, "max_completion_tokens": 4},
        "max_tokens",
        "contradicts max_completion_tokens",
    ),
    (
        {"messages": USER, "chat_template_kwargs": {"messages": 1}},
        "chat_template_kwargs",
        "cannot replace 'messages'",
    ),
    (
        {"messages": USER, "chat_template_kwargs": {"x": nested(600)}},
        "messages",
        "x is nested more than 64 levels deep",
    ),
    (
        {"messages": [{**USER[0], "x": nested(600)}]},
        "messages",
        "messages[0].x is nested more than 64 levels deep",
    ),
]


@pytest.mark.parametrize(("body", "param", "message"), SHARED)
def test_a_bad_value_is_named(
    tiny: Served, body: dict[str, object], param: str, message: str
) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        # JSON has no infinity, but the parser on the other side takes what Python writes.
        status, error = refused_text(tiny, path, json.dumps({**prompt, **body}))
        assert status == 400
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: ")
        assert message in error["message"]
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("body", "param", "message"), OF_COMPLETIONS)
def test_a_bad_completion_is_named(
    tiny: Served, body: object, param: str | None, message: str
) -> None:
    status, error = refused_text(tiny, COMPLETIONS, json.dumps(body))
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize(("body", "param", "message"), OF_CHAT)
def test_a_bad_chat_is_named(
    tiny: Served, body: dict[str, object], param: str, message: str
) -> None:
    status, error = refusal(tiny, CHAT, body)
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


def refused_text(tiny: Served, path: str, text: str) -> tuple[int, dict[str, Any]]:
    async def main() -> tuple[int, dict[str, Any]]:
        async with tiny.client() as client:
            headers = {"content-type": "application/json"}
            reply = await client.post(path, content=text, headers=headers)
            return reply.status_code, reply.json()["error"]

    return asyncio.run(main())


@pytest.mark.parametrize("text", ["{", "nonsense", "", '{"prompt": "a"', "[" * 100_000])
def test_what_is_no_json_is_refused(tiny: Served, text: str) -> None:
    status, error = refused_text(tiny, COMPLETIONS, text)
    assert status == 400
    assert "body" in error["message"]


def test_a_body_of_another_type_is_refused(tiny: Served) -> None:
    async def main() -> Any:
        async with tiny.client() as client:
            return (await client.post(COMPLETIONS, data={"prompt": "a"})).json()["error"]

    assert "Content-Type: application/json" in asyncio.run(main())["message"]


def test_fields_without_meaning_here_are_taken(tiny: Served) -> None:
    neutral = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "tools": [],
        "temperature": None,
        "stop": None,
        "bogus": None,
        "chat_template_kwargs": {"mood": "good"},
    }
    plain = {"messages": USER, "max_tokens": 4}
    replies = [
        asyncio.run(tiny.post(CHAT, body)).json()["choices"][0]["message"]
        for body in (plain, {**plain, **neutral})
    ]
    assert replies[0] == replies[1]


@pytest.mark.parametrize("levels", [600, 900, 5000])
def test_deep_nesting_anywhere_is_refused(tiny: Served, levels: int) -> None:
    deep = "[" * levels + "]" * levels
    user = json.dumps(USER[0])
    bodies = [
        (COMPLETIONS, f'{{"prompt": {deep}}}'),
        (COMPLETIONS, f'{{"prompt": "a", "temperature": {deep}}}'),
        (COMPLETIONS, f'{{"prompt": "a", "stop": [{deep}]}}'),
        (COMPLETIONS, f'{{"prompt": "a", "bogus": {deep}}}'),
        (COMPLETIONS, f'{{"prompt": "a", "tools": {deep}}}'),
        (CHAT, f'{{"messages": {deep}}}'),
        (CHAT, f'{{"messages": [{user}], "chat_template_kwargs": {deep}}}'),
        (CHAT, f'{{"messages": [{{"role": {deep}, "content": ""}}]}}'),
        (CHAT, f'{{"messages": [{{"role": "user", "content": {deep}}}]}}'),
        (CHAT, deep),
    ]
    for path, text in bodies:
        status, error = refused_text(tiny, path, text)
        assert (status, error["type"]) == (400, "invalid_request_error"), text[:60]


def test_a_template_variable_may_have_any_name(tiny: Served) -> None:
    names = ["self", "context", "loop", "variables", "caller", "range", "__class__", "1 2"]
    for name in names:
        body = {"messages": USER, "max_tokens": 2, "chat_template_kwargs": {name: 1}}
        assert asyncio.run(tiny.post(CHAT, body)).status_code == 200, name


def test_content_in_parts_is_put_together(tiny: Served) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    split = [{"role": "user", "content": parts}]
    replies = [
        asyncio.run(tiny.post(CHAT, {"messages": messages, "max_tokens": 4})).json()
        for messages in (USER, split)
    ]
    assert replies[0]["choices"] == replies[1]["choices"]


def test_another_model_is_unknown(tiny: Served) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        text = json.dumps({**body, "model": "gpt-\ud8005"})
        status, error = refused_text(tiny, path, text)
        assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
        assert "'tiny'" in error["message"]
    assert asyncio.run(tiny.get("/v1/models/other")).status_code == 404


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), (COMPLETIONS, 405)])
def test_an_unknown_path_has_the_same_shape(tiny: Served, path: str, status: int) -> None:
    reply = asyncio.run(tiny.get(path))
    assert reply.status_code == status
    assert reply.json()["error"]["code"] == "unknown_url"


def test_a_model_without_tokenizer_takes_ids_only(bare: LoadedModel) -> None:
    with served(bare, drafter="none") as opened:
        status, error = refusal(opened, CHAT, {"messages": USER})
        assert (status, error["param"]) == (400, "messages")
        assert "no chat template; use /v1/completions" in error["message"]
        status, error = refusal(opened, COMPLETIONS, {"prompt": "text"})
        assert (status, error["param"]) == (400, "prompt")
        reply = asyncio.run(opened.post(COMPLETIONS, {"prompt": [1, 2], "logprobs": 0}))
        assert reply.json()["usage"]["completion_tokens"] == 16
        opened.assert_at_rest()


def test_a_full_queue_says_when_to_come_back(target: LoadedModel) -> None:
    with served(target, drafter="none", max_rows=1, max_waiting=3) as opened:

        async def main() -> None:
            engine = opened.engine
            engine.hold()
            engine.let(1)
            body = {"prompt": "a", "max_tokens": 5, "n": 1}
            first = asyncio.ensure_future(opened.post(COMPLETIONS, body))
            await until(lambda: engine.held_after(1))
            others = [asyncio.ensure_future(opened.post(COMPLETIONS, body)) for _ in range(3)]
            await until(lambda: handed_over(opened.llm) == 3)
            replies = [await opened.post(COMPLETIONS, body)]
            engine.let(1)
            await until(lambda: engine.held_after(2))
            # Now those before it are in line, no more on their way there.
            assert engine.usage.waiting == 3
            late = asyncio.ensure_future(opened.post(COMPLETIONS, body))
            await until(lambda: handed_over(opened.llm) == 1)
            engine.let(1)
            replies.append(await late)
            for reply in replies:
                assert reply.status_code == 429
                assert reply.headers["retry-after"] == "1"
                assert reply.json()["error"]["code"] == "queue_full"
            assert (await opened.post(COMPLETIONS, {**body, "n": 4})).status_code == 400
            engine.release()
            answers = await asyncio.gather(first, *others)
            assert [answer.status_code for answer in answers] == [200] * 4

        asyncio.run(main())
        opened.assert_at_rest()


def test_a_failing_request_ends_alone(
    tiny: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = tiny.text("abc", max_tokens=6)

    def fail(*_: object) -> None:
        raise ValueError("a secret path")

    with monkeypatch.context() as patch:
        patch.setattr(tiny.engine.parts.loop._runner, "run", fail)
        status, error = refusal(tiny, COMPLETIONS, {"prompt": "abc"})
        assert (status, error["type"], error["code"]) == (500, "server_error", "failed")
        assert "secret" not in error["message"]
        call = Call(CHAT, {"messages": USER, "stream": True})
        asyncio.run(call.run(tiny.app))
        assert json.loads(call.events[-1].removeprefix(b"data: "))["error"]["code"] == "failed"
    assert "a secret path" in caplog.text
    assert tiny.text("abc", max_tokens=6) == before
    tiny.assert_at_rest()


def test_a_bug_met_at_the_door_ends_one_request(
    tiny: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(tiny.engine, "submit", fail)
        status, error = refusal(tiny, COMPLETIONS, {"prompt": "abc"})
        assert (status, error["type"]) == (500, "server_error")
    assert tiny.text("abc", max_tokens=2)


def test_a_dead_engine_is_unhealthy(target: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    with served(target, drafter="none") as opened:
        assert asyncio.run(opened.get("/health")).json() == {"status": "ok"}
        opened.engine.hold()

        async def main() -> None:
            call = Call(COMPLETIONS, {"prompt": "a", "max_tokens": 90, "stream": True})
            streaming = asyncio.ensure_future(call.run(opened.app))
            whole = asyncio.ensure_future(opened.post(CHAT, {"messages": USER}))
            # Both are there before a step ends, so neither has its answer before the other comes.
            await until(lambda: opened.in_the_house + handed_over(opened.llm) == 2)
            await step_until(opened.engine, lambda: opened.engine.usage.running == 2)
            await step_until(opened.engine, lambda: bool(call.events))
            opened.engine.parts.loop._scheduler.plan = None  # type: ignore[method-assign,assignment]
            opened.engine.release()
            await asyncio.wait_for(streaming, PATIENCE_S)
            last = json.loads(call.events[-1].removeprefix(b"data: "))
            assert last["error"]["code"] == "stopped"
            assert (await whole).status_code == 503

        asyncio.run(main())
        assert isinstance(opened.llm.failure, TypeError)
        assert asyncio.run(opened.get("/health")).status_code == 503
        status, error = refusal(opened, COMPLETIONS, {"prompt": "a"})
        assert (status, error["type"]) == (503, "service_unavailable")
    assert "the engine has stopped" in caplog.text
