"""A hybrid with a draft head, served to several clients: equal texts, drafted for or not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from surefoot.config import make_config
from surefoot.engine.models import LoadedModel, load
from surefoot.llm import LLM
from surefoot.params import SamplingParams
from surefoot.testing.tiny_hybrids import write_tiny_hybrid
from tests.server.serving import COMPLETIONS, Call, Served, engine_of, served, until

PROMPTS = ["hello", "abc abc abc", "x" * 70]
VALUES: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 3}
PAGE: dict[str, Any] = {"page_tokens": 32, "max_rows": 8}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("hybrid")
    write_tiny_hybrid(
        folder, "Qwen3_5ForCausalLM", tokenizer=True, dial=0.3, layers=2, interval=2, positions=256
    )
    return load(str(folder), make_config(device="cpu"))


@pytest.fixture(scope="module")
def want(hybrid: LoadedModel) -> list[str]:
    with LLM.on(engine_of(hybrid, drafter="none", **PAGE)) as llm:
        results = llm.generate(PROMPTS, SamplingParams(**VALUES))
        return [result.outputs[0].text for result in results]


async def ask_all(opened: Served) -> list[Any]:
    asked = [opened.post(COMPLETIONS, {"prompt": prompt, **VALUES}) for prompt in PROMPTS]
    return [reply.json() for reply in await asyncio.gather(*asked)]


@pytest.mark.parametrize("drafter", ["none", "ngram", "mtp"])
def test_texts_are_those_of_llm(hybrid: LoadedModel, want: list[str], drafter: str) -> None:
    with served(hybrid, drafter=drafter, **PAGE) as opened:
        for cached in (0, 64):
            replies = asyncio.run(ask_all(opened))
            assert [reply["choices"][0]["text"] for reply in replies] == want
            details = replies[-1]["usage"]["prompt_tokens_details"]
            assert details == {"cached_tokens": cached}
            opened.assert_at_rest()
        alone = opened.engine.steps
        opened.text("hello", **VALUES)
        assert (opened.engine.steps - alone < 40) is (drafter == "mtp")


def test_a_client_that_leaves_frees_the_state(hybrid: LoadedModel, want: list[str]) -> None:
    with served(hybrid, drafter="mtp", **PAGE) as opened:

        async def main() -> int:
            opened.engine.hold()
            opened.engine.let(6)
            call = Call(COMPLETIONS, {"prompt": "leaves", "max_tokens": 150, "stream": True})
            running = asyncio.ensure_future(call.run(opened.app))
            await until(lambda: opened.engine.steps == 6)
            call.leave()
            await running
            opened.engine.let(2)
            await until(lambda: opened.engine.idle)
            return opened.engine.steps - 6

        assert asyncio.run(main()) <= 2
        opened.engine.release()
        opened.assert_at_rest()
        assert [reply["choices"][0]["text"] for reply in asyncio.run(ask_all(opened))] == want
