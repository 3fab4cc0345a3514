"""How often two models would choose the same token."""

from __future__ import annotations

from pathlib import Path

from surefoot.config import make_config
from surefoot.engine.engine import Engine
from surefoot.engine.models import load
from surefoot.errors import ModelError
from surefoot.llm import LLM
from surefoot.params import SamplingParams


def agreement(one: Path, other: Path, text: Path, tokens: int) -> tuple[float, int]:
    """Share of places in a text with the same best next token, and how many places there are.

    Raises:
        ModelError: there is no tokenizer, or too little text.
    """
    said = [best_tokens(folder, text, tokens) for folder in (one, other)]
    return sum(a == b for a, b in zip(*said, strict=True)) / len(said[0]), len(said[0])


def best_tokens(folder: Path, text: Path, tokens: int) -> list[int]:
    """The best next token at each place but the last."""
    config = make_config(drafter="none")
    model = load(str(folder), config)
    if model.tokenizer is None:
        raise ModelError(f"{folder} has no tokenizer, so no text can be read")
    prompt = model.tokenizer.encode(text.read_text("utf-8"))[:tokens]
    if len(prompt) < 2:
        raise ModelError(f"{text} has fewer than two tokens")
    with LLM.on(Engine(model, config)) as llm:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        (result,) = llm.generate([prompt], params)
    assert result.prompt_logprobs is not None, "they were asked for"
    return [max(entry, key=entry.__getitem__) for entry in result.prompt_logprobs if entry]
