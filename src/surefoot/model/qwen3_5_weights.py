"""How the hybrid family's tensors become layers: names, row orders, and both expert layouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.protocol import Backend, Linear
from surefoot.model.layers.attention import GatedAttention, KeyCache, KeyWriter, paired_order
from surefoot.model.layers.delta import DeltaMixer
from surefoot.model.layers.feed import (
    DenseFeed,
    DenseSizes,
    ExpertFeed,
    ExpertSizes,
    Feed,
    FeedSizes,
)
from surefoot.model.qwen3_5_config import HybridConfig
from surefoot.weights.load import TensorTaker

_WRAPPED = "model.language_model."
_PLAIN = "model."


@dataclass(frozen=True)
class HybridTensors:
    """Takes the tensors of a checkpoint of the family and packs them.

    Attributes:
        take: where tensors come from.
        config: sizes.
        backend: packs.
        prefix: before the names of caches.
    """

    take: TensorTaker
    config: HybridConfig
    backend: Backend
    prefix: str

    @property
    def trunk(self) -> str:
        """What the names of the text model's tensors start with."""
        return _WRAPPED if self.take.has_module(_WRAPPED) else _PLAIN

    def norm(self, name: str, size: int) -> Tensor:
        """A norm that is stored around zero: [size] of 1 + weight."""
        return (1 + self.exact(name, size)).to(self.take.dtype)

    def exact(self, name: str, *shape: int) -> Tensor:
        """A tensor in float32, whatever the model's element type."""
        return self.take.take(name, shape, torch.float32).to(self.backend.device)

    def weight(self, name: str, outputs: int, inputs: int) -> Tensor:
        """The weight of the linear `name`."""
        return self.take.take(name + ".weight", (outputs, inputs))

    def packed(self, *weights: Tensor) -> Linear:
        """Linears that read the same input, one below the other."""
        return self.backend.pack_linear(torch.cat(weights), None)

    def attention(self, name: str, cache: KeyCache) -> GatedAttention:
        """The attention of the layer whose tensors start with `name`."""
        config, sizes = self.config, self.config.attention
        inner = name + "self_attn."
        wide = sizes.heads * sizes.size
        both = self.weight(inner + "q_proj", 2 * wide, config.hidden)
        q, gate = both.view(sizes.heads, 2, sizes.size, config.hidden).unbind(1)
        k, v = self._keys_and_values(inner)
        norms = [
            self.norm(f"{inner}{part}_norm.weight", sizes.size)[self._order()].expand(count, -1)
            for part, count in (("q", sizes.heads), ("k", sizes.key_heads))
        ]
        output = self.weight(inner + "o_proj", config.hidden, wide)
        return GatedAttention(
            sizes=sizes,
            eps=config.eps,
            norm=self.norm(name + "input_layernorm.weight", config.hidden),
            joint=self.packed(q[:, self._order()].flatten(0, 1), k, v, gate.flatten(0, 1)),
            norms=torch.cat(norms),
            output=self.packed(output),
            cache=cache,
            backend=self.backend,
        )

    def key_writer(self, name: str, attention: GatedAttention) -> KeyWriter:
        """What writes the entries of `attention`, whose tensors start with `name`."""
        return KeyWriter(
            sizes=attention.sizes,
            eps=attention.eps,
            norm=attention.norm,
            joint=self.packed(*self._keys_and_values(name + "self_attn.")),
            norms=attention.norms[attention.sizes.heads :],
            cache=attention.cache,
            backend=self.backend,
        )

    def _keys_and_values(self, inner: str) -> tuple[Tensor, Tensor]:
        sizes, hidden = self.config.attention, self.config.hidden
        wide = sizes.key_heads * sizes.size
        k, v = (self.weight(f"{inner}{part}_proj", wide, hidden) for part in ("k", "v"))
        ordered = k.view(sizes.key_heads, sizes.size, hidden)[:, self._order()]
        return ordered.flatten(0, 1), v

    def _order(self) -> Tensor:
        return paired_order(self.config.attention.size, self.config.attention.rotated)

    def delta(self, name: str, layer: int) -> DeltaMixer:
        """The recurrent mixer of the layer whose tensors start with `name`."""
        config, sizes = self.config, self.config.delta
        inner = name + "linear_attn."
        fused = self.take.has(inner + "in_proj_qkvz.weight")
        parts = self._grouped_inputs(inner) if fused else self._split_inputs(inner)
        taps = self.take.take(inner + "conv1d.weight", (sizes.channels, 1, sizes.taps))
        output = self.weight(inner + "out_proj", config.hidden, sizes.values)
        return DeltaMixer(
            sizes=sizes,
            eps=config.eps,
            norm=self.norm(name + "input_layernorm.weight", config.hidden),
            joint=self.packed(*parts),
            taps=taps[:, 0].contiguous().to(self.backend.device),
            unit=torch.full((sizes.key_size,), sizes.key_size**-0.5, device=self.backend.device),
            a_log=self.exact(inner + "A_log", sizes.value_heads),
            dt_bias=self.exact(inner + "dt_bias", sizes.value_heads),
            gated_norm=self.exact(inner + "norm.weight", sizes.value_size),
            output=self.packed(output),
            prefix=self.prefix,
            layer=layer,
            backend=self.backend,
        )

    def _split_inputs(self, inner: str) -> list[Tensor]:
        """Rows in the order of DeltaSizes.joint, stored that way."""
        names = ("qkv", "z", "b", "a")
        widths = self.config.delta.joint
        return [
            self.weight(f"{inner}in_proj_{part}", width, self.config.hidden)
            for part, width in zip(names, widths, strict=True)
        ]

    def _grouped_inputs(self, inner: str) -> list[Tensor]:
        """The same rows out of two linears that are stored key head by key head.

        Each key head has its query, its key, and the values and gates of its value heads; the
        other linear has the b and a of its value heads.
        """
        sizes, hidden = self.config.delta, self.config.hidden
        share = sizes.value_heads // sizes.key_heads
        widths = [sizes.key_size] * 2 + [share * sizes.value_size] * 2
        qkvz = self.weight(inner + "in_proj_qkvz", sizes.channels + sizes.values, hidden)
        ba = self.weight(inner + "in_proj_ba", 2 * sizes.value_heads, hidden)
        grouped = qkvz.view(sizes.key_heads, -1, hidden).split(widths, dim=1)
        q, k, v, z = (part.flatten(0, 1) for part in grouped)
        b, a = (part.flatten(0, 1) for part in ba.view(sizes.key_heads, -1, hidden).chunk(2, 1))
        return [q, k, v, z, b, a]

    def feed(self, name: str, sizes: FeedSizes) -> Feed:
        """The feed-forward whose tensors start with `name`."""
        if isinstance(sizes, ExpertSizes):
            return self._expert_feed(name, sizes)
        gate, up, down = self._gated(name, sizes)
        gated = self.backend.pack_gated(torch.cat((gate, up)), None)
        return DenseFeed(gated, self.packed(down))

    def _gated(self, name: str, sizes: DenseSizes) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of gate, up and down."""
        gate, up = (
            self.weight(f"{name}{part}_proj", sizes.inner, self.config.hidden)
            for part in ("gate", "up")
        )
        return gate, up, self.weight(name + "down_proj", self.config.hidden, sizes.inner)

    def _expert_feed(self, name: str, sizes: ExpertSizes) -> ExpertFeed:
        hidden = self.config.hidden
        gate, up, down = self._gated(name + "shared_expert.", DenseSizes(sizes.shared))
        router = self.weight(name + "gate", sizes.experts, hidden)
        share = self.weight(name + "shared_expert_gate", 1, hidden)
        return ExpertFeed(
            sizes=sizes,
            joint=self.packed(gate, up, router, share),
            experts=self.backend.pack_experts(*self._experts(name + "experts.", sizes)),
            down=self.packed(down),
            backend=self.backend,
        )

    def _experts(self, name: str, sizes: ExpertSizes) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2 inner, hidden] and down [E, hidden, inner], stored whole or one by one."""
        hidden, count, inner = self.config.hidden, sizes.experts, sizes.inner
        if self.take.has(name + "gate_up_proj"):
            gate_up = self.take.take(name + "gate_up_proj", (count, 2 * inner, hidden))
            return gate_up, self.take.take(name + "down_proj", (count, hidden, inner))
        gate_up = torch.empty(count, 2 * inner, hidden, dtype=self.take.dtype)
        down = torch.empty(count, hidden, inner, dtype=self.take.dtype)
        for expert in range(count):
            parts = self._gated(f"{name}{expert}.", DenseSizes(inner))
            gate_up[expert, :inner], gate_up[expert, inner:], down[expert] = parts
        return gate_up, down
