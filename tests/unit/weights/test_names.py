"""Tensor names: translation and likeness."""

from __future__ import annotations

import gguf
import pytest

from surefoot.weights.names import near_names, transformers_name

KNOWN = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    "blk.12.attn_q.bias": "model.layers.12.self_attn.q_proj.bias",
    "blk.3.attn_output.weight": "model.layers.3.self_attn.o_proj.weight",
    "blk.3.attn_k_norm.weight": "model.layers.3.self_attn.k_norm.weight",
    "blk.3.ffn_norm.weight": "model.layers.3.post_attention_layernorm.weight",
    "blk.3.ffn_down.weight": "model.layers.3.mlp.down_proj.weight",
}


@pytest.mark.parametrize(("stored", "wanted"), KNOWN.items())
def test_known_names(stored: str, wanted: str) -> None:
    assert transformers_name(stored) == wanted


@pytest.mark.parametrize(
    "stored",
    [
        "blk.0.ffn_gate_exps.weight",
        "blk.01.attn_q.weight",
        "blk.x.attn_q.weight",
        "blk.0.attn_q",
        "blk.0.attn_q.weight.more",
        "attn_q.weight",
        "rope_freqs.weight",
        "output.scale",
        "",
    ],
)
def test_unknown_names(stored: str) -> None:
    assert transformers_name(stored) is None


@pytest.mark.parametrize(
    "arch", [gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.QWEN2, gguf.MODEL_ARCH.QWEN3]
)
def test_the_table_agrees_with_the_gguf_package(arch: gguf.MODEL_ARCH) -> None:
    table = gguf.get_tensor_name_map(arch, 2)
    agreed = 0
    for tensor in gguf.MODEL_TENSORS[arch]:
        stored = gguf.TENSOR_NAMES[tensor].format(bid=1)
        if (name := transformers_name(f"{stored}.weight")) is not None:
            assert table.get_name(name.removesuffix(".weight")) == stored
            agreed += 1
    assert agreed == (14 if arch is gguf.MODEL_ARCH.QWEN3 else 12)


def test_near_names_come_best_first_and_few() -> None:
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(20)] + ["lm_head"]
    near = near_names("model.layers.20.mlp.up_proj.weight", names)
    assert len(near) == 3
    assert near[0] in {"model.layers.0.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"}
    assert near_names("unlike", names) == []
