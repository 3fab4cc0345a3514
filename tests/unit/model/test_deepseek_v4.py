"""Configs of DeepSeek V4 as they are written, and those that make no sense."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from surefoot.backend.cpu import CpuBackend
from surefoot.engine.models import load_on, silent
from surefoot.errors import ModelError
from surefoot.model.deepseek_v4 import describe
from surefoot.model.deepseek_v4_config import HASHED, HEAVY, SPARSE, WINDOW, read_config
from surefoot.state.pool import Pools
from surefoot.step import Step
from surefoot.testing.tiny_latents import TinyLatentSizes, make_latent_config, write_tiny_latents
from tests.unit.backend.cuts import Setting, plan_of

YARN: Mapping[str, object] = {
    "rope_type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 64,
}


def config(**entries: object) -> dict[str, object]:
    changed = {**make_latent_config(TinyLatentSizes()), **entries}
    return {name: value for name, value in changed.items() if value != "absent"}


def test_the_bases_of_both_kinds_stand_in_the_ropes_entries() -> None:
    ropes = {"main": {"rope_theta": 500.0}, "compress": {**YARN, "rope_theta": 7777.0}}
    known = read_config(config(rope_parameters=ropes))
    assert (known.theta, known.compressed_theta) == (500.0, 7777.0)
    assert known.scaling == {**YARN, "attention_factor": 1.0}


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_one_rope_is_that_of_compressed_layers(name: str) -> None:
    known = read_config(config(**{name: {**YARN, "attention_factor": None}}))
    assert (known.theta, known.compressed_theta) == (10000.0, 160000.0)
    assert known.scaling == {**YARN, "attention_factor": 1.0}


def test_what_is_absent_has_the_release_s_values() -> None:
    absent = dict.fromkeys(("routed_scaling_factor", "num_hash_layers"), "absent")
    known = read_config(config(**absent))
    assert known.feed.scale == 1.5
    assert known.routers == (HASHED,) * 3


def test_kinds_go_by_name_or_by_ratio() -> None:
    assert read_config(config()).kinds == (WINDOW, SPARSE, HEAVY)
    names = ["heavily_compressed_attention", "sliding_attention", "sliding_attention"]
    more = [*names, "compressed_sparse_attention"]
    assert read_config(config(layer_types=more)).kinds == (HEAVY, WINDOW, WINDOW)


NONSENSE: list[tuple[dict[str, object], str]] = [
    ({"sliding_window": 0}, "sliding_window must be at least 1, not 0"),
    ({"index_topk": -1}, "index_topk must be at least 1"),
    ({"o_groups": 0}, "o_groups must be at least 1"),
    ({"o_groups": 3}, "cannot form 3 o_groups"),
    ({"num_hash_layers": -1}, "num_hash_layers must be at least 0"),
    ({"num_hidden_layers": -1}, "num_hidden_layers must be at least 1"),
    ({"compress_ratios": [[0], 4, 128, 0]}, "compress_ratios must be of"),
    ({"compress_ratios": [False, 4, 128, 0]}, "compress_ratios must be of"),
    ({"compress_ratios": [0, 4]}, "must tell the kinds of 3 layers"),
    ({"compress_ratios": [0, 4, 128, 4]}, "for the draft head"),
    ({"layer_types": ["sliding_attention"]}, "layer_types must name 3"),
    ({"hc_mult": 0}, "hc_mult must be at least 1"),
    ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters must be at least 1"),
    ({"rope_theta": 0}, "rope_theta must be above 0"),
    ({"rope_scaling": {**YARN, "factor": 0}}, "rope factor must be above 0"),
    ({"rope_scaling": {**YARN, "attention_factor": 1.2}}, "attention_factor must be 1.0"),
    ({"qk_rope_head_dim": 7}, "rope cannot turn 7"),
    ({"qk_rope_head_dim": 600}, "rope cannot turn 600"),
    ({"index_head_dim": 6}, "rope cannot turn 8 of a head's 6"),
    ({"swiglu_limit": 0}, "swiglu_limit must be above 0"),
    ({"num_experts_per_tok": 7}, "cannot take 7 of 6 experts"),
    ({"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2 is not supported"),
    ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
]


@pytest.mark.parametrize(("entries", "message"), NONSENSE)
def test_what_makes_no_sense_is_named(entries: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        describe(config(**entries), "float32", "")


def test_an_indexer_is_not_asked_for_where_no_layer_has_one() -> None:
    sizes = {"compress_ratios": [0, 128, 0, 0], "index_head_dim": 4}
    assert describe(config(**sizes), "float32", "").layers == (WINDOW, HEAVY, WINDOW)


@pytest.mark.parametrize("mtp", [True, False])
def test_the_parameters_are_those_of_the_file(mtp: bool, tmp_path: Path) -> None:
    stored = load_file(write_tiny_latents(tmp_path, mtp=mtp) / "model.safetensors")
    count = sum(tensor.numel() for tensor in stored.values() if tensor.is_floating_point())
    described = describe(make_latent_config(TinyLatentSizes(), mtp), "float32", "")
    assert described.parameters == count


def test_a_step_without_tokens_is_fine(tmp_path: Path) -> None:
    loaded = load_on("tiny", write_tiny_latents(tmp_path), CpuBackend(), "float32", silent)
    plan = plan_of(Setting([[1]], page_tokens=16), 2, 2)
    pools = Pools(loaded.model.description.caches, plan, loaded.backend.device)
    with torch.inference_mode():
        hidden = loaded.model.forward(Step.of([], 16).build(loaded.backend), pools)
    assert hidden.shape == (0, 3, 32)
