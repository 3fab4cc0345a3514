"""Tiny random DeepSeek V4 models of transformers."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, PreTrainedModel
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

# Sixteen index heads: with few, many scores are exactly 0, and who wins a tie is left open there.
SIZES: Mapping[str, object] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "num_hash_layers": 2,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
    "sliding_window": 8,
    "hc_mult": 4,
    # Small, so that it cuts something off.
    "swiglu_limit": 0.05,
    "compress_ratios": [0, 4, 128, 4, 128, 0],
    "compress_rate_hca": 8,
    "max_position_embeddings": 4096,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


_config_type: Callable[..., DeepseekV4Config] = DeepseekV4Config


def _maker(**own: object) -> Callable[..., PreTrainedModel]:
    def make(**changes: object) -> PreTrainedModel:
        config: DeepseekV4Config = _config_type(**{**SIZES, **own, **changes})
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        return randomised(DeepseekV4ForCausalLM(config))

    return make


LATENTS: Mapping[str, Callable[..., PreTrainedModel]] = {
    "small windows": _maker(),
    "no scaling, all entries": _maker(rope_scaling=None, index_topk=64),
    "two streams": _maker(hc_mult=2),
    "windows only": _maker(compress_ratios=[0] * 6),
    "real ratios": _maker(compress_rate_hca=128, sliding_window=16, index_topk=5),
}


def randomised(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Give every tensor values that matter: the library starts many at 0 or 1."""
    draws = torch.Generator().manual_seed(seed)
    model.float().eval()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if "inv_freq" not in name:
                tensor.copy_(drawn(name, tensor, draws))
    return model


def drawn(name: str, like: torch.Tensor, draws: torch.Generator) -> torch.Tensor:
    """Random values for the tensor of this name."""
    if name.endswith("tid2eid"):
        experts = int(SIZES["n_routed_experts"])  # type: ignore[call-overload]
        rows = [torch.randperm(experts, generator=draws) for _ in range(like.shape[0])]
        table: torch.Tensor = torch.stack(rows)[:, : like.shape[1]]
        return table
    values = torch.randn(like.shape, generator=draws)
    if "norm" in name:
        return 1 + 0.2 * values
    if name.endswith(("sinks", "position_bias", "base")):
        return values
    if name.endswith("e_score_correction_bias"):
        return 0.3 * values
    if name.endswith("scale"):
        return 0.5 + torch.rand(like.shape, generator=draws)
    return values * (1.5 / math.sqrt(like.shape[-1]))


def save(
    model: PreTrainedModel, folder: Path, more: Mapping[str, torch.Tensor] | None = None
) -> Path:
    """Write config.json and the tensors under transformers' own names, and `more` tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config))
    both = {**model.state_dict(), **(more or {})}
    tensors = {name: value.detach().contiguous().clone() for name, value in both.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class Composed:
    """A draft head of transformers' modules beside its model."""

    oracle: PreTrainedModel
    layer: nn.Module
    join: nn.Module
    norms: Mapping[str, nn.Module]
    products: Mapping[str, nn.Linear]

    @staticmethod
    def beside(oracle: PreTrainedModel) -> Composed:
        config = copy.deepcopy(oracle.config)
        assert isinstance(config, DeepseekV4Config)
        config.layer_types, config.mlp_layer_types = ["sliding_attention"], ["moe"]
        config.num_hidden_layers, hidden = 1, config.hidden_size
        norms = ("enorm", "hnorm", "norm")
        made = Composed(
            oracle,
            modeling.DeepseekV4DecoderLayer(config, 0).eval(),
            modeling.DeepseekV4HyperHead(config),
            {name: modeling.DeepseekV4RMSNorm(hidden) for name in norms},
            {name: nn.Linear(hidden, hidden, bias=False) for name in ("e_proj", "h_proj")},
        )
        draws = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for name, tensor in made.tensors().items():
                tensor.copy_(drawn(name, tensor, draws))
        return made

    def tensors(self) -> dict[str, torch.Tensor]:
        """Under the names of a checkpoint."""
        own = {**self.norms, **self.products}
        named = {f"mtp.0.{name}.weight": m.get_parameter("weight") for name, m in own.items()}
        inner = {f"mtp.0.{name}": value for name, value in self.layer.state_dict().items()}
        join = {f"mtp.0.hc_head.{name}": value for name, value in self.join.state_dict().items()}
        return named | inner | join

    @torch.inference_mode()
    def streams(self, tokens: Sequence[int]) -> torch.Tensor:
        """[n, streams, hidden] of the model after its last layer."""
        kept: list[torch.Tensor] = []
        last = list(self.oracle.base_model.get_submodule("layers").children())[-1]
        hook = last.register_forward_hook(lambda _m, _i, out: kept.append(out))
        self.oracle(torch.tensor([list(tokens)]), use_cache=False)
        hook.remove()
        return kept[0][0]

    @torch.inference_mode()
    def run(
        self, tokens: Sequence[int], streams: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams and logits of entries 1.. from their tokens and the streams before each."""
        embedded = self.oracle.get_input_embeddings()(torch.tensor(list(tokens)))
        token = self.products["e_proj"](self.norms["enorm"](embedded))
        z = self.products["h_proj"](self.norms["hnorm"](streams)) + token[:, None]
        count, window = len(tokens), int(SIZES["sliding_window"])  # type: ignore[call-overload]
        positions = torch.arange(1, count + 1)[None]
        rotary = self.oracle.base_model.get_submodule("rotary_emb")
        angles = {
            kind: rotary(z[None], position_ids=positions, layer_type=kind)
            for kind in ("main", "compress")
        }
        hidden = torch.ones(count, count).triu(1) + torch.ones(count, count).tril(-window)
        mask = torch.zeros(count, count).masked_fill(hidden > 0, float("-inf"))[None, None]
        out = self.layer(
            z[None],
            input_ids=torch.tensor([list(tokens)]),
            position_embeddings=angles,
            position_ids=positions,
            attention_mask=mask,
        )
        logits = self.oracle.get_output_embeddings()(self.norms["norm"](self.join(out)))
        return out[0], logits[0]
