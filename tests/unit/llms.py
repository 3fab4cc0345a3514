"""Small models behind the offline front door."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefoot.config import make_config
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel, load
from surefoot.llm import LLM, Piece
from surefoot.params import SamplingParams
from surefoot.testing.tiny_models import write_tiny

MEMORY = 1 << 23


def load_tiny(folder: Path, tokenizer: bool = True) -> LoadedModel:
    """A tiny Llama, whose first 256 tokens are bytes if it has a tokenizer."""
    write_tiny(folder, "LlamaForCausalLM", tokenizer=tokenizer, positions=256)
    return load(str(folder), make_config(device="cpu"))


def llm_on(target: LoadedModel, **settings: object) -> LLM:
    usual: dict[str, object] = {
        "memory": MEMORY,
        "max_rows": 4,
        "page_tokens": 8,
        "draft_tokens": 4,  # a fixed depth needs no measurement of step costs
    }
    return LLM.on(Engine(target, make_config(**{**usual, **settings})))


def greedy(count: int = 12, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, **changes)  # type: ignore[arg-type]


def sampled(seed: int | None, count: int = 12, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=count, seed=seed, **changes)  # type: ignore[arg-type]


def ids_of(llm: LLM, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
    """Tokens of the first sample."""
    return list(llm.generate(prompt, params)[0].outputs[0].token_ids)


def joined(pieces: Sequence[Piece]) -> tuple[str, list[int]]:
    """Text and tokens of a streamed sample."""
    return "".join(piece.text for piece in pieces), [t for piece in pieces for t in piece.token_ids]


def assert_at_rest(llm: LLM) -> None:
    """Nothing runs, waits or is held, and the books balance."""
    llm.engine.parts.ledger.audit()
    usage = llm.engine.usage
    assert (usage.running, usage.waiting, usage.held_pages) == (0, 0, 0)
    assert llm.engine.idle
