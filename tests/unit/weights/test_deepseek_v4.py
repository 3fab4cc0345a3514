"""DeepSeek V4 checkpoints: every name, the draft head, and a whole folder of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from surefoot.errors import WeightsError
from surefoot.weights.checkpoint import Checkpoint
from surefoot.weights.deepseek_v4 import is_deepseek_v4, transformers_name
from surefoot.weights.load import TensorTaker, open_checkpoint
from tests.unit.weights.files import CONFIG, write_folder

V4 = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
QUANTISED = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
}

OUTER = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
# What a layer of every kind has, and the block in the draft head.
BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.wq_a.scale": "self_attn.q_a_proj.weight_scale_inv",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wq_b.scale": "self_attn.q_b_proj.weight_scale_inv",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.wkv.scale": "self_attn.kv_proj.weight_scale_inv",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_a.scale": "self_attn.o_a_proj.weight_scale_inv",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.wo_b.scale": "self_attn.o_b_proj.weight_scale_inv",
    "attn.attn_sink": "self_attn.sinks",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.experts.0.w1.weight": "mlp.experts.0.gate_proj.weight",
    "ffn.experts.0.w1.scale": "mlp.experts.0.gate_proj.weight_scale_inv",
    "ffn.experts.17.w3.weight": "mlp.experts.17.up_proj.weight",
    "ffn.experts.17.w3.scale": "mlp.experts.17.up_proj.weight_scale_inv",
    "ffn.experts.255.w2.weight": "mlp.experts.255.down_proj.weight",
    "ffn.experts.255.w2.scale": "mlp.experts.255.down_proj.weight_scale_inv",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w1.scale": "mlp.shared_experts.gate_proj.weight_scale_inv",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w3.scale": "mlp.shared_experts.up_proj.weight_scale_inv",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w2.scale": "mlp.shared_experts.down_proj.weight_scale_inv",
}
COMPRESSED = {
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.wq_b.scale": "self_attn.compressor.indexer.q_b_proj.weight_scale_inv",
    "attn.indexer.weights_proj.weight": ("self_attn.compressor.indexer.scorer.weights_proj.weight"),
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
}
HEAD = {
    "e_proj.weight": "e_proj.weight",
    "e_proj.scale": "e_proj.weight_scale_inv",
    "h_proj.weight": "h_proj.weight",
    "h_proj.scale": "h_proj.weight_scale_inv",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "norm.weight": "norm.weight",
    "hc_head_fn": "hc_head.hc_fn",
    "hc_head_base": "hc_head.hc_base",
    "hc_head_scale": "hc_head.hc_scale",
}
NAMES = (
    OUTER
    | {f"layers.12.{old}": f"model.layers.12.{new}" for old, new in (BLOCK | COMPRESSED).items()}
    | {f"mtp.0.{old}": f"mtp.0.{new}" for old, new in (BLOCK | HEAD).items()}
)


def opened(
    folder: Path, tensors: dict[str, Tensor], config: Mapping[str, object] = MappingProxyType({})
) -> Checkpoint:
    shards = {"model.safetensors": tensors}
    return open_checkpoint(write_folder(folder, shards, config={**V4, **config}))


def finish(checkpoint: Checkpoint) -> None:
    TensorTaker(checkpoint, torch.float32, lambda _: None).finish()


@pytest.mark.parametrize("release", NAMES)
def test_each_name_of_the_release(release: str) -> None:
    assert transformers_name(release) == NAMES[release]


@pytest.mark.parametrize("name", sorted(set(NAMES.values()) - set(NAMES)))
def test_a_name_of_transformers_is_none_of_the_release(name: str) -> None:
    assert transformers_name(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.wq_z.weight",
        "layers.0.attn.wq_a",
        "layers.0.attn.wq_a.bias",
        "layers.00.attn.wq_a.weight",
        "layers.x.attn.wq_a.weight",
        "layers.0.ffn.experts.0.w4.weight",
        "layers.0.ffn.experts.0.w1",
        "layers.0.e_proj.weight",
        "ffn.experts.0.w1.weight",
        "attn_norm.weight",
        "mtp.0.main_proj.weight",
        "mtp.embed.weight",
        "embed.bias",
    ],
)
def test_what_the_model_does_not_have_keeps_its_name(name: str, tmp_path: Path) -> None:
    assert transformers_name(name) is None
    checkpoint = opened(tmp_path, {name: torch.ones(1)})
    with pytest.raises(WeightsError, match=f"does not use: {name}"):
        finish(checkpoint)


def numbered(names: list[str]) -> dict[str, Tensor]:
    """A tensor of its own for each name; scales are left out, as they would be used up."""
    plain = [name for name in names if not name.endswith((".scale", "_scale_inv"))]
    return {name: torch.full((1, 2), float(index)) for index, name in enumerate(plain)}


@pytest.mark.parametrize("spelling", ["release", "transformers", "mix"])
def test_a_folder_reads_alike_in_either_spelling_and_in_a_mix(
    spelling: str, tmp_path: Path
) -> None:
    stored = numbered(list(NAMES))
    wanted = {NAMES[name]: tensor for name, tensor in stored.items()}
    if spelling == "transformers":
        stored = wanted
    if spelling == "mix":
        even = {name: tensor for name, tensor in stored.items() if tensor[0, 0] % 2 == 0}
        odd = {name: tensor for name, tensor in wanted.items() if tensor[0, 0] % 2 == 1}
        stored = even | odd
    checkpoint = opened(tmp_path, stored)
    assert set(checkpoint.names()) == set(wanted)
    assert all(torch.equal(checkpoint.read(name), wanted[name]) for name in wanted)
    assert all(checkpoint.shape(name) == (1, 2) for name in wanted)
    checkpoint.close()
    checkpoint.close()
    assert not checkpoint.names()


@pytest.mark.parametrize(
    "release", ["embed.weight", "layers.0.attn.wq_a.weight", "mtp.0.hc_ffn_fn"]
)
def test_two_names_of_one_tensor_are_both_named(release: str, tmp_path: Path) -> None:
    name = transformers_name(release)
    assert name is not None
    first, second = sorted((release, name))
    with pytest.raises(WeightsError, match=f"'{first}' and '{second}', which are two names"):
        opened(tmp_path, {release: torch.ones(1), name: torch.ones(1)})


def test_the_copies_in_the_draft_head_do_not_show(tmp_path: Path) -> None:
    copies = ["mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"]
    checkpoint = opened(tmp_path, numbered([*copies, "mtp.0.norm.weight"]))
    assert set(checkpoint.names()) == {"mtp.0.norm.weight"}


def test_a_scale_of_nothing_is_unused(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, {"layers.0.attn.wkv.scale": torch.ones(1, 1)}, QUANTISED)
    unused = r"does not use: model\.layers\.0\.self_attn\.kv_proj\.weight_scale_inv"
    with pytest.raises(WeightsError, match=unused):
        finish(checkpoint)


def test_a_table_of_experts_is_taken_in_whole_numbers(tmp_path: Path) -> None:
    table = torch.arange(12).reshape(4, 3)
    checkpoint = opened(tmp_path, {"layers.0.ffn.gate.tid2eid": table})
    taker = TensorTaker(checkpoint, torch.bfloat16, lambda _: None)
    taken = taker.take("model.layers.0.mlp.gate.tid2eid", (4, 3), torch.int64)
    assert torch.equal(taken, table)
    taker.finish()


@pytest.mark.parametrize("quantised", [False, True])
def test_8_bit_and_4_bit_weights_stand_side_by_side(quantised: bool, tmp_path: Path) -> None:
    """Whether the config tells of scales or not: what is stored decides."""
    twos = torch.full((2, 1), 0x44, dtype=torch.int8)
    tensors = {
        "layers.0.attn.wkv.weight": torch.full((2, 4), 3.0).to(torch.float8_e4m3fn),
        "layers.0.attn.wkv.scale": torch.full((1, 1), 0.5).to(torch.float8_e8m0fnu),
        "layers.0.ffn.experts.0.w1.weight": twos,
        "layers.0.ffn.experts.0.w1.scale": torch.full((2, 1), 4.0).to(torch.float8_e8m0fnu),
        "layers.0.attn_norm.weight": torch.ones(2, dtype=torch.bfloat16),
    }
    checkpoint = opened(tmp_path, tensors, QUANTISED if quantised else {})
    wanted = {
        "model.layers.0.self_attn.kv_proj.weight": torch.full((2, 4), 1.5),
        "model.layers.0.mlp.experts.0.gate_proj.weight": torch.full((2, 2), 8.0),
        "model.layers.0.input_layernorm.weight": torch.ones(2),
    }
    taker = TensorTaker(checkpoint, torch.float32, lambda _: None)
    for name, tensor in wanted.items():
        assert torch.equal(taker.take(name, tuple(tensor.shape)), tensor)
    taker.finish()


def test_other_families_keep_such_names_and_refuse_such_numbers(tmp_path: Path) -> None:
    tensors = {
        "embed.weight": torch.ones(1, 2),
        "x.weight": torch.ones(1, 2, dtype=torch.int8),
        "x.weight_scale_inv": torch.ones(1, 1),
    }
    checkpoint = opened(tmp_path, tensors, {**QUANTISED, **CONFIG})
    assert set(checkpoint.names()) == {"embed.weight", "x.weight"}
    with pytest.raises(WeightsError, match="must be stored as float8_e4m3fn, and it is int8"):
        checkpoint.read("x.weight")


def test_another_quantisation_is_named(tmp_path: Path) -> None:
    details = {"quantization_config": {"quant_method": "modelslim"}}
    with pytest.raises(WeightsError, match="quantised with modelslim"):
        opened(tmp_path, {"embed.weight": torch.ones(1)}, details)


@pytest.mark.parametrize(
    ("architectures", "is_one"),
    [
        (["DeepseekV4ForCausalLM"], True),
        (["DeepseekV3ForCausalLM"], False),
        (None, False),
        ("x", False),
    ],
)
def test_the_architecture_tells_the_family(architectures: object, is_one: bool) -> None:
    assert is_deepseek_v4({"architectures": architectures}) is is_one


def tiny() -> DeepseekV4ForCausalLM:
    """A model with a layer of every kind, with no two tensors alike."""
    torch.manual_seed(5)
    model = DeepseekV4ForCausalLM(
        DeepseekV4Config(
            vocab_size=11,
            hidden_size=16,
            moe_intermediate_size=8,
            num_hidden_layers=4,
            layer_types=[
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            num_attention_heads=2,
            head_dim=16,
            partial_rotary_factor=0.25,
            q_lora_rank=12,
            o_groups=2,
            o_lora_rank=6,
            n_routed_experts=3,
            num_experts_per_tok=2,
            mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe"],
            index_n_heads=2,
            index_head_dim=8,
            index_topk=2,
            sliding_window=8,
        )
    )
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.random_(3)
    return model


def with_single_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The fused experts of transformers, one by one."""
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        head, _, leaf = name.rpartition(".")
        if leaf not in {"gate_up_proj", "down_proj"}:
            apart[name] = tensor
            continue
        for expert, weight in enumerate(tensor):
            parts = weight.chunk(2) if leaf == "gate_up_proj" else (weight,)
            kinds = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
            for kind, part in zip(kinds, parts, strict=True):
                apart[f"{head}.{expert}.{kind}.weight"] = part
    return apart


def test_a_folder_that_transformers_wrote_reads_as_its_model(tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path)
    wanted = with_single_experts(model.state_dict())
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.names()) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(checkpoint.read(name), tensor), name


def test_transformers_takes_the_same_names_for_the_same_tensors(tmp_path: Path) -> None:
    """The table of this file against the one that transformers loads the release with."""
    model = tiny()
    wanted = with_single_experts(model.state_dict())
    layers = {
        f"layers.{layer}.{old}": f"model.layers.{layer}.{new}"
        for layer in range(4)
        for old, new in (BLOCK | COMPRESSED).items()
    }
    experts = {
        f"layers.{layer}.ffn.experts.{expert}.{old}.weight": (
            f"model.layers.{layer}.mlp.experts.{expert}.{new}.weight"
        )
        for layer in range(4)
        for expert in range(3)
        for old, new in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
    }
    release = {
        old: wanted[new].clone() for old, new in (OUTER | layers | experts).items() if new in wanted
    }
    assert len(release) == len(wanted)
    write_folder(tmp_path, {"model.safetensors": release}, config=model.config.to_dict() | V4)
    loaded = DeepseekV4ForCausalLM.from_pretrained(tmp_path).state_dict()
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.names()) == set(wanted)
    for name, tensor in with_single_experts(loaded).items():
        assert torch.equal(checkpoint.read(name), tensor), name
