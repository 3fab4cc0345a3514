"""How conversations reach a model that brings no chat template, by each way a user may go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from surefoot.cli.asks import Ask
from surefoot.cli.lanes import Texts
from surefoot.config import make_config
from surefoot.engine.models import LoadedModel, load
from surefoot.llm import LLM
from surefoot.params import SamplingParams
from surefoot.testing.tiny_latents import write_tiny_latents
from tests.server.serving import CHAT, engine_of, served

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
TALK = "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>"
ABSOLUTE, BEYOND = "Reasoning Effort: Absolute maximum", "Reasoning Effort: Beyond maximum"
PREVIEW = 'REASONING_EFFORT_MAX = "..."\n'
RELEASE = 'raise SystemExit("run")\nREASONING_EFFORT_PROMPTS: Dict[str, str] = {}\n'


def load_latents(folder: Path) -> LoadedModel:
    return load(str(folder), make_config(device="cpu"))


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_latents(write_tiny_latents(tmp_path_factory.mktemp("latents"), tokenizer=True))


def test_a_conversation_offline(latents: LoadedModel) -> None:
    with LLM.on(engine_of(latents, page_tokens=16, drafter="none")) as llm:
        (result,) = llm.chat(MESSAGES, SamplingParams(max_tokens=2))
        assert bytes(result.prompt_token_ids).decode() == TALK + "<think>"
        (result,) = llm.chat(MESSAGES, SamplingParams(max_tokens=2), {"enable_thinking": False})
        assert bytes(result.prompt_token_ids).decode() == TALK + "</think>"
        opened = llm.render_chat(MESSAGES, {"add_generation_prompt": False})
        assert bytes(opened).decode() == TALK.removesuffix("<｜Assistant｜>")


def test_a_conversation_over_http(latents: LoadedModel) -> None:
    with served(latents, page_tokens=16, drafter="none") as opened:
        body = {"messages": MESSAGES, "max_tokens": 2}
        for options, end in (({}, "<think>"), ({"thinking": False}, "</think>")):
            reply = asyncio.run(opened.post(CHAT, body | {"chat_template_kwargs": options}))
            assert reply.status_code == 200
            assert reply.json()["usage"]["prompt_tokens"] == len((TALK + end).encode())
        reply = asyncio.run(opened.post(CHAT, {"messages": [{"role": "critic"}]}))
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "messages")
        assert "the role 'critic'; known are system" in error["message"]
        opened.assert_at_rest()


def test_a_conversation_as_a_benchmarks_prompt(latents: LoadedModel) -> None:
    texts = Texts([Ask(messages=MESSAGES)], random=False, prompt_tokens=None)
    assert bytes(texts.prompts(latents, 1)[0]).decode() == TALK + "<think>"


def test_a_template_in_the_folder_comes_first(tmp_path: Path) -> None:
    write_tiny_latents(tmp_path, tokenizer=True)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[1].content }}!")
    with LLM.on(engine_of(load_latents(tmp_path), page_tokens=16, drafter="none")) as llm:
        assert bytes(llm.render_chat(MESSAGES, {})) == b"Hi!"


@pytest.mark.parametrize(
    ("encoder", "high", "top"),
    [(None, "Be brief", ABSOLUTE), (PREVIEW, "Be brief", ABSOLUTE), (RELEASE, ABSOLUTE, BEYOND)],
)
def test_the_releases_encoder_tells_its_levels_of_effort(
    tmp_path: Path, encoder: str | None, high: str, top: str
) -> None:
    write_tiny_latents(tmp_path, tokenizer=True)
    if encoder is not None:
        (tmp_path / "encoding").mkdir()
        (tmp_path / "encoding" / "encoding_dsv4.py").write_text(encoder)
    made = load_latents(tmp_path).chat_format
    assert made is not None
    for level, text in (("high", high), ("max", top)):
        prompt = made.render(MESSAGES, {"reasoning_effort": level})
        assert prompt.startswith("<｜begin▁of▁sentence｜>" + text)
