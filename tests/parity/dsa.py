"""Tiny random DeepSeek V3.2 and GLM-5 models of transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from tests.parity.oracle import logits_of

SIZES: Mapping[str, object] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 60,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 24,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 14,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "index_topk": 16,
    "index_head_dim": 20,
    "index_n_heads": 5,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}
DEFAULT: Mapping[str, object] = {"rope_type": "default", "rope_theta": 10000.0}
YARN: Mapping[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    # Unlike in releases they differ, so that cosines and sines have a factor too.
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


def _deepseek(**own: object) -> PreTrainedModel:
    make: Callable[..., Any] = DeepseekV32Config
    return _made(DeepseekV32ForCausalLM, make(**{**SIZES, "rope_parameters": DEFAULT, **own}))


def _glm(**own: object) -> PreTrainedModel:
    make: Callable[..., Any] = GlmMoeDsaConfig
    known = {**SIZES, "rope_parameters": DEFAULT, "rms_norm_eps": 1e-5, **own}
    return _made(GlmMoeDsaForCausalLM, make(**known))


def _made(model: Callable[..., PreTrainedModel], config: Any) -> PreTrainedModel:
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return randomised(model(config))


MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "deepseek": _deepseek,
    "deepseek, yarn": lambda: _deepseek(rope_parameters=YARN),
    "glm": _glm,
    "glm, every second indexer": lambda: _glm(index_topk_freq=2, index_skip_topk_offset=1),
    "glm, one group, all positions": lambda: _glm(n_group=1, topk_group=1, index_topk=128),
}


def randomised(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Give every tensor values that matter: the library starts many at 0 or 1."""
    model.float().eval()
    draw({**dict(model.named_parameters()), **dict(model.named_buffers())}, seed)
    return model


@torch.no_grad()
def draw(tensors: Mapping[str, Tensor], seed: int) -> None:
    """Fill tensors with random values that suit their names."""
    draws = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if "inv_freq" in name:
            continue
        values = torch.randn(tensor.shape, generator=draws)
        if name.endswith("bias"):
            values = 0.3 * values
        elif "norm" in name:
            values = 1 + 0.2 * values
        else:
            values = values * tensor.shape[-1] ** -0.5
        if "_a_proj" in name or name.endswith("wk.weight"):
            # What comes out is normed, and so small that what the norm adds to it shows.
            values = 0.03 * values
        tensor.copy_(values)


@contextmanager
def stable_ties() -> Iterator[None]:
    """The greatest of equal numbers are those with the lowest indices, as they are here.

    The library leaves that open: which it takes depends on how many numbers there are. Many scores
    of the indexer are exactly 0, so a choice often ends among equals.
    """

    def topk(x: Tensor, k: int, dim: int = -1, sorted: bool = True) -> torch.return_types.topk:
        values, indices = torch.sort(x, dim=dim, descending=True, stable=True)
        first = values.narrow(dim, 0, k), indices.narrow(dim, 0, k)
        return torch.return_types.topk(first)

    with patch.object(torch.Tensor, "topk", topk), patch.object(torch, "topk", topk):
        yield


def logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """[n, vocabulary] logits after each token, in one pass."""
    with stable_ties():
        return logits_of(model, tokens)


def save(
    model: PreTrainedModel,
    folder: Path,
    more: Mapping[str, Tensor] | None = None,
    **changes: object,
) -> Path:
    """Write config.json, with `changes`, and tensors under transformers' own names, and `more`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    both = {**model.state_dict(), **(more or {})}
    tensors = {name: value.detach().contiguous().clone() for name, value in both.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


class _Deepseek(modeling_deepseek_v32.DeepseekV32DecoderLayer):
    """A layer whose result is one tensor, as the library's draft layer wants it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return out[0] if isinstance(out, tuple) else out


class _Glm(modeling_glm_moe_dsa.GlmMoeDsaDecoderLayer):
    """The same; keeps which entries were looked at, and looks at others if told so."""

    looked_at: Tensor
    told: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["prev_topk_indices"] = self.told
        out, self.looked_at = super().forward(*args, **kwargs)
        return out


_LAYERS: Mapping[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "DeepseekV32ForCausalLM": (_Deepseek, modeling_deepseek_v32.DeepseekV32RMSNorm),
    "GlmMoeDsaForCausalLM": (_Glm, modeling_glm_moe_dsa.GlmMoeDsaRMSNorm),
}


@dataclass(frozen=True)
class Composed:
    """A draft layer of transformers beside its model."""

    oracle: PreTrainedModel
    layer: MtpLayer

    @staticmethod
    def beside(oracle: PreTrainedModel) -> Composed:
        config: Any = copy.deepcopy(oracle.config)
        config.mlp_layer_types, config.indexer_types = ["sparse"], ["full"]
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        layer = MtpLayer(config, *_LAYERS[type(oracle).__name__], 0).float().eval()
        draw({**dict(layer.named_parameters()), **dict(layer.named_buffers())}, seed=9)
        return Composed(oracle, layer)

    def tensors(self) -> dict[str, Tensor]:
        """Under the names of a checkpoint, with the copies that releases have."""
        start = f"model.layers.{self.oracle.config.num_hidden_layers}."
        renamed = {
            start + name.replace("mtp_block.", "").replace("post_norm", "shared_head.norm"): value
            for name, value in self.layer.state_dict().items()
        }
        stored = self.oracle.state_dict()
        copies = {
            start + "embed_tokens.weight": stored["model.embed_tokens.weight"],
            start + "shared_head.head.weight": stored["lm_head.weight"],
        }
        return renamed | copies

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """[n, hidden] of the model after its last norm."""
        with stable_ties():
            states: Tensor = self.oracle.base_model(torch.tensor([tokens])).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """States and logits of entries 1.. from their tokens and the state before each."""
        embedded = self.oracle.get_input_embeddings()(torch.tensor([list(tokens)]))
        count = len(tokens)
        positions = torch.arange(1, count + 1)[None]
        angles = self.oracle.base_model.get_submodule("rotary_emb")(embedded, positions)
        least = torch.finfo(torch.float32).min
        mask = torch.full((count, count), least).triu(1)[None, None]
        with stable_ties():
            states = self.layer(embedded, hidden[None], angles, mask, positions, None)
        out: Tensor = self.oracle.get_output_embeddings()(states)
        return states[0], out[0]

    @contextmanager
    def looking_at(self, entries: Tensor) -> Iterator[None]:
        """Every row looks at these entries [n, chosen] and chooses none."""
        block: Any = self.layer.mtp_block
        indexer, block.told, block.self_attn.indexer = block.self_attn.indexer, entries[None], None
        yield
        block.told, block.self_attn.indexer = None, indexer
