"""Configs and checkpoints of the Llama family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from surefoot.backend.cpu import CpuBackend
from surefoot.engine.models import load_on, silent
from surefoot.errors import ModelError, WeightsError
from surefoot.model.llama import LlamaModel, describe, read_config
from surefoot.model.registry import FAMILIES, family_of
from surefoot.state.spec import Held, Paged, Part, Ring
from surefoot.testing.tiny_models import ARCHITECTURES, write_tiny
from tests.unit.model.edits import edit_config, edit_weights

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}


def load_folder(folder: Path) -> LlamaModel:
    model = load_on("tiny", folder, CpuBackend(bitwise=True), "float32", silent).model
    assert isinstance(model, LlamaModel)
    return model


def test_absent_entries_have_the_usual_values() -> None:
    known = read_config(LLAMA)
    assert (known.key_heads, known.head_dim) == (4, 8)
    assert (known.eps, known.theta) == (1e-6, 10000.0)
    assert known.windows == (None, None, None)
    switches = (known.tied, known.qkv_bias, known.output_bias, known.mlp_bias, known.head_norms)
    assert not any(switches)


def test_null_counts_as_absent() -> None:
    nulls = dict.fromkeys(("num_key_value_heads", "head_dim", "rope_scaling", "sliding_window"))
    assert read_config({**LLAMA, **nulls}) == read_config(LLAMA)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    ],
    ids=["two entries", "one entry"],
)
def test_both_spellings_of_rotary_settings_are_read(rope: dict[str, object]) -> None:
    known = read_config({**LLAMA, **rope})
    assert known.theta == 5e5
    assert known.scaling["factor"] == 2.0


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({**MISTRAL, "sliding_window": 8}, (8, 8, 8)),
        ({**MISTRAL, "sliding_window": None}, (None, None, None)),
        ({**QWEN2, "sliding_window": 8, "use_sliding_window": False}, (None, None, None)),
        ({**QWEN2, "sliding_window": 8, "use_sliding_window": True}, (None, None, None)),
        (
            {**QWEN2, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            (None, None, 8),
        ),
        (
            {
                **QWEN3,
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
        ({**QWEN3, "sliding_window": None, "layer_types": ["full_attention"] * 3}, (None,) * 3),
    ],
)
def test_windows_by_layer(config: dict[str, object], windows: tuple[int | None, ...]) -> None:
    assert read_config(config).windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; known is 'silu'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key heads"),
        ({"vocab_size": None}, "'vocab_size' must be a whole number, and it is missing"),
        ({"hidden_size": "32"}, "'hidden_size' must be a whole number, and it is '32'"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' must be a whole number"),
        ({"rms_norm_eps": "small"}, "'rms_norm_eps' must be a number"),
        ({"rope_theta": []}, "'rope_theta' must be a number"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' must be true or false"),
        ({"hidden_act": 3}, "'hidden_act' must be a string"),
        ({"rope_scaling": "linear"}, "'rope_scaling' must be an object"),
        ({"layer_types": ["full_attention"]}, "layer_types must name 3 known kinds"),
        ({"layer_types": ["full_attention"] * 2 + ["chunked"]}, "layer_types must name 3 known"),
        ({"layer_types": ["sliding_attention"] * 3}, "there is no sliding_window"),
        ({"layer_types": "full_attention"}, "'layer_types' must be a list of strings"),
    ],
)
def test_a_wrong_entry_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        read_config({**LLAMA, **changes})
    assert message in str(caught.value)


def test_description_lists_layers_and_caches() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = {**MISTRAL, "sliding_window": 8, "layer_types": kinds, "num_key_value_heads": 2}
    description = describe(config, "bfloat16", "draft.")
    parts = (Part("k", (2, 8), "bfloat16"), Part("v", (2, 8), "bfloat16"))
    assert description.layers == ("window 8", "full", "window 8")
    assert description.caches == (
        Paged("draft.kv", 1, parts),
        Ring("draft.window", 2, parts, 8, Held(8)),
    )
    assert (description.vocab_size, description.max_positions) == (64, 128)
    assert description.draft_head is None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_count_of_parameters_is_that_of_the_file(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    write_tiny(tmp_path, architecture, tied=tied)
    stored = load_file(tmp_path / "model.safetensors")
    count = sum(tensor.numel() for tensor in stored.values())
    assert load_folder(tmp_path).description.parameters == count


def test_all_biases_are_taken_and_counted(tmp_path: Path) -> None:
    write_tiny(tmp_path, "LlamaForCausalLM", layers=1)
    edit_config(tmp_path, attention_bias=True, mlp_bias=True)
    with pytest.raises(WeightsError, match=r"self_attn\.\w+_proj\.bias|mlp\.\w+_proj\.bias"):
        load_folder(tmp_path)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            bias = torch.ones(tensors[name].shape[0])
            tensors[name.removesuffix("weight") + "bias"] = bias

    edit_weights(tmp_path, add)
    count = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    assert load_folder(tmp_path).description.parameters == count


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, "Qwen3ForCausalLM")
    edit_weights(tmp_path, lambda tensors: tensors.pop("model.layers.1.self_attn.k_norm.weight"))
    with pytest.raises(
        WeightsError, match=r"'model\.layers\.1\.self_attn\.k_norm\.weight' is missing"
    ):
        load_folder(tmp_path)


def test_an_unused_tensor_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, "LlamaForCausalLM")
    edit_config(tmp_path, num_hidden_layers=1)
    with pytest.raises(WeightsError, match=r"does not use: model\.layers\.1\."):
        load_folder(tmp_path)


def test_a_misshapen_tensor_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, "LlamaForCausalLM")
    edit_config(tmp_path, num_key_value_heads=4)
    with pytest.raises(WeightsError, match=r"k_proj\.weight' has shape \[16, 32\].*\[32, 32\]"):
        load_folder(tmp_path)


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    write_tiny(tmp_path, "LlamaForCausalLM", layers=1)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(tmp_path, lambda tensors: tensors.update({name: torch.ones(4)}))
    load_folder(tmp_path)


def test_logits_are_float32_in_every_type(tmp_path: Path) -> None:
    write_tiny(tmp_path, "LlamaForCausalLM")
    model = load_on("tiny", tmp_path, CpuBackend(bitwise=True), "bfloat16", silent).model
    logits = model.logits(torch.ones(2, 32, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32
    assert logits.shape == (2, 64)


def test_every_architecture_of_the_family_is_registered() -> None:
    assert set(ARCHITECTURES) <= FAMILIES.keys()
    for architecture in ARCHITECTURES:
        config = {**LLAMA, "architectures": [architecture]}
        assert family_of(config).describe(config, "float32", "").architecture == architecture


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; known are"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list of strings"),
    ],
)
def test_an_unknown_architecture_is_named(config: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        family_of(config)
