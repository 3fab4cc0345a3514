"""Checkpoints as transformers writes them: tied, sharded, and in half precision."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from surefoot.config import make_config
from surefoot.engine.models import load
from surefoot.llm import LLM, SamplingParams
from tests.parity.conftest import Saved
from tests.parity.oracle import MODELS, logits_of, reopened, save
from tests.parity.test_logits import SETTING, TOLERANCE, furthest, ours, theirs
from tests.unit.backend.cuts import Machine, alone, together
from tests.unit.model.edits import edit_config, edit_weights
from tests.unit.model.models import Logits

Get = Callable[[str], Saved]

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
ROUNDING = 1e-5  # the same weights, which lie elsewhere in memory


@pytest.mark.parametrize("name", FAMILIES)
def test_tied_embeddings(name: str, tmp_path: Path) -> None:
    oracle = MODELS[name](tie_word_embeddings=True)
    folder = save(oracle, tmp_path / "tied")
    got = ours(folder, together(SETTING.lengths))
    assert furthest(got, theirs(Saved(oracle, folder))) < TOLERANCE


def parameters(folder: Path) -> int:
    """As counted for a loaded model."""
    return load(str(folder), make_config(device="cpu")).model.description.parameters


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stored_head_is_used_although_the_config_ties_it(name: str, tmp_path: Path) -> None:
    made = MODELS[name](tie_word_embeddings=False)
    folder = save(made, tmp_path / "apart")
    count = parameters(folder)
    edit_config(folder, tie_word_embeddings=True)
    want = theirs(Saved(reopened(made, folder), folder))
    assert furthest(want, theirs(Saved(made, folder))) < ROUNDING, "it goes by the stored head"
    assert furthest(ours(folder, together(SETTING.lengths)), want) < TOLERANCE
    assert parameters(folder) == count


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stored_head_that_is_the_embedding_is_tied(name: str, tmp_path: Path) -> None:
    made = MODELS[name](tie_word_embeddings=True)
    folder = save(made, tmp_path / "twice")
    count = parameters(folder)
    table = made.get_input_embeddings().get_parameter("weight").detach().clone()
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": table}))
    want = theirs(Saved(reopened(made, folder), folder))
    assert furthest(ours(folder, together(SETTING.lengths)), want) < TOLERANCE
    assert parameters(folder) == count


@pytest.mark.parametrize("tied", [False, True])
def test_many_shards(tied: bool, tmp_path: Path) -> None:
    oracle = MODELS["qwen3"](tie_word_embeddings=tied)
    folder = save(oracle, tmp_path / "sharded", max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert (folder / "model.safetensors.index.json").is_file()
    got = ours(folder, together(SETTING.lengths))
    assert furthest(got, theirs(Saved(oracle, folder))) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_weights_computed_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    half = MODELS["llama"]()
    half.to(dtype)  # type: ignore[arg-type]
    folder = save(half, tmp_path / "half")
    oracle = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    got = ours(folder, together(SETTING.lengths))
    assert furthest(got, theirs(Saved(oracle, folder))) < TOLERANCE


@pytest.mark.parametrize("bitwise", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_stays_near_float32(name: str, bitwise: bool, saved: Get) -> None:
    """Rounding to eight bits is felt at scale one, but the best tokens are mostly the same."""
    config = make_config(device="cpu", dtype="bfloat16", bitwise=bitwise)
    loaded = load(str(saved(name).folder), config)
    model = Logits(loaded.model)
    assert {part.dtype for spec in model.caches for part in spec.parts} == {"bfloat16"}  # type: ignore[union-attr]
    got = torch.cat(Machine(model, loaded.backend, SETTING).play(alone(SETTING.lengths)))
    want = torch.cat([logits_of(saved(name).oracle, tokens) for tokens in SETTING.sequences])
    assert (got - want).abs().mean().item() < 0.05
    assert (got.argmax(-1) == want.argmax(-1)).float().mean().item() > 0.8


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_generates_the_same_with_drafts(name: str, saved: Get) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0)
    outputs = []
    for drafter in ("none", "ngram"):
        with LLM(
            str(saved(name).folder),
            device="cpu",
            dtype="bfloat16",
            drafter=drafter,
            max_rows=4,
            memory=1 << 24,
        ) as llm:
            results = llm.generate([[1, 2, 3, 1, 2, 3, 1], [5] * 20], params)
            outputs.append([result.outputs[0].token_ids for result in results])
    assert outputs[0] == outputs[1]
    assert all(len(ids) == 24 for ids in outputs[0])


def test_defaults_of_the_checkpoint_are_read(saved: Get, tmp_path: Path) -> None:
    oracle = MODELS["llama"]()
    oracle.generation_config.update(do_sample=True, temperature=0.7, top_k=11)
    folder = save(oracle, tmp_path / "own")
    assert json.loads((folder / "generation_config.json").read_text())["top_k"] == 11
    with LLM(str(folder), device="cpu", memory=1 << 24, max_rows=2) as llm:
        params = llm.default_params()
    assert (params.temperature, params.top_k) == (0.7, 11)
