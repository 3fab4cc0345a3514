"""How DeepSeek V4's tensors become layers: names, orders within heads, and both expert layouts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from surefoot.backend.operands import StreamGates, Weight
from surefoot.backend.protocol import Backend, Linear
from surefoot.errors import WeightsError
from surefoot.model.deepseek_v4_config import HASHED, SPARSE, LatentConfig
from surefoot.model.layers.hyper import HyperConnection, StreamHead
from surefoot.model.layers.latent import (
    Compressor,
    Indexer,
    LatentAttention,
    LatentCaches,
    RawRows,
    trailing_order,
)
from surefoot.model.layers.routed import BiasedChoice, RoutedFeed, TableChoice
from surefoot.model.layers.weights import joined, pack_reordered, pick_rows, stacked, take_alike
from surefoot.weights.load import TensorTaker

INT8_LINEARS = re.compile(
    r".*\.self_attn\.(q_a|q_b|kv|o_a|o_b)_proj\.weight"
    r"|.*\.indexer\.q_b_proj\.weight"
    r"|.*\.mlp\.(shared_experts|experts\.\d+)\.(gate|up|down)_proj\.weight"
    r"|.*\.mlp\.experts\.(gate_up|down)_proj"
    r"|mtp\.\d+\.[eh]_proj\.weight"
    r"|lm_head\.weight"
)
"""Names of what W8A8 makes int8: not routers, compressors, the indexer's weights of heads, nor the
products of hyper-connections."""


@dataclass(frozen=True)
class LatentTensors:
    """Takes the tensors of a checkpoint and packs them.

    Attributes:
        take: where tensors come from.
        config: sizes.
        backend: packs.
    """

    take: TensorTaker
    config: LatentConfig
    backend: Backend

    def vector(self, name: str, size: int) -> Tensor:
        """A norm's weights [size]."""
        return self.take.take(name, (size,)).to(self.backend.device)

    def exact(self, name: str, *shape: int) -> Tensor:
        """A tensor in float32, whatever the model's element type."""
        return self.take.take(name, shape, torch.float32).to(self.backend.device)

    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        """The weight of the linear `name`."""
        return self.take.weight(name + ".weight", (outputs, inputs))

    def linear(self, name: str, outputs: int, inputs: int) -> Linear:
        """The linear `name`, packed."""
        return self.backend.pack_linear(self.weight(name, outputs, inputs), None)

    def connection(self, name: str, norm: str) -> HyperConnection:
        """The hyper-connection whose tensors start with `name`; `norm` is its input's norm."""
        sizes = self.config.streams
        return HyperConnection(
            product=self._streams_product(name + "fn", sizes.gates),
            gates=StreamGates(
                base=self.exact(name + "base", sizes.gates),
                scale=self.exact(name + "scale", 3),
                streams=sizes.count,
                rounds=sizes.rounds,
                eps=sizes.eps,
                norm=self.vector(norm, self.config.hidden),
                norm_eps=self.config.eps,
            ),
            backend=self.backend,
        )

    def stream_head(self, name: str) -> StreamHead:
        """What joins the streams in the end; its tensors start with `name`."""
        sizes = self.config.streams
        return StreamHead(
            product=self._streams_product(name + "hc_fn", sizes.count),
            ones=torch.ones(sizes.count * self.config.hidden, device=self.backend.device),
            base=self.exact(name + "hc_base", sizes.count),
            scale=self.exact(name + "hc_scale", 1),
            eps=sizes.eps,
            norm_eps=self.config.eps,
            backend=self.backend,
        )

    def _streams_product(self, name: str, outputs: int) -> Linear:
        width = self.config.streams.count * self.config.hidden
        weight = self.take.take(name, (outputs, width), torch.float32)
        return self.backend.pack_linear(weight, None)

    def attention(self, name: str, kind: str, caches: LatentCaches) -> LatentAttention:
        """The attention of a layer of this kind whose tensors start with `name`."""
        config, sizes = self.config, self.config.attention
        hidden, order = config.hidden, trailing_order(sizes.size, sizes.rotated)
        shapes = {
            name + "q_a_proj.weight": (sizes.query_rank, hidden),
            name + "kv_proj.weight": (sizes.size, hidden),
        }
        low, latent = take_alike(self.take, shapes)
        latent = pick_rows(latent, lambda rows: rows[order])
        queries = self.weight(name + "q_b_proj", sizes.heads * sizes.size, sizes.query_rank)
        compressor = config.compressor(kind)
        inner = name + "compressor."
        return LatentAttention(
            sizes=sizes,
            eps=config.eps,
            low=self.backend.pack_linear(joined((low, latent)), None),
            low_norm=self.vector(name + "q_a_norm.weight", sizes.query_rank),
            queries=self._heads(queries, order),
            head_norm=torch.ones(sizes.size, dtype=self.take.dtype, device=self.backend.device),
            latent_norm=self.vector(name + "kv_norm.weight", sizes.size)[order],
            raw=None if compressor is None else self._raw(inner, compressor, sizes.size),
            indexer=self._indexer(inner + "indexer.") if kind == SPARSE else None,
            sinks=self.exact(name + "sinks", sizes.heads),
            groups=self._groups(name + "o_a_proj", order),
            output=self.linear(name + "o_b_proj", hidden, sizes.groups * sizes.output_rank),
            caches=caches,
            backend=self.backend,
        )

    def _heads(self, weight: Weight, order: Tensor) -> Linear:
        """A linear to heads, each in a new order."""
        size = len(order)
        ordered = pick_rows(
            weight, lambda rows: rows.unflatten(0, (-1, size))[:, order].flatten(0, 1)
        )
        return self.backend.pack_linear(ordered, None)

    def _groups(self, name: str, order: Tensor) -> tuple[Linear, ...]:
        sizes = self.config.attention
        heads, rank = sizes.heads // sizes.groups, sizes.output_rank
        weight = self.weight(name, sizes.groups * rank, heads * sizes.size)
        starts = torch.arange(heads)[:, None] * sizes.size
        groups = [
            pick_rows(weight, itemgetter(slice(at, at + rank)))
            for at in range(0, sizes.groups * rank, rank)
        ]
        by_head = (starts + order).flatten()
        return tuple(pack_reordered(self.backend, group, by_head) for group in groups)

    def _raw(self, name: str, form: Compressor, size: int) -> RawRows:
        """What makes entries of `size`; its tensors start with `name`."""
        hidden, width = self.config.hidden, form.width(size)
        order = trailing_order(size, self.config.attention.rotated)
        parts = [
            self.take.take(f"{name}{part}_proj.weight", (width, hidden), torch.float32)
            for part in ("kv", "gate")
        ]
        ordered = [part.view(-1, size, hidden)[:, order].flatten(0, 1) for part in parts]
        bias = self.take.take(name + "position_bias", (form.ratio, width), torch.float32)
        bias = bias.view(form.ratio, -1, size)[..., order].flatten(1)
        return RawRows(
            form=form,
            product=self.backend.pack_linear(torch.cat(ordered), None),
            bias=torch.cat((torch.zeros_like(bias), bias), dim=1).to(self.backend.device),
            norm=self.vector(name + "kv_norm.weight", size)[order],
            eps=self.config.eps,
            backend=self.backend,
        )

    def _indexer(self, name: str) -> Indexer:
        config, sizes = self.config, self.config.indexer
        rank = config.attention.query_rank
        queries = self.weight(name + "q_b_proj", sizes.heads * sizes.size, rank)
        return Indexer(
            sizes=sizes,
            queries=self._heads(queries, trailing_order(sizes.size, config.attention.rotated)),
            weights=self.linear(name + "scorer.weights_proj", sizes.heads, config.hidden),
            keys=self._raw(name, config.sparse, sizes.size),
            backend=self.backend,
        )

    def feed(self, name: str, router: str) -> RoutedFeed:
        """The feed-forward whose tensors start with `name`."""
        sizes, hidden = self.config.feed, self.config.hidden
        weight = self.take.take(name + "gate.weight", (sizes.experts, hidden), torch.float32)
        shared = name + "shared_experts."
        return RoutedFeed(
            scale=sizes.scale,
            router=self.backend.pack_linear(weight, None),
            choice=self._choice(name + "gate.", router),
            experts=self.backend.pack_experts(*self._experts(name + "experts."), sizes.limit),
            gated=self.backend.pack_gated(self._gate_and_up(shared), None, sizes.limit),
            down=self.backend.pack_linear(self._down(shared), None),
            backend=self.backend,
        )

    def _choice(self, name: str, router: str) -> TableChoice | BiasedChoice:
        sizes = self.config.feed
        if router == HASHED:
            shape = (self.config.vocab_size, sizes.chosen)
            return TableChoice(self._table(name + "tid2eid", shape).to(self.backend.device))
        bias = self.exact(name + "e_score_correction_bias", sizes.experts)
        return BiasedChoice(bias, sizes.chosen)

    def _table(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Expert ids by token."""
        table, experts = self.take.take(name, shape, torch.int64), self.config.feed.experts
        if not 0 <= int(table.min()) <= int(table.max()) < experts:
            raise WeightsError(f"tensor {name!r} must hold expert ids from 0 to {experts - 1} only")
        return table

    def _gate_and_up(self, name: str) -> Weight:
        """[2 inner, hidden] of one expert."""
        shape = (self.config.feed.inner, self.config.hidden)
        names = (f"{name}{part}_proj.weight" for part in ("gate", "up"))
        return joined(take_alike(self.take, dict.fromkeys(names, shape)))

    def _down(self, name: str) -> Weight:
        """[hidden, inner] of one expert."""
        return self.weight(name + "down_proj", self.config.hidden, self.config.feed.inner)

    def _experts(self, name: str) -> tuple[Weight, Weight]:
        """gate_up [E, 2 inner, hidden] and down [E, hidden, inner], stored whole or one by one."""
        sizes, hidden = self.config.feed, self.config.hidden
        if self.take.has(name + "gate_up_proj"):
            shape, down = (2 * sizes.inner, hidden), (hidden, sizes.inner)
            return (
                self.take.weight(name + "gate_up_proj", (sizes.experts, *shape)),
                self.take.weight(name + "down_proj", (sizes.experts, *down)),
            )
        names = [f"{name}{expert}." for expert in range(sizes.experts)]
        return stacked(names, self._gate_and_up), stacked(names, self._down)
