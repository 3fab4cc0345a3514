"""Sizes of the DeepSeek V4 architecture that is trained here."""

from __future__ import annotations

from dataclasses import dataclass

from tools.train.network import ModelSizes


@dataclass(frozen=True)
class LatentSizes(ModelSizes):
    """What shapes the model; the names are those of the public config.

    The ratios, the window and the streams are those of the real models, the rest is small.
    """

    hidden_size: int = 256
    compress_ratios: tuple[int, ...] = (0, 4, 128, 4, 128)
    num_attention_heads: int = 4
    head_dim: int = 64
    qk_rope_head_dim: int = 16
    q_lora_rank: int = 128
    o_groups: int = 2
    o_lora_rank: int = 64
    sliding_window: int = 128
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    index_n_heads: int = 8
    index_head_dim: int = 16
    index_topk: int = 32
    n_routed_experts: int = 6
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 104
    num_hash_layers: int = 1
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6

    @property
    def heads_width(self) -> int:
        """Of all query heads."""
        return self.num_attention_heads * self.head_dim
