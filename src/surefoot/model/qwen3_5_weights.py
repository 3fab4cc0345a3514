"""How the hybrid family's tensors become layers: names, row orders, and both expert layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import Weight
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
from surefoot.model.layers.weights import joined, pack_beside, pick_rows, stacked, take_alike
from surefoot.model.qwen3_5_config import HybridConfig
from surefoot.weights.load import TensorTaker

_WRAPPED = "model.language_model."
_PLAIN = "model."

INT8_LINEARS = re.compile(
    r".*\.self_attn\.[qkvo]_proj\.weight"
    r"|.*\.linear_attn\.(in_proj_(qkv|z|qkvz)|out_proj)\.weight"
    r"|.*\.mlp\.((shared_expert|experts\.\d+)\.)?(gate|up|down)_proj\.weight"
    r"|.*\.mlp\.experts\.(gate_up|down)_proj"
    r"|mtp\.fc\.weight"
    r"|lm_head\.weight"
)
"""Names of what W8A8 makes int8: not routers, and not the few rows of b, a and the shared share."""


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

    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        """The weight of the linear `name`."""
        return self.take.weight(name + ".weight", (outputs, inputs))

    def alike(self, outputs: Mapping[str, int]) -> list[Weight]:
        """Weights of linears, by name, that read the stream and that one product joins."""
        hidden = self.config.hidden
        shapes = {name + ".weight": (count, hidden) for name, count in outputs.items()}
        return take_alike(self.take, shapes)

    def packed(self, *weights: Weight) -> Linear:
        """Alike weights that read the same input, one below the other."""
        return self.backend.pack_linear(joined(weights), None)

    def attention(self, name: str, cache: KeyCache) -> GatedAttention:
        """The attention of the layer whose tensors start with `name`."""
        config, sizes = self.config, self.config.attention
        inner = name + "self_attn."
        wide, keys = sizes.heads * sizes.size, sizes.key_heads * sizes.size
        stored = dict(zip("qkv", (2 * wide, keys, keys), strict=True))
        both, k, v = self.alike({f"{inner}{part}_proj": n for part, n in stored.items()})
        norms = [
            self.norm(f"{inner}{part}_norm.weight", sizes.size)[self._order()].expand(count, -1)
            for part, count in (("q", sizes.heads), ("k", sizes.key_heads))
        ]
        output = self.weight(inner + "o_proj", config.hidden, wide)
        return GatedAttention(
            sizes=sizes,
            eps=config.eps,
            norm=self.norm(name + "input_layernorm.weight", config.hidden),
            joint=self.packed(self._queries(both), self._keys(k), v, self._gates(both)),
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

    def _keys_and_values(self, inner: str) -> tuple[Weight, Weight]:
        wide = self.config.attention.key_heads * self.config.attention.size
        k, v = self.alike({f"{inner}{part}_proj": wide for part in "kv"})
        return self._keys(k), v

    def _keys(self, k: Weight) -> Weight:
        size, order = self.config.attention.size, self._order()
        return pick_rows(k, lambda rows: rows.unflatten(0, (-1, size))[:, order].flatten(0, 1))

    def _queries(self, both: Weight) -> Weight:
        """Of weights that have for each head its queries, then its gates."""
        size, order = self.config.attention.size, self._order()
        return pick_rows(
            both, lambda rows: rows.unflatten(0, (-1, 2, size))[:, 0, order].flatten(0, 1)
        )

    def _gates(self, both: Weight) -> Weight:
        size = self.config.attention.size
        return pick_rows(both, lambda rows: rows.unflatten(0, (-1, 2, size))[:, 1].flatten(0, 1))

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
            joint=pack_beside(self.backend, parts),
            taps=taps[:, 0].t().contiguous().to(self.backend.device).t(),
            unit=sizes.unit().to(self.backend.device),
            a_log=self.exact(inner + "A_log", sizes.value_heads),
            dt_bias=self.exact(inner + "dt_bias", sizes.value_heads),
            gated_norm=self.exact(inner + "norm.weight", sizes.value_size),
            output=self.packed(output),
            prefix=self.prefix,
            layer=layer,
            backend=self.backend,
        )

    def _split_inputs(self, inner: str) -> list[Weight]:
        """Rows in the order of DeltaSizes.joint, stored that way: what is wide, and b and a."""
        widths = dict(zip(("qkv", "z", "b", "a"), self.config.delta.joint, strict=True))
        pairs = [
            self.alike({f"{inner}in_proj_{part}": widths[part] for part in pair})
            for pair in (("qkv", "z"), ("b", "a"))
        ]
        return [joined(pair) for pair in pairs]

    def _grouped_inputs(self, inner: str) -> list[Weight]:
        """The same rows out of two linears that are stored key head by key head.

        Each key head has its query, its key, and the values and gates of its value heads; the
        other linear has the b and a of its value heads.
        """
        sizes, hidden = self.config.delta, self.config.hidden
        share = sizes.value_heads // sizes.key_heads
        widths = [sizes.key_size] * 2 + [share * sizes.value_size] * 2
        qkvz = self.weight(inner + "in_proj_qkvz", sizes.channels + sizes.values, hidden)
        ba = self.weight(inner + "in_proj_ba", 2 * sizes.value_heads, hidden)
        return [
            pick_rows(qkvz, lambda rows: _ungrouped(rows, sizes.key_heads, widths)),
            pick_rows(ba, lambda rows: _ungrouped(rows, sizes.key_heads, [share, share])),
        ]

    def feed(self, name: str, sizes: FeedSizes) -> Feed:
        """The feed-forward whose tensors start with `name`."""
        if isinstance(sizes, ExpertSizes):
            return self._expert_feed(name, sizes)
        gate, up, down = self._gated(name, sizes)
        gated = self.backend.pack_gated(joined((gate, up)), None)
        return DenseFeed(gated, self.packed(down))

    def _gated(self, name: str, sizes: DenseSizes) -> tuple[Weight, Weight, Weight]:
        """Weights of gate, up and down."""
        gate, up = self.alike(_gate_and_up(name, sizes.inner))
        return gate, up, self.weight(name + "down_proj", self.config.hidden, sizes.inner)

    def _expert_feed(self, name: str, sizes: ExpertSizes) -> ExpertFeed:
        hidden = self.config.hidden
        gate, up, down = self._gated(name + "shared_expert.", DenseSizes(sizes.shared))
        router = self.weight(name + "gate", sizes.experts, hidden)
        share = self.weight(name + "shared_expert_gate", 1, hidden)
        return ExpertFeed(
            sizes=sizes,
            joint=pack_beside(self.backend, (joined((gate, up)), router, share)),
            experts=self.backend.pack_experts(*self._experts(name + "experts.", sizes)),
            down=self.packed(down),
            backend=self.backend,
        )

    def _experts(self, name: str, sizes: ExpertSizes) -> tuple[Weight, Weight]:
        """gate_up [E, 2 inner, hidden] and down [E, hidden, inner], stored whole or one by one."""
        hidden, count, inner = self.config.hidden, sizes.experts, sizes.inner
        if self.take.has(name + "gate_up_proj"):
            gate_up = self.take.weight(name + "gate_up_proj", (count, 2 * inner, hidden))
            return gate_up, self.take.weight(name + "down_proj", (count, hidden, inner))
        names = [f"{name}{expert}." for expert in range(count)]
        return (
            stacked(names, lambda one: joined(self.alike(_gate_and_up(one, inner)))),
            stacked(names, lambda one: self.weight(one + "down_proj", hidden, inner)),
        )


def _gate_and_up(name: str, inner: int) -> dict[str, int]:
    return {f"{name}{part}_proj": inner for part in ("gate", "up")}


def _ungrouped(rows: Tensor, groups: int, widths: Sequence[int]) -> Tensor:
    """The first part of all groups, then the second part of all groups, and so on."""
    parts = rows.unflatten(0, (groups, -1)).split(list(widths), dim=1)
    return torch.cat([part.flatten(0, 1) for part in parts])
