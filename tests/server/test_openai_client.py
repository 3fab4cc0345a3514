"""The official client, over a socket: equal texts, whole or streamed, drafted for or not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from surefoot.engine.models import LoadedModel
from surefoot.llm import LLM
from surefoot.params import SamplingParams
from tests.server.serving import NAME, Running, engine_of, handed_over, running, until

QUESTIONS = ["Hello", "a b a b a b a b", "", "Zażółć gęślą jaźń 🙂", "xyz" * 9, "7", "??", "end"]
HOT: dict[str, Any] = {"temperature": 0.9, "seed": 11, "top_p": 0.95}
GREEDY: dict[str, Any] = {"temperature": 0.0}
TOKENS = 16


def chat(question: str) -> Any:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def want(target: LoadedModel) -> dict[tuple[str, bool], str]:
    """What `LLM` answers to every question, without a drafter."""
    with LLM.on(engine_of(target, drafter="none")) as llm:
        answers = {}
        for hot, values in ((False, GREEDY), (True, HOT)):
            params = SamplingParams(max_tokens=TOKENS, **values)
            results = llm.chat([chat(question) for question in QUESTIONS], params)
            for question, result in zip(QUESTIONS, results, strict=True):
                answers[question, hot] = result.outputs[0].text
        return answers


@pytest.fixture(scope="module", params=["none", "ngram"])
def run(target: LoadedModel, request: pytest.FixtureRequest) -> Iterator[Running]:
    with running(target, drafter=request.param) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(run: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=run.base_url, api_key="any", max_retries=0) as opened:
        yield opened


@pytest.mark.parametrize("hot", [False, True])
def test_whole_and_streamed_texts_are_those_of_llm(
    client: OpenAI, want: dict[tuple[str, bool], str], hot: bool
) -> None:
    values = HOT if hot else GREEDY
    for question in QUESTIONS[:3]:
        whole = client.chat.completions.create(
            model=NAME, messages=chat(question), max_completion_tokens=TOKENS, **values
        )
        events = client.chat.completions.create(
            model=NAME, messages=chat(question), max_tokens=TOKENS, stream=True, **values
        )
        pieces = [choice for chunk in events for choice in chunk.choices]
        assert whole.choices[0].message.content == want[question, hot]
        assert "".join(piece.delta.content or "" for piece in pieces) == want[question, hot]
        assert pieces[0].delta.role == "assistant"
        reasons = [piece.finish_reason for piece in pieces]
        assert reasons[-1] == whole.choices[0].finish_reason == "length"
        assert set(reasons[:-1]) == {None}


def test_drafting_spares_steps_and_can_be_declined(run: Running, client: OpenAI) -> None:
    """Equal texts prove little if nothing was drafted, or always was."""
    spent = []
    for extra in ({}, {"speculate": False}):
        before = run.served.engine.steps
        client.completions.create(
            model=NAME, prompt="a b a b a b", max_tokens=60, temperature=0, extra_body=extra
        )
        spent.append(run.served.engine.steps - before)
    drafter = run.served.engine.parts.drafter.name
    assert spent[1] >= 60
    assert (spent[0] < spent[1]) is (drafter == "ngram")


def test_eight_clients_at_once_each_get_their_solo_text(
    run: Running, want: dict[tuple[str, bool], str]
) -> None:
    async def ask(client: AsyncOpenAI, question: str, stream: bool) -> str | None:
        if not stream:
            whole = await client.chat.completions.create(
                model=NAME, messages=chat(question), max_tokens=TOKENS, **HOT
            )
            content: str | None = whole.choices[0].message.content
            return content
        text = ""
        events = await client.chat.completions.create(
            model=NAME, messages=chat(question), max_tokens=TOKENS, stream=True, **HOT
        )
        async for chunk in events:
            text += chunk.choices[0].delta.content or ""
        return text

    async def main() -> list[str | None]:
        async with AsyncOpenAI(base_url=run.base_url, api_key="any", max_retries=0) as client:
            asked = [ask(client, text, bool(at % 2)) for at, text in enumerate(QUESTIONS)]
            return await asyncio.gather(*asked)

    assert len(QUESTIONS) == 8
    assert asyncio.run(main()) == [want[question, True] for question in QUESTIONS]
    run.served.assert_at_rest()


def test_a_client_that_disconnects_frees_its_slot_within_two_steps(
    run: Running, client: OpenAI
) -> None:
    engine = run.served.engine
    begun = engine.steps
    with engine.holding():
        engine.let(6)
        events = client.completions.create(model=NAME, prompt="long", max_tokens=200, stream=True)
        next(iter(events))
        # Steps that were let go before would count as those that follow.
        asyncio.run(until(lambda: engine.held_after(begun + 6)))
        assert engine.usage.running == 1
        events.close()
        asyncio.run(until(lambda: handed_over(run.served.llm) == 1))
        engine.let(2)
        asyncio.run(until(lambda: engine.idle))
        assert engine.steps - begun <= 6 + 2
    run.served.assert_at_rest()


def test_samples_and_logprobs_of_a_chat(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model=NAME, messages=chat("two"), n=2, max_tokens=5, logprobs=True, top_logprobs=3, **HOT
    )
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].message.content != whole.choices[1].message.content
    for choice in whole.choices:
        assert choice.logprobs is not None
        content = choice.logprobs.content
        assert content is not None
        assert len(content) == 5
        for token in content:
            assert len(token.top_logprobs) == 3
            best = [other.logprob for other in token.top_logprobs]
            assert best == sorted(best, reverse=True)
            assert token.logprob <= best[0]
        raw = b"".join(bytes(token.bytes or []) for token in content)
        assert raw.decode("utf-8", "replace") == choice.message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 10


def test_streamed_samples_logprobs_and_usage(client: OpenAI) -> None:
    values: dict[str, Any] = {"n": 2, "max_tokens": 6, "logprobs": True, "top_logprobs": 2, **HOT}
    whole = client.chat.completions.create(model=NAME, messages=chat("two"), **values)
    chunks = list(
        client.chat.completions.create(
            model=NAME,
            messages=chat("two"),
            stream=True,
            stream_options={"include_usage": True},
            **values,
        )
    )
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    for choice in whole.choices:
        parts = [p for chunk in chunks for p in chunk.choices if p.index == choice.index]
        assert "".join(p.delta.content or "" for p in parts) == choice.message.content
        streamed = [token for p in parts if p.logprobs for token in p.logprobs.content or []]
        assert choice.logprobs is not None
        assert streamed == choice.logprobs.content


def test_several_prompts_of_a_completion(client: OpenAI, target: LoadedModel) -> None:
    with LLM.on(engine_of(target, drafter="none")) as llm:
        params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=2)
        want = [result.outputs[0] for result in llm.generate(["one", "two"], params)]
    whole = client.completions.create(
        model=NAME, prompt=["one", "two"], max_tokens=9, temperature=0, logprobs=2
    )
    assert [choice.text for choice in whole.choices] == [output.text for output in want]
    for choice, output in zip(whole.choices, want, strict=True):
        assert choice.logprobs is not None
        assert output.logprobs is not None
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        assert choice.logprobs.token_logprobs == [entry[token] for token, entry in pairs]
        assert choice.logprobs.text_offset is not None
        assert choice.logprobs.text_offset[0] == 0
        assert len(choice.logprobs.tokens or []) == 9
    pieces = client.completions.create(
        model=NAME, prompt=["one", "two"], max_tokens=9, temperature=0, stream=True
    )
    texts = ["", ""]
    for chunk in pieces:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [output.text for output in want]


def test_a_cached_prefix_is_counted(client: OpenAI) -> None:
    for cached in (0, 32):
        whole = client.completions.create(model=NAME, prompt="cache me " * 4, max_tokens=1)
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 36
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == cached


def test_stop_strings_and_reasons(client: OpenAI) -> None:
    full = client.completions.create(model=NAME, prompt="ab", max_tokens=24, temperature=0)
    text = full.choices[0].text
    stop = text[8:10]
    whole = client.completions.create(
        model=NAME, prompt="ab", max_tokens=24, temperature=0, stop=[stop]
    )
    pieces = client.completions.create(
        model=NAME, prompt="ab", max_tokens=24, temperature=0, stop=stop, stream=True
    )
    choices = [chunk.choices[0] for chunk in pieces]
    assert whole.choices[0].text == text[: text.index(stop)]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert choices[-1].finish_reason == whole.choices[0].finish_reason == "stop"


def test_models_and_errors_as_the_client_sees_them(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "surefoot"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=NAME, prompt="a", temperature=-1)
    assert bad.value.param == "temperature"


def test_stopping_the_server_ends_open_streams(target: LoadedModel) -> None:
    with running(target, drafter="none") as run:
        engine = run.served.engine
        with OpenAI(base_url=run.base_url, api_key="any", max_retries=0) as client:
            engine.hold()
            engine.let(6)
            events = iter(
                client.completions.create(model=NAME, prompt="a", max_tokens=200, stream=True)
            )
            next(events)
            asyncio.run(until(lambda: engine.held_after(6)))
            run.server.should_exit = True
            # The engine is told to stop before it goes on.
            asyncio.run(until(lambda: handed_over(run.served.llm) == 1))
            engine.release()
            with pytest.raises(openai.APIError, match="the engine has stopped"):
                list(events)
        run.stop()
        assert not run.served.llm.alive
        assert run.served.llm.failure is None
