"""Tiny hybrids: seeded, and with a dial that decides how many drafts are accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from surefoot.backend.cpu import CpuBackend
from surefoot.engine.models import load_on, silent
from surefoot.ids import PageId, SlotId
from surefoot.step import Batch, Row, Step
from surefoot.testing.seeded import next_in_table
from surefoot.testing.tiny_hybrids import (
    HYBRIDS,
    TinyHybridSizes,
    write_tiny_hybrid,
)
from surefoot.testing.tiny_models import LEAST_TEXT_VOCAB
from tests.unit.backend.cuts import Setting, sequences_of
from tests.unit.model.settling import make_pools

COUNT = 160
BACKEND = CpuBackend(bitwise=True)


def batch_of(tokens: list[int], first: int) -> Batch:
    table = [PageId(page) for page in range(1, COUNT // 8 + 1)]
    row = Row(tokens, first, len(tokens), table, SlotId(1), first, len(tokens), first)
    return Step.of([row], 8).build(BACKEND)


@torch.inference_mode()
def said(folder: Path, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Logits of the model and of its draft head for the tokens after tokens[1:]."""
    model = load_on("tiny", folder, BACKEND, "float32", silent).model
    head = model.draft_head
    assert head is not None
    pools = make_pools(model, BACKEND, Setting([tokens], 8, 1), pages=COUNT // 8, slots=1)
    hidden = model.forward(batch_of(tokens, 0), pools)
    drafted = head.forward(batch_of(tokens[1:], 1), head.enter(hidden[:-1]), pools)
    return model.logits(hidden)[1:], head.logits(drafted)


def accepted(folder: Path, vocab: int, temperature: float) -> float:
    """Share of drafts that are the token that the model chooses with the same noise."""
    logits, drafts = said(folder, sequences_of(1, vocab, (COUNT,))[0])
    uniform = torch.rand(logits.shape, generator=torch.Generator().manual_seed(3))
    noise = -temperature * torch.log(-torch.log(uniform))
    agreed = (logits + noise).argmax(-1) == (drafts + noise).argmax(-1)
    return agreed.float().mean().item()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_the_dial_accepts_some_drafts(
    architecture: str, temperature: float, tmp_path: Path
) -> None:
    shares = []
    for dial in (0.0, 0.7, 1.2):
        write_tiny_hybrid(tmp_path / str(dial), architecture, dial=dial)
        shares.append(accepted(tmp_path / str(dial), 64, temperature))
    assert shares[0] == 1.0
    assert 0.2 < shares[1] < 0.8
    assert shares[2] < shares[1]


def test_a_dial_at_zero_is_the_table(tmp_path: Path) -> None:
    write_tiny_hybrid(tmp_path, "Qwen3_5ForCausalLM", dial=0.0)
    tokens = sequences_of(1, 64, (COUNT,))[0]
    logits, _ = said(tmp_path, tokens)
    table = next_in_table(TinyHybridSizes().vocab, TinyHybridSizes().seed)
    assert torch.equal(logits.argmax(-1), table[torch.tensor(tokens[1:])])
    token, seen = 0, set()
    while token not in seen:
        seen.add(token)
        token = int(table[token])
    assert len(seen) == 64


def test_without_a_dial_hardly_a_draft_is_accepted(tmp_path: Path) -> None:
    write_tiny_hybrid(tmp_path, "Qwen3_5ForCausalLM")
    assert accepted(tmp_path, 64, 0.0) < 0.2


def test_a_vocabulary_of_text_has_a_dial_too(tmp_path: Path) -> None:
    write_tiny_hybrid(tmp_path, "Qwen3_5ForCausalLM", tokenizer=True, dial=0.4)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == LEAST_TEXT_VOCAB
    assert load_on("tiny", tmp_path, BACKEND, "float32", silent).tokenizer is not None
    assert 0.2 < accepted(tmp_path, LEAST_TEXT_VOCAB, 0.0) < 0.9


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_weights_are_a_function_of_the_seed(architecture: str, tmp_path: Path) -> None:
    stored = []
    for place, (seed, drift) in enumerate([(1, 0.0), (1, 0.0), (2, 0.0), (1, 0.1)]):
        folder = write_tiny_hybrid(tmp_path / str(place), architecture, seed=seed, drift=drift)
        stored.append(load_file(folder / "model.safetensors"))
    name = next(name for name in stored[0] if "lm_head" in name)
    assert all(torch.equal(stored[0][key], stored[1][key]) for key in stored[0])
    assert not torch.equal(stored[0][name], stored[2][name])
    distance = (stored[0][name] - stored[3][name]).norm() / stored[0][name].norm()
    assert 0.08 < float(distance) < 0.12
