"""Tiny random hybrids of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.qwen3_5 import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5_moe import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
)
from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM

from tests.parity.oracle import Make

ROPE: Mapping[str, object] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
SIZES: Mapping[str, object] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rope_parameters": ROPE,
    "attn_implementation": "eager",
}
MROPE = {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
EXPERTS: Mapping[str, object] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
VISION: Mapping[str, object] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}


def _maker(
    model: Callable[..., PreTrainedModel],
    config: Callable[..., PreTrainedConfig],
    **own: object,
) -> Make:
    def make(**changes: object) -> PreTrainedModel:
        return randomised_hybrid(model(config(**{**SIZES, **own, **changes})))

    return make


def _wrapped(
    model: Callable[..., PreTrainedModel],
    config: Callable[..., PreTrainedConfig],
    text: Callable[..., PreTrainedConfig],
    **own: object,
) -> Make:
    def make(**changes: object) -> PreTrainedModel:
        entries = {**SIZES, **MROPE, **own, **changes}
        tied, attention = entries["tie_word_embeddings"], entries.pop("attn_implementation")
        outer = config(
            text_config=text(**entries).to_dict(),
            vision_config=dict(VISION),
            tie_word_embeddings=tied,
            attn_implementation=attention,
        )
        return randomised_hybrid(model(outer))

    return make


HYBRIDS: Mapping[str, Make] = {
    "next": _maker(Qwen3NextForCausalLM, Qwen3NextConfig, **EXPERTS),
    "next without experts": _maker(Qwen3NextForCausalLM, Qwen3NextConfig, num_experts=0),
    "next, some dense": _maker(
        Qwen3NextForCausalLM, Qwen3NextConfig, **EXPERTS, mlp_only_layers=[1], norm_topk_prob=False
    ),
    "next, every second": _maker(
        Qwen3NextForCausalLM, Qwen3NextConfig, **EXPERTS, decoder_sparse_step=2
    ),
    "dense": _maker(Qwen3_5ForCausalLM, Qwen3_5TextConfig, **MROPE),
    "dense, tied": _maker(Qwen3_5ForCausalLM, Qwen3_5TextConfig, **MROPE, tie_word_embeddings=True),
    "experts": _maker(Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, **MROPE, **EXPERTS),
    "dense, wrapped": _wrapped(Qwen3_5ForConditionalGeneration, Qwen3_5Config, Qwen3_5TextConfig),
    "experts, wrapped, tied": _wrapped(
        Qwen3_5MoeForConditionalGeneration,
        Qwen3_5MoeConfig,
        Qwen3_5MoeTextConfig,
        **EXPERTS,
        tie_word_embeddings=True,
    ),
}


def randomised_hybrid(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Give every parameter values that matter: all decays, norms and gates differ.

    The layers' weights are small enough for the order of summation not to be amplified, from layer
    to layer, beyond the tolerance.
    """
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn(name, parameter, draws))
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert head is not None
        if table.get_parameter("weight") is head.get_parameter("weight"):
            table.get_parameter("weight").mul_(0.15)
    model.eval()
    return model


def drawn(name: str, parameter: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
    values = torch.randn(parameter.shape, generator=draws)
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.3 * values
    if "norm" in name:
        return 0.3 * values
    if name.endswith(("A_log", "dt_bias")):
        return values
    if "conv1d" in name:
        return 0.5 * values
    if "embed" in name:
        return values
    gain = 1.0 if "lm_head" in name else 0.6
    return values * (gain / math.sqrt(parameter.shape[-1]))
