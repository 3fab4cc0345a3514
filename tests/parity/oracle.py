"""Tiny random models of transformers, saved for surefoot to load, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: Mapping[str, object] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}

Make = Callable[..., PreTrainedModel]


def _maker(
    model: Callable[..., PreTrainedModel],
    config: Callable[..., PreTrainedConfig],
    **own: object,
) -> Make:
    def make(**changes: object) -> PreTrainedModel:
        return randomised(model(config(**{**SIZES, **own, **changes})))

    return make


MODELS: Mapping[str, Make] = {
    "llama": _maker(LlamaForCausalLM, LlamaConfig),
    "llama with biases": _maker(
        LlamaForCausalLM, LlamaConfig, attention_bias=True, mlp_bias=True, num_key_value_heads=4
    ),
    "qwen2": _maker(Qwen2ForCausalLM, Qwen2Config),
    "qwen2 with a window": _maker(
        Qwen2ForCausalLM,
        Qwen2Config,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
    ),
    "qwen3": _maker(Qwen3ForCausalLM, Qwen3Config, head_dim=16),
    "mistral": _maker(MistralForCausalLM, MistralConfig, sliding_window=8),
    "mistral without a window": _maker(MistralForCausalLM, MistralConfig, sliding_window=None),
}


def randomised(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Give every parameter values of a size that matters: logits come out with scale 1.

    The library's own starting values leave norms and biases neutral and logits near zero, where a
    fault would not show.
    """
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=draws)
            if "norm" in name:
                values = 1 + 0.3 * values
            elif name.endswith("bias"):
                values = 0.3 * values
            elif "embed" not in name:
                values = values * parameter.shape[-1] ** -0.5
            parameter.copy_(values)
    model.eval()
    return model


def save(model: PreTrainedModel, folder: Path, max_shard_size: str = "1GB") -> Path:
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def reopened(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """What the class of `model` makes of a folder, whose files may have been changed since."""
    opened: PreTrainedModel = type(model).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    opened.eval()
    return opened


@torch.inference_mode()
def logits_of(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """[n, vocabulary] logits after each token, in one pass."""
    logits: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
    return logits


@torch.inference_mode()
def continued(model: PreTrainedModel, tokens: Sequence[int], count: int) -> list[int]:
    """The next tokens, greedily: `count`, or fewer with an end token as the last."""
    assert isinstance(model, GenerationMixin)
    prompt = torch.tensor([list(tokens)])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
    )
    assert isinstance(out, Tensor)
    ids: list[int] = out[0, len(tokens) :].tolist()
    return ids
