"""Configs and checkpoints of the hybrid family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from surefoot.backend.cpu import CpuBackend
from surefoot.engine.models import load_on, silent
from surefoot.errors import ModelError, WeightsError
from surefoot.model.layers.feed import DenseSizes, ExpertSizes
from surefoot.model.qwen3_5 import ARCHITECTURES, HybridModel, describe
from surefoot.model.qwen3_5_config import read_config
from surefoot.model.registry import family_of
from surefoot.state.spec import Held, Paged, Part, Recurrent, Ring
from surefoot.testing.tiny_hybrids import (
    HYBRIDS,
    NEXT,
    TinyHybridSizes,
    make_hybrid_config,
    write_tiny_hybrid,
)
from tests.unit.model.edits import Tensors, edit_config, edit_weights

DENSE, EXPERTS = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
WRAPPED = "Qwen3_5MoeForConditionalGeneration"
SIZES = TinyHybridSizes()


def load_folder(folder: Path, dtype: str = "float32") -> HybridModel:
    model = load_on("tiny", folder, CpuBackend(bitwise=True), dtype, silent).model
    assert isinstance(model, HybridModel)
    return model


def config_of(architecture: str, **changes: object) -> dict[str, object]:
    return make_hybrid_config(architecture, SIZES) | changes


def without(prefix: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(prefix)]


def test_absent_entries_have_the_usual_values() -> None:
    config = config_of(DENSE)
    absent = ("full_attention_interval", "rms_norm_eps", "linear_conv_kernel_dim", "head_dim")
    for name in (*absent, "mtp_num_hidden_layers", "rope_parameters"):
        del config[name]
    known = read_config(config)
    assert known.kinds == ("recurrent",) * 3 + ("full",)
    assert (known.eps, known.theta, known.delta.taps) == (1e-6, 10000.0, 4)
    assert (known.attention.size, known.attention.rotated) == (256, 64)
    assert not known.promises_mtp


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "partial_rotary_factor": 0.75, "rope_parameters": None},
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.75}},
        {"rope_scaling": {"rope_theta": 5e5, "partial_rotary_factor": 0.75, "type": "mrope"},
         "rope_parameters": None},
    ],
    ids=["flat", "one entry", "older entry"],
)  # fmt: skip
def test_all_spellings_of_rotary_settings_are_read(rope: dict[str, object]) -> None:
    known = read_config(config_of(DENSE, **rope))
    assert (known.theta, known.attention.rotated) == (5e5, 6)
    assert known.scaling["rope_type"] == "default"


def test_a_nested_config_says_what_a_flat_one_says() -> None:
    flat = describe(config_of(EXPERTS), "float32", "")
    nested = describe(config_of(WRAPPED), "float32", "")
    assert nested.architecture == WRAPPED
    assert nested.parameters == flat.parameters
    assert nested.caches == flat.caches


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_every_architecture_of_the_family_is_registered(architecture: str) -> None:
    assert set(ARCHITECTURES) == set(HYBRIDS)
    config = config_of(architecture)
    assert family_of(config).describe(config, "float32", "").architecture == architecture


def test_feeds_by_layer() -> None:
    def kinds(**changes: object) -> list[bool]:
        feeds = read_config(config_of(NEXT, **changes)).feeds
        return [isinstance(feed, ExpertSizes) for feed in feeds]

    assert kinds(mlp_only_layers=[]) == [True] * 4
    assert kinds(mlp_only_layers=None) == [True] * 4
    assert kinds(mlp_only_layers=[1]) == [True, False, True, True]
    assert kinds(mlp_only_layers=[], decoder_sparse_step=2) == [False, True, False, True]
    assert kinds(num_experts=0) == [False] * 4
    plain = read_config(config_of(NEXT, norm_topk_prob=False)).feeds[1]
    assert isinstance(plain, ExpertSizes)
    assert not plain.renormalised
    assert read_config(config_of(DENSE)).mtp_feed == DenseSizes(48)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported, only False"),
        ({"attn_output_gate": False}, "attn_output_gate False is not supported, only True"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings True"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers 2 is not supported"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key heads"),
        ({"linear_num_value_heads": 3}, "3 linear value heads cannot share 2 linear key heads"),
        ({"linear_num_key_heads": None}, "'linear_num_key_heads' must be a whole number"),
        ({"layer_types": ["full_attention"]}, "layer_types must name 4 known kinds"),
        ({"layer_types": ["full_attention"] * 3 + ["mamba"]}, "layer_types must name 4 known"),
        ({"full_attention_interval": 0}, "full_attention_interval must be at least 1"),
        ({"num_experts_per_tok": 7}, "cannot take 7 of 6 experts"),
        ({"mlp_only_layers": 3}, "mlp_only_layers a list"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1"),
        ({"text_config": 3}, "'text_config' must be an object"),
    ],
)
def test_a_wrong_entry_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        read_config(config_of(NEXT, **changes))
    assert message in str(caught.value)


def test_a_rotation_that_is_not_of_pairs_is_refused(tmp_path: Path) -> None:
    write_tiny_hybrid(tmp_path, DENSE, rotary=0.4)
    with pytest.raises(ModelError, match="cannot turn 3 of a head's 8 numbers in pairs"):
        load_folder(tmp_path)


def test_description_lists_layers_and_caches() -> None:
    description = describe(config_of(DENSE), "bfloat16", "draft.")
    keys = (Part("k", (2, 8), "bfloat16"), Part("v", (2, 8), "bfloat16"))
    inputs = {"k": (2, 8), "value": (4, 12), "decay": (4,), "beta": (4,)}
    assert description.layers == ("recurrent",) * 3 + ("full",)
    assert description.caches == (
        Paged("draft.kv", 1, keys),
        Ring("draft.conv", 3, (Part("x", (80,), "bfloat16"),), 3, Held(3)),
        Recurrent(
            "draft.delta",
            3,
            state=(Part("state", (4, 8, 12), "float32"),),
            inputs=tuple(Part(name, shape, "float32") for name, shape in inputs.items()),
            block=16,
        ),
    )
    assert description.draft_head == "mtp"
    assert description.draft_caches == (Paged("draft.mtp.kv", 1, keys),)
    assert description.hidden_shape == (32,)


@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_the_count_of_parameters_is_that_of_the_file(
    architecture: str, tied: bool, mtp: bool, tmp_path: Path
) -> None:
    write_tiny_hybrid(tmp_path, architecture, tied=tied, mtp=mtp, layers=2, interval=2)
    stored = load_file(tmp_path / "model.safetensors")
    count = sum(value.numel() for name, value in stored.items() if "visual" not in name)
    description = load_folder(tmp_path).description
    assert description.parameters == count
    assert description.draft_head == ("mtp" if mtp else None)
    assert len(description.draft_caches) == mtp


def test_a_promised_head_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    write_tiny_hybrid(tmp_path, DENSE)
    config = json.loads((tmp_path / "config.json").read_text())
    assert describe(config, "float32", "").draft_head == "mtp"
    edit_weights(tmp_path, without("mtp."))
    model = load_folder(tmp_path)
    assert model.draft_head is None
    assert model.description.draft_head is None
    assert model.description.draft_caches == ()


def test_a_head_that_was_not_promised_is_used(tmp_path: Path) -> None:
    write_tiny_hybrid(tmp_path, NEXT)
    config = json.loads((tmp_path / "config.json").read_text())
    assert describe(config, "float32", "").draft_head is None
    assert load_folder(tmp_path).draft_head is not None


def test_half_a_head_is_an_error(tmp_path: Path) -> None:
    write_tiny_hybrid(tmp_path, DENSE)
    edit_weights(tmp_path, without("mtp.fc"))
    with pytest.raises(WeightsError, match=r"'mtp\.fc\.weight' is missing"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.linear_attn.A_log",
        "model.layers.3.self_attn.q_norm.weight",
        "model.layers.1.mlp.experts.down_proj",
        "model.layers.1.mlp.shared_expert_gate.weight",
        "mtp.layers.0.self_attn.k_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    write_tiny_hybrid(tmp_path, EXPERTS)
    edit_weights(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(WeightsError) as caught:
        load_folder(tmp_path)
    assert f"{name!r} is missing" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "visual.patch.weight",
        "model.layers.4.norm.weight",
        "model.layers.3.linear_attn.A_log",
        "model.layers.3.self_attn.k_scale",
        "mtp.layers.1.mlp.gate.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
    ],
)
def test_an_unused_tensor_is_named(name: str, tmp_path: Path) -> None:
    write_tiny_hybrid(tmp_path, EXPERTS)
    edit_weights(tmp_path, lambda tensors: tensors.update({name: torch.ones(2)}))
    with pytest.raises(WeightsError) as caught:
        load_folder(tmp_path)
    assert f"does not use: {name}" in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "tensor"),
    [
        ("linear_key_head_dim", r"in_proj_qkv\.weight"),
        ("linear_conv_kernel_dim", r"conv1d\.weight"),
        ("num_experts", r"mlp\.gate\.weight"),
        ("moe_intermediate_size", r"experts\.gate_up_proj"),
        ("num_key_value_heads", r"k_proj\.weight"),
    ],
)
def test_a_misshapen_tensor_is_named(entry: str, tensor: str, tmp_path: Path) -> None:
    write_tiny_hybrid(tmp_path, EXPERTS)
    config = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, **{entry: config[entry] * 2})
    with pytest.raises(WeightsError, match=rf"{tensor}' has shape .* asks for"):
        load_folder(tmp_path)


def test_another_quantisation_is_named(tmp_path: Path) -> None:
    write_tiny_hybrid(tmp_path, DENSE)
    edit_config(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(WeightsError, match="quantised with awq"):
        load_folder(tmp_path)


def test_decays_are_exact_in_every_type(tmp_path: Path) -> None:
    write_tiny_hybrid(tmp_path, DENSE, layers=1)
    mixer = load_folder(tmp_path, "bfloat16")._layers[0].mixer
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(vars(mixer)["a_log"], stored["model.layers.0.linear_attn.A_log"])
    assert torch.equal(vars(mixer)["dt_bias"], stored["model.layers.0.linear_attn.dt_bias"])
    assert vars(mixer)["norm"].dtype == torch.bfloat16
