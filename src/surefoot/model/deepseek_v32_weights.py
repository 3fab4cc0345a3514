"""How DeepSeek V3.2's and GLM-5's tensors become layers: names, orders, and both expert layouts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import Weight
from surefoot.backend.protocol import Backend, Linear
from surefoot.errors import WeightsError
from surefoot.model.deepseek_v32_config import FULL, ChosenConfig
from surefoot.model.layers.chosen import (
    ChosenAttention,
    ChosenCaches,
    Indexer,
    PerHead,
    halves_of_pairs,
)
from surefoot.model.layers.feed import DenseFeed, DenseSizes
from surefoot.model.layers.grouped import GroupedChoice, GroupedFeed, GroupedSizes
from surefoot.model.layers.weights import joined, pick_rows, stacked, take_alike
from surefoot.weights.load import TensorTaker

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
INT8_LINEARS = re.compile(
    r".*\.self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj|indexer\.wq_b)\.weight"
    r"|.*\.mlp\.((shared_experts|experts\.\d+)\.)?(gate|up|down)_proj\.weight"
    r"|.*\.mlp\.experts\.(gate_up|down)_proj"
    r"|.*\.eh_proj\.weight"
    r"|lm_head\.weight"
)
"""Names of what W8A8 makes int8: not routers, the indexer's keys and weights of heads, nor what
leads each head into the latents' space and out of it."""


@dataclass(frozen=True)
class ChosenTensors:
    """Takes the tensors of a checkpoint and packs them.

    Attributes:
        take: where tensors come from.
        config: sizes.
        backend: packs.
    """

    take: TensorTaker
    config: ChosenConfig
    backend: Backend

    def vector(self, name: str, size: int) -> Tensor:
        """A norm's weights [size]."""
        return self.take.take(name, (size,)).to(self.backend.device)

    def weight(self, name: str, outputs: int, inputs: int) -> Weight:
        """The weight of the linear `name`."""
        return self.take.weight(name + ".weight", (outputs, inputs))

    def linear(self, name: str, outputs: int, inputs: int) -> Linear:
        """The linear `name`, packed."""
        return self.backend.pack_linear(self.weight(name, outputs, inputs), None)

    def skip_copies(self, name: str) -> None:
        """Leave out what a draft head repeats of the model, if it does.

        Raises:
            WeightsError: a tensor of that name is not the model's, so it cannot be left out.
        """
        table = (self.config.vocab_size, self.config.hidden)
        copies = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}
        for own, source in copies.items():
            if not self.take.has(name + own):
                continue
            if not torch.equal(self.take.take(name + own, table), self.take.take(source, table)):
                raise WeightsError(
                    f"tensor {name + own!r} must repeat {source!r}, which the draft head shares, "
                    "and it differs"
                )

    def attention(self, name: str, kind: str, caches: ChosenCaches) -> ChosenAttention:
        """The attention of the layer whose tensors start with `name`; `kind` as in the config."""
        config, sizes, inner = self.config, self.config.attention, name + "self_attn."
        hidden, wide = config.hidden, sizes.heads * (sizes.plain + sizes.turned)
        shapes = {
            inner + "q_a_proj.weight": (sizes.query_rank, hidden),
            inner + "kv_a_proj_with_mqa.weight": (sizes.rank + sizes.turned, hidden),
        }
        low, latent = take_alike(self.take, shapes)
        latent = pick_rows(latent, lambda rows: rows[_turned_last(sizes.rank, sizes.turned)])
        enter, leave = self._spread(inner + "kv_b_proj.weight")
        return ChosenAttention(
            sizes=sizes,
            eps=config.eps,
            norm=self.vector(name + "input_layernorm.weight", hidden),
            low=self.backend.pack_linear(joined((low, latent)), None),
            low_norm=self.vector(inner + "q_a_layernorm.weight", sizes.query_rank),
            latent_norm=self.vector(inner + "kv_a_layernorm.weight", sizes.rank),
            queries=self._heads(
                self.weight(inner + "q_b_proj", wide, sizes.query_rank),
                _turned_last(sizes.plain, sizes.turned),
            ),
            enter=enter,
            leave=leave,
            output=self.linear(inner + "o_proj", hidden, sizes.heads * sizes.value),
            indexer=self._indexer(inner + "indexer.") if kind == FULL else None,
            caches=caches,
            backend=self.backend,
        )

    def _spread(self, name: str) -> tuple[PerHead, PerHead]:
        """What leads each head into the latents' space, and out of it: never in int8."""
        sizes = self.config.attention
        both = sizes.plain + sizes.value
        weight = self.take.take(name, (sizes.heads * both, sizes.rank))
        keys, values = weight.view(sizes.heads, both, sizes.rank).split(
            (sizes.plain, sizes.value), dim=1
        )
        pack = self.backend.pack_linear
        return (
            PerHead(tuple(pack(key.t().contiguous(), None) for key in keys)),
            PerHead(tuple(pack(value.contiguous(), None) for value in values)),
        )

    def _heads(self, weight: Weight, order: Tensor) -> Linear:
        """A linear to heads, each in a new order."""
        size = len(order)
        ordered = pick_rows(
            weight, lambda rows: rows.unflatten(0, (-1, size))[:, order].flatten(0, 1)
        )
        return self.backend.pack_linear(ordered, None)

    def _indexer(self, name: str) -> Indexer:
        config, sizes, device = self.config, self.config.index, self.backend.device
        order = sizes.order(config.attention.turned)
        queries = self.weight(name + "wq_b", sizes.heads * sizes.size, config.attention.query_rank)
        keys = pick_rows(self.weight(name + "wk", sizes.size, config.hidden), lambda r: r[order])
        shape = (sizes.heads, config.hidden)
        weights = self.take.take(name + "weights_proj.weight", shape, torch.float32)
        norm, bias = (
            self.take.take(f"{name}k_norm.{part}", (sizes.size,), torch.float32)[order].to(device)
            for part in ("weight", "bias")
        )
        return Indexer(
            sizes=sizes,
            queries=self._heads(queries, order),
            keys=self.backend.pack_linear(keys, None),
            weights=self.backend.pack_linear(weights, None),
            norm=norm,
            bias=bias,
            backend=self.backend,
        )

    def feed(self, name: str, sizes: DenseSizes | GroupedSizes) -> DenseFeed | GroupedFeed:
        """The feed-forward whose tensors start with `name`."""
        if isinstance(sizes, DenseSizes):
            return DenseFeed(*self._pair(name, sizes.inner))
        weight = self.take.take(
            name + "gate.weight", (sizes.experts, self.config.hidden), torch.float32
        )
        bias = self.take.take(
            name + "gate.e_score_correction_bias", (sizes.experts,), torch.float32
        )
        gated, down = self._pair(name + "shared_experts.", sizes.shared)
        return GroupedFeed(
            router=self.backend.pack_linear(weight, None),
            choice=GroupedChoice(bias.to(self.backend.device), sizes, self.backend),
            experts=self.backend.pack_experts(*self._experts(name + "experts.", sizes)),
            gated=gated,
            down=down,
        )

    def _pair(self, name: str, inner: int) -> tuple[Callable[[Tensor], Tensor], Linear]:
        """Inner values and what leads back, of the gated pair whose tensors start with `name`."""
        gated = self.backend.pack_gated(self._gate_and_up(name, inner), None)
        return gated, self.linear(name + "down_proj", self.config.hidden, inner)

    def _gate_and_up(self, name: str, inner: int) -> Weight:
        """[2 inner, hidden]."""
        names = (f"{name}{part}_proj.weight" for part in ("gate", "up"))
        return joined(take_alike(self.take, dict.fromkeys(names, (inner, self.config.hidden))))

    def _experts(self, name: str, sizes: GroupedSizes) -> tuple[Weight, Weight]:
        """gate_up [E, 2 inner, hidden] and down [E, hidden, inner], stored whole or one by one."""
        hidden, inner = self.config.hidden, sizes.inner
        if self.take.has(name + "gate_up_proj"):
            return (
                self.take.weight(name + "gate_up_proj", (sizes.experts, 2 * inner, hidden)),
                self.take.weight(name + "down_proj", (sizes.experts, hidden, inner)),
            )
        names = [f"{name}{expert}." for expert in range(sizes.experts)]
        return (
            stacked(names, lambda expert: self._gate_and_up(expert, inner)),
            stacked(names, lambda expert: self.weight(expert + "down_proj", hidden, inner)),
        )


def _turned_last(before: int, turned: int) -> Tensor:
    """Order that leaves `before` numbers and makes neighbours among the turned ones halves."""
    return torch.cat((torch.arange(before), before + halves_of_pairs(turned)))
