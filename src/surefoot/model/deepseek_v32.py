"""DeepSeek V3.2 and GLM-5, and their draft head.

    embedding -> layers: attention over chosen positions, feed-forward -> norm -> head

All heads of a layer read the same latents. An indexer chooses at which positions; it has keys of
its own. Some layers have none and look where the layer before has looked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import Fold
from surefoot.backend.protocol import Backend, Linear
from surefoot.model.deepseek_v32_config import ARCHITECTURES, FULL, ChosenConfig, read_config
from surefoot.model.deepseek_v32_weights import EMBEDDING, INT8_LINEARS, ChosenTensors
from surefoot.model.layers.chosen import ChosenAttention, ChosenCaches, StepAngles
from surefoot.model.layers.feed import DenseFeed, DenseSizes
from surefoot.model.layers.grouped import GroupedFeed, GroupedSizes
from surefoot.model.layers.rotary import AnglesAt
from surefoot.model.model import Description, DraftHead
from surefoot.state.pool import Pools
from surefoot.state.spec import Paged, Part
from surefoot.step import Batch
from surefoot.weights.load import TensorTaker

__all__ = ["ARCHITECTURES", "INT8_LINEARS", "ChosenModel", "MtpHead", "describe"]

_MTP = "mtp"
_LATENTS, _INDEX = "latents", "index"


def describe(config: Mapping[str, object], dtype: str, prefix: str) -> Description:
    """What the config tells; cache names start with `prefix`, entries have `dtype`.

    The draft head is described if the config promises one. The description of a loaded model goes
    by the tensors that are there.
    """
    known = read_config(config)
    return _describe(known, dtype, prefix, known.promises_mtp)


def _describe(config: ChosenConfig, dtype: str, prefix: str, mtp: bool) -> Description:
    layers, full = len(config.kinds), config.kinds.count(FULL)
    return Description(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        parameters=config.parameters(mtp),
        layers=config.kinds,
        caches=_caches(config, dtype, prefix, layers, full),
        draft_head=_MTP if mtp else None,
        draft_caches=_caches(config, dtype, _mtp_prefix(prefix), 1, 1) if mtp else (),
        hidden_shape=(config.hidden,),
        linears=config.linears(mtp),
        looks_at=config.index.chosen,
    )


def _caches(
    config: ChosenConfig, dtype: str, prefix: str, layers: int, full: int
) -> tuple[Paged, ...]:
    sizes = config.attention
    latents = Part("values", (sizes.rank,), dtype), Part("turned", (sizes.turned,), dtype)
    keys = Part("index", (config.index.size,), dtype)
    return (
        Paged(prefix + _LATENTS, layers, latents),
        Paged(prefix + _INDEX, full, (keys,)),
    )


def _mtp_prefix(prefix: str) -> str:
    return f"{prefix}{_MTP}."


@dataclass(frozen=True)
class Layer:
    """Attention and a feed-forward, each behind a norm and added to the stream."""

    attention: ChosenAttention
    norm: Tensor
    feed: DenseFeed | GroupedFeed

    def __call__(
        self,
        stream: Tensor,
        angles: StepAngles,
        batch: Batch,
        pools: Pools,
        chosen: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The stream after this layer, and the positions it looked at; see ChosenAttention."""
        attention = self.attention
        stream, chosen = attention(stream, angles, batch, pools, chosen)
        normed = attention.backend.rms_norm(stream, self.norm, attention.eps)
        return self.feed(normed, stream, batch), chosen


@dataclass(frozen=True)
class Ends:
    """What the model and its draft head share."""

    embedding: Tensor
    norm: Tensor
    head: Linear
    own: AnglesAt
    index: AnglesAt
    eps: float
    backend: Backend

    def angles(self, batch: Batch) -> StepAngles:
        """Of the step's tokens."""
        return StepAngles(self.own(batch.positions), self.index(batch.positions))

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm of hidden states [T, hidden]."""
        return self.backend.rms_norm(hidden, self.norm, self.eps)


class MtpHead:
    """One layer with an indexer that reads the next token and the model's state before it.

    Some configs have later passes of a draft look where its first pass has looked. What that chose
    then goes along with the row's states, behind them: a row keeps its own choice, whatever other
    rows come and go or are padded.
    """

    def __init__(self, tensors: ChosenTensors, ends: Ends, name: str, prefix: str) -> None:
        """Take all tensors of the head, which start with `name`; it shares the model's `ends`."""
        config, hidden = tensors.config, tensors.config.hidden
        self._ends, self._hidden, self._one_choice = ends, hidden, config.one_choice
        tensors.skip_copies(name)
        norms = [tensors.vector(f"{name}{part}.weight", hidden) for part in ("enorm", "hnorm")]
        self._norms = torch.stack(norms)
        self._join = tensors.linear(name + "eh_proj", hidden, 2 * hidden)
        own = _mtp_prefix(prefix)
        caches = ChosenCaches(own + _LATENTS, 0, own + _INDEX, 0)
        self._layer = _take_layer(tensors, name, FULL, config.mtp_feed, caches)
        self._norm = tensors.vector(name + "shared_head.norm.weight", hidden)

    @property
    def deepens(self) -> bool:
        """See DraftHead."""
        return self._one_choice

    def enter(self, hidden: Tensor) -> Tensor:
        """See DraftHead: the model's final norm."""
        return self._ends.normed(hidden)

    def catch_up(self, batch: Batch, hidden: Tensor, pools: Pools) -> None:
        """See DraftHead."""
        stream, angles = self._joined(batch, hidden), self._ends.angles(batch)
        self._layer.attention.write(stream, angles, batch, pools)

    def forward(self, batch: Batch, hidden: Tensor, pools: Pools) -> Tensor:
        """See DraftHead; what comes out has been through the head's own norm."""
        return self._pass(batch, hidden, pools, None)

    def deepen(self, batch: Batch, hidden: Tensor, pools: Pools) -> Tensor:
        """See DraftHead."""
        if not self._one_choice:
            return self._pass(batch, hidden, pools, None)
        states, choice = hidden.split((self._hidden, hidden.shape[1] - self._hidden), dim=1)
        chosen = choice_within(choice, batch.positions)
        return self._pass(batch, states.to(self._norm.dtype), pools, chosen)

    def logits(self, hidden: Tensor) -> Tensor:
        """See DraftHead."""
        return self._ends.head(hidden[:, : self._hidden].to(self._norm.dtype)).float()

    def _pass(self, batch: Batch, hidden: Tensor, pools: Pools, chosen: Tensor | None) -> Tensor:
        stream, angles = self._joined(batch, hidden), self._ends.angles(batch)
        stream, chosen = self._layer(stream, angles, batch, pools, chosen)
        states = self._ends.backend.rms_norm(stream, self._norm, self._ends.eps)
        if not self._one_choice:
            return states
        # Positions up to 2^24 are exact in float32, as are states of any narrower type.
        return torch.cat((states.float(), chosen.float()), dim=1)

    def _joined(self, batch: Batch, hidden: Tensor) -> Tensor:
        """[T, hidden] of each token's embedding and the state before it."""
        ends = self._ends
        return self._join(
            ends.backend.join_tokens(batch.tokens, ends.embedding, hidden, self._norms, ends.eps)
        )


def choice_within(choice: Tensor, positions: Tensor) -> Tensor:
    """A choice [T, n] that went along in floats, as far as tokens at `positions` [T] see it.

    Nobody fills the states of padding: what stands there may be left of another step, or no number.

    Returns:
        [T, n] int64 positions, -1 in the place of others.
    """
    seen = (choice >= 0) & (choice <= positions[:, None])
    return choice.masked_fill(~seen, -1).long()


class ChosenModel:
    """A loaded model of the family."""

    def __init__(
        self, take: TensorTaker, config: Mapping[str, object], backend: Backend, prefix: str
    ) -> None:
        """Take all tensors of the checkpoint and pack them for `backend`.

        Args:
            take: where tensors come from; also says their element type.
            config: the checkpoint's config.json.
            backend: where the model will run.
            prefix: put before the names of its caches.
        """
        self.config = read_config(config)
        tensors = ChosenTensors(take, self.config, backend)
        self._ends = _take_ends(tensors)
        self._layers = _take_layers(tensors, prefix)
        name = f"model.layers.{len(self.config.kinds)}"
        has_mtp = take.has_module(name)
        self._draft_head = MtpHead(tensors, self._ends, name + ".", prefix) if has_mtp else None
        dtype = str(take.dtype).removeprefix("torch.")
        self.description = _describe(self.config, dtype, prefix, has_mtp)

    @property
    def draft_head(self) -> DraftHead | None:
        """See Model: there if the checkpoint has its tensors."""
        return self._draft_head

    def fold(self, folds: Sequence[Fold], pools: Pools) -> None:
        """See Model: nothing here is recurrent."""

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        """See Model."""
        ends = self._ends
        stream = ends.backend.pick_rows(ends.embedding, batch.tokens)
        angles = ends.angles(batch)
        chosen: Tensor | None = None
        for layer in self._layers:
            if layer.attention.indexer is not None:
                chosen = None
            stream, chosen = layer(stream, angles, batch, pools, chosen)
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model."""
        return self._ends.head(self._ends.normed(hidden)).float()


def _take_ends(tensors: ChosenTensors) -> Ends:
    config, backend = tensors.config, tensors.backend
    table = (config.vocab_size, config.hidden)
    return Ends(
        embedding=tensors.take.take(EMBEDDING, table).to(backend.device),
        norm=tensors.vector("model.norm.weight", config.hidden),
        head=tensors.linear("lm_head", *table),
        own=config.rotary(config.attention.turned).on(backend),
        index=config.rotary(config.index.size).on(backend),
        eps=config.eps,
        backend=backend,
    )


def _take_layers(tensors: ChosenTensors, prefix: str) -> list[Layer]:
    config, layers, full = tensors.config, [], 0
    for place, (kind, feed) in enumerate(zip(config.kinds, config.feeds, strict=True)):
        caches = ChosenCaches(prefix + _LATENTS, place, prefix + _INDEX, full)
        full += kind == FULL
        layers.append(_take_layer(tensors, f"model.layers.{place}.", kind, feed, caches))
    return layers


def _take_layer(
    tensors: ChosenTensors,
    name: str,
    kind: str,
    feed: DenseSizes | GroupedSizes,
    caches: ChosenCaches,
) -> Layer:
    return Layer(
        attention=tensors.attention(name, kind, caches),
        norm=tensors.vector(name + "post_attention_layernorm.weight", tensors.config.hidden),
        feed=tensors.feed(name + "mlp.", feed),
    )
