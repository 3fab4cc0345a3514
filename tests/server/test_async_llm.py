"""One engine thread serves an event loop; whatever happens, nobody waits forever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from surefoot.async_llm import AsyncLLM
from surefoot.engine.models import LoadedModel
from surefoot.errors import EngineClosedError, PromptError, SettingError
from surefoot.llm import LLM
from surefoot.params import SamplingParams
from tests.server.serving import (
    PATIENCE_S,
    SteppedEngine,
    engine_of,
    handed_over,
    step_until,
    until,
)

PROMPTS = ["abc", "xyz xyz xyz", "q"]


def params(count: int = 12, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, **changes)  # type: ignore[arg-type]


@pytest.fixture
def engine(target: LoadedModel) -> Iterator[SteppedEngine]:
    engine = engine_of(target, drafter="ngram", max_waiting=8)
    yield engine
    if engine.held:
        engine.release()


def with_llm(engine: SteppedEngine, main: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    """Run `main`; afterwards nothing may be held."""

    async def run(llm: AsyncLLM) -> None:
        await asyncio.wait_for(main(llm), PATIENCE_S)

    llm = AsyncLLM(engine)
    try:
        asyncio.run(run(llm))
        if engine.held:
            engine.release()
        if llm.alive:
            asyncio.run(until(lambda: engine.idle))
            engine.parts.ledger.audit()
            assert engine.usage.held_pages == 0
    finally:
        if engine.held:
            engine.release()
        llm.close()
    assert not llm._thread.is_alive()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_streams_side_by_side_give_what_llm_gives(
    target: LoadedModel, engine: SteppedEngine, temperature: float
) -> None:
    values = params(temperature=temperature, seed=3, n=2, logprobs=1)
    with LLM.on(engine_of(target, drafter="none")) as plain:
        want = [result.outputs for result in plain.generate(PROMPTS, values)]

    async def main(llm: AsyncLLM) -> None:
        engine.hold()
        together = await llm.submit(PROMPTS, values)
        # After a step four of the six run; before it the line would be too long with six more.
        engine.let(1)
        await until(lambda: engine.held_after(1))
        coming = [asyncio.ensure_future(llm.submit([prompt], values)) for prompt in PROMPTS]
        await until(lambda: handed_over(llm) == 3)
        engine.release()
        alone = await asyncio.gather(*coming)
        outputs = await together.completions()
        assert [output.index for output in outputs] == list(range(6))
        for at, stream in enumerate(alone):
            got = await stream.completions()
            assert tuple(got) == want[at]
            for sample in range(2):
                assert outputs[2 * at + sample].text == got[sample].text
                assert outputs[2 * at + sample].logprobs == got[sample].logprobs

    with_llm(engine, main)


def test_pieces_come_while_the_engine_runs_on(engine: SteppedEngine) -> None:
    async def main(llm: AsyncLLM) -> None:
        engine.hold()
        stream = await llm.submit(["abc"], params(temperature=0.0))
        engine.let(3)
        first = await anext(stream)
        assert first.token_ids
        assert first.finish_reason is None
        assert not engine.idle
        engine.release()
        rest = [piece async for piece in stream]
        assert sum(len(piece.token_ids) for piece in [first, *rest]) == 12
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    with_llm(engine, main)


def test_closing_a_stream_ends_its_requests(engine: SteppedEngine) -> None:
    async def main(llm: AsyncLLM) -> None:
        engine.hold()
        kept = await llm.submit(["abc"], params(200, ignore_eos=True))
        await until(lambda: engine.asking)
        coming = asyncio.ensure_future(
            llm.submit(["abc", "xyz"], params(100, n=2, ignore_eos=True))
        )
        # They are there before a step ends, so the one that is kept does not come to its end.
        await until(lambda: handed_over(llm) == 1)
        await step_until(engine, coming.done)
        dropped = await coming
        engine.let(4)
        await anext(dropped)
        dropped.close()
        dropped.close()
        with pytest.raises(StopAsyncIteration):
            await anext(dropped)
        engine.let(2)
        await until(lambda: engine.usage.running + engine.usage.waiting == 1)
        engine.release()
        assert len((await kept.completions())[0].token_ids) == 200
        kept.close()

    with_llm(engine, main)


def test_a_task_that_is_cancelled_while_it_submits_leaves_nothing(engine: SteppedEngine) -> None:
    async def main(llm: AsyncLLM) -> None:
        engine.hold()
        running = await llm.submit(["abc"], params(100, ignore_eos=True))
        # Before it waits within a step, the engine would still take in the second one.
        await until(lambda: engine.asking)
        task = asyncio.ensure_future(llm.submit(["xyz"], params(100, ignore_eos=True)))
        await until(lambda: handed_over(llm) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.let(2)
        await until(lambda: engine.steps >= 2)
        assert engine.usage.running + engine.usage.waiting == 1
        running.close()

    with_llm(engine, main)


def test_prompts_are_taken_in_all_or_none(engine: SteppedEngine) -> None:
    async def main(llm: AsyncLLM) -> None:
        with pytest.raises(PromptError, match="outside the vocabulary"):
            await llm.submit(["good", [1, 99999]], params())
        with pytest.raises(PromptError, match="has 300 tokens"):
            await llm.submit([[1] * 300], params())
        with pytest.raises(SettingError, match="stop_token_ids"):
            await llm.submit(["good"], params(stop_token_ids=(99999,)))

    with_llm(engine, main)


def test_no_more_wait_than_may(engine: SteppedEngine) -> None:
    async def main(llm: AsyncLLM) -> None:
        engine.hold()
        streams = [await llm.submit(["abc"], params(20, ignore_eos=True))]
        # The first step lasts, so none of these gets in line: they are bounded on their way there.
        await until(lambda: engine.asking)
        tasks = [
            asyncio.ensure_future(llm.submit(["abc"], params(20, ignore_eos=True)))
            for _ in range(30)
        ]
        await until(lambda: handed_over(llm) == 8)
        assert sum(task.done() for task in tasks) == 30 - 8
        engine.release()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [error for error in done if isinstance(error, SettingError)]
        streams += [stream for stream in done if not isinstance(stream, BaseException)]
        assert len(refused) + len(streams) == 31
        assert refused
        assert {error.parameter for error in refused} == {"max_waiting"}
        with pytest.raises(PromptError, match="9 samples at once, more than max_waiting 8"):
            await llm.submit(["abc"] * 3, params(n=3))
        for stream in streams:
            assert len((await stream.completions())[0].token_ids) == 20

    with_llm(engine, main)


def test_closing_ends_running_and_waiting_streams(engine: SteppedEngine) -> None:
    ledger = engine.parts.ledger

    async def main(llm: AsyncLLM) -> None:
        engine.hold()
        running = await llm.submit(["abc"], params(100, ignore_eos=True))
        await until(lambda: engine.asking)
        coming = asyncio.ensure_future(llm.submit(["xyz"], params()))
        await until(lambda: handed_over(llm) == 1)
        closing = asyncio.ensure_future(asyncio.to_thread(llm.close))
        await until(lambda: handed_over(llm) == 2)
        engine.release()
        await closing
        with pytest.raises(EngineClosedError):
            await running.completions()
        with pytest.raises(EngineClosedError):
            await (await coming).completions()
        with pytest.raises(EngineClosedError):
            await llm.submit(["abc"], params())
        running.close()

    with_llm(engine, main)
    ledger.audit()
    assert ledger.held_pages == 0


def test_a_loop_that_is_gone_does_not_keep_the_engine_busy(engine: SteppedEngine) -> None:
    llm = AsyncLLM(engine)

    async def main() -> None:
        engine.hold()
        await llm.submit(["abc"], params(200, ignore_eos=True))

    asyncio.run(main())
    before = engine.steps
    engine.let(4)
    asyncio.run(until(lambda: engine.idle))
    assert engine.steps - before <= 4
    engine.release()
    llm.close()
    llm.close()
    assert llm.failure is None
