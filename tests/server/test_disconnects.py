"""A client that leaves frees what it held within two steps, wherever its request is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

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

LONG = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module", params=["none", "ngram"])
def tiny(target: LoadedModel, request: pytest.FixtureRequest) -> Iterator[Served]:
    with served(target, drafter=request.param, prefill_chunk=8, max_rows=2) as opened:
        yield opened


async def leave_and_count(tiny: Served, call: Call, running: asyncio.Task[None]) -> int:
    """Steps from the client's leaving until everything is free."""
    before = tiny.engine.steps
    call.leave()
    await asyncio.wait_for(running, PATIENCE_S)
    tiny.engine.let(2)
    await until(lambda: tiny.engine.idle)
    return tiny.engine.steps - before


def run_until_left(tiny: Served, call: Call, steps: int) -> int:
    async def main() -> int:
        tiny.engine.hold()
        running = asyncio.ensure_future(call.run(tiny.app))
        begun = tiny.engine.steps
        tiny.engine.let(steps)
        await until(lambda: tiny.engine.steps == begun + steps and not tiny.engine.idle)
        return await leave_and_count(tiny, call, running)

    try:
        return asyncio.run(main())
    finally:
        tiny.engine.release()


@pytest.mark.parametrize("steps", [0, 2, 7])
@pytest.mark.parametrize("stream", [False, True])
def test_a_slot_is_free_within_two_steps(tiny: Served, steps: int, stream: bool) -> None:
    before = tiny.text("abc", max_tokens=4)
    # The prompt takes four steps, so the client also leaves between two chunks of it.
    body = {"prompt": "x" * 30 + str(steps), "stream": stream, "n": 2, **LONG}
    assert run_until_left(tiny, Call(COMPLETIONS, body), steps) <= 2
    tiny.assert_at_rest()
    assert tiny.text("abc", max_tokens=4) == before


def test_a_client_that_never_leaves_keeps_its_slot(tiny: Served) -> None:
    async def main() -> None:
        tiny.engine.hold()
        body = {"prompt": "abc", "stream": True, "max_tokens": 20}
        call = Call(COMPLETIONS, body)
        running = asyncio.ensure_future(call.run(tiny.app))
        tiny.engine.let(4)
        await call.first_event()
        assert tiny.engine.usage.running == 1
        tiny.engine.release()
        await asyncio.wait_for(running, PATIENCE_S)
        assert call.events[-1] == b"data: [DONE]\n\n"

    asyncio.run(main())
    tiny.assert_at_rest()


def test_a_waiting_request_leaves_the_line(tiny: Served) -> None:
    async def main() -> None:
        tiny.engine.hold()
        calls = [Call(CHAT, chat(letter)) for letter in "abcd"]
        runs: list[asyncio.Task[None]] = []
        for call in calls:
            runs.append(asyncio.ensure_future(call.run(tiny.app)))
            # No step ends before the last is there: the first might be through by then.
            await until(lambda: tiny.in_the_house + handed_over(tiny.llm) == len(runs))
        await step_until(tiny.engine, lambda: tiny.in_the_house == 4)
        assert tiny.engine.usage.waiting >= 2
        calls[3].leave()
        await runs[3]
        tiny.engine.let(2)
        await until(lambda: tiny.in_the_house == 3)
        for call in calls:
            call.leave()
        await asyncio.gather(*runs)

    try:
        asyncio.run(main())
    finally:
        tiny.engine.release()
    asyncio.run(until(lambda: tiny.engine.idle))
    tiny.assert_at_rest()


def test_leaving_changes_nothing_for_others(tiny: Served) -> None:
    alone = tiny.text("keep", max_tokens=24, temperature=0.9, seed=5)

    async def main() -> str:
        other = Call(COMPLETIONS, {"prompt": "leaves", "stream": True, **LONG})
        running = asyncio.ensure_future(other.run(tiny.app))
        body = {"prompt": "keep", "max_tokens": 24, "temperature": 0.9, "seed": 5}
        asked = asyncio.ensure_future(tiny.post(COMPLETIONS, body))
        await other.first_event()
        other.leave()
        await running
        text = (await asked).json()["choices"][0]["text"]
        assert isinstance(text, str)
        return text

    assert asyncio.run(main()) == alone
    asyncio.run(until(lambda: tiny.engine.idle))
    tiny.assert_at_rest()


def chat(letter: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": letter}], "stream": True, **LONG}
