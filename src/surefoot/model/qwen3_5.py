"""Hybrid decoders: Qwen3-Next, Qwen3.5 and Qwen3.6, dense or with experts, and their draft head.

Most layers carry a recurrent state, every few look back over all positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surefoot.backend.operands import Fold
from surefoot.backend.protocol import Backend, Linear
from surefoot.model.layers.attention import Angles, GatedAttention, KeyCache, KeyWriter
from surefoot.model.layers.delta import DeltaMixer, fold_layers
from surefoot.model.layers.feed import Feed
from surefoot.model.layers.head import take_head
from surefoot.model.layers.rotary import AnglesAt, make_partial_rotary
from surefoot.model.model import Description, DraftHead
from surefoot.model.qwen3_5_config import ARCHITECTURES, FULL, HybridConfig, read_config
from surefoot.model.qwen3_5_weights import INT8_LINEARS, HybridTensors
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec, Paged, Part
from surefoot.step import Batch
from surefoot.weights.load import TensorTaker

__all__ = ["ARCHITECTURES", "INT8_LINEARS", "HybridModel", "MtpHead", "describe"]

_MTP = "mtp"
_VISION = "model.visual"


def describe(config: Mapping[str, object], dtype: str, prefix: str) -> Description:
    """What the config tells; cache names start with `prefix`, entries have `dtype`.

    The draft head is described if the config promises one. A checkpoint may lack it all the same,
    or have one unpromised; the description of the loaded model goes by its tensors.
    """
    known = read_config(config)
    return _describe(known, dtype, prefix, known.promises_mtp)


def _describe(config: HybridConfig, dtype: str, prefix: str, mtp: bool) -> Description:
    return Description(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        parameters=config.parameters(mtp),
        layers=config.kinds,
        caches=_caches(config, dtype, prefix),
        draft_head=_MTP if mtp else None,
        draft_caches=(_key_cache(config, dtype, _mtp_cache(prefix), 1),) if mtp else (),
        hidden_shape=(config.hidden,),
        linears=config.linears(mtp),
    )


def _caches(config: HybridConfig, dtype: str, prefix: str) -> tuple[CacheSpec, ...]:
    caches: list[CacheSpec] = []
    full = config.kinds.count(FULL)
    if full:
        caches.append(_key_cache(config, dtype, prefix + "kv", full))
    if recurrent := len(config.kinds) - full:
        caches.extend(config.delta.caches(recurrent, dtype, prefix))
    return tuple(caches)


def _key_cache(config: HybridConfig, dtype: str, name: str, layers: int) -> Paged:
    shape = (config.attention.key_heads, config.attention.size)
    return Paged(name, layers, (Part("k", shape, dtype), Part("v", shape, dtype)))


def _mtp_cache(prefix: str) -> str:
    return prefix + "mtp.kv"


@dataclass(frozen=True)
class Layer:
    """A mixer and a feed-forward, each behind a norm and added to the stream."""

    mixer: GatedAttention | DeltaMixer
    norm: Tensor
    feed: Feed

    def __call__(self, stream: Tensor, angles: Angles, batch: Batch, pools: Pools) -> Tensor:
        """Map the stream [T, hidden] to the stream after this layer."""
        mixer = self.mixer
        if isinstance(mixer, DeltaMixer):
            stream = mixer(stream, batch, pools)
        else:
            stream = mixer(stream, angles, batch, pools)
        return self.feed(mixer.backend.rms_norm(stream, self.norm, mixer.eps), stream, batch)


@dataclass(frozen=True)
class Ends:
    """What the model and its draft head share: embedding, final norm, head, rotary angles.

    `tied` says whether the embedding is the head's weight.
    """

    embedding: Tensor
    norm: Tensor
    head: Linear
    tied: bool
    rotary: AnglesAt
    eps: float
    backend: Backend

    def angles(self, batch: Batch) -> Angles:
        """Of the step's tokens."""
        return self.rotary(batch.positions)

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm of hidden states [T, hidden]."""
        return self.backend.rms_norm(hidden, self.norm, self.eps)


class MtpHead:
    """One attention layer that reads the next token and the model's state before it."""

    def __init__(self, tensors: HybridTensors, ends: Ends) -> None:
        """Take all tensors of the head; it shares the model's `ends`."""
        self._ends = ends
        hidden, name = tensors.config.hidden, f"{_MTP}.layers.0."
        token_norm = tensors.norm(_MTP + ".pre_fc_norm_embedding.weight", hidden)
        hidden_norm = tensors.norm(_MTP + ".pre_fc_norm_hidden.weight", hidden)
        self._norms = torch.stack((token_norm, hidden_norm))
        self._norm = tensors.norm(_MTP + ".norm.weight", hidden)
        self._join = tensors.packed(tensors.weight(_MTP + ".fc", hidden, 2 * hidden))
        attention = tensors.attention(name, KeyCache(_mtp_cache(tensors.prefix), 0))
        self._writer: KeyWriter = tensors.key_writer(name, attention)
        norm = tensors.norm(name + "post_attention_layernorm.weight", hidden)
        feed = tensors.feed(name + "mlp.", tensors.config.mtp_feed)
        self._layer = Layer(attention, norm, feed)

    @property
    def deepens(self) -> bool:
        """See DraftHead: every pass is alike."""
        return False

    def enter(self, hidden: Tensor) -> Tensor:
        """See DraftHead: the model's final norm."""
        return self._ends.normed(hidden)

    def catch_up(self, batch: Batch, hidden: Tensor, pools: Pools) -> None:
        """See DraftHead."""
        self._writer(self._joined(batch, hidden), self._ends.angles(batch), batch, pools)

    def forward(self, batch: Batch, hidden: Tensor, pools: Pools) -> Tensor:
        """See DraftHead; what comes out has been through the head's own norm."""
        angles = self._ends.angles(batch)
        stream = self._layer(self._joined(batch, hidden), angles, batch, pools)
        return self._ends.backend.rms_norm(stream, self._norm, self._ends.eps)

    def deepen(self, batch: Batch, hidden: Tensor, pools: Pools) -> Tensor:
        """See DraftHead."""
        return self.forward(batch, hidden, pools)

    def logits(self, hidden: Tensor) -> Tensor:
        """See DraftHead."""
        return self._ends.head(hidden).float()

    def _joined(self, batch: Batch, hidden: Tensor) -> Tensor:
        """[T, hidden] of each token's embedding and the state before it."""
        ends = self._ends
        return self._join(
            ends.backend.join_tokens(batch.tokens, ends.embedding, hidden, self._norms, ends.eps)
        )


class HybridModel:
    """A loaded model of the family."""

    def __init__(
        self, take: TensorTaker, config: Mapping[str, object], backend: Backend, prefix: str
    ) -> None:
        """Take all tensors of the checkpoint's text model and pack them for `backend`.

        Args:
            take: where tensors come from; also says their element type.
            config: the checkpoint's config.json.
            backend: where the model will run.
            prefix: put before the names of its caches.
        """
        tensors = HybridTensors(take, read_config(config), backend, prefix)
        take.skip(_VISION)
        self._ends = _take_ends(tensors)
        self.config = replace(tensors.config, tied=self._ends.tied)
        self._layers = _take_layers(tensors)
        self._prefix = prefix
        self._recurrent = any(isinstance(layer.mixer, DeltaMixer) for layer in self._layers)
        has_mtp = take.has_module(_MTP)
        self._draft_head = MtpHead(tensors, self._ends) if has_mtp else None
        dtype = str(take.dtype).removeprefix("torch.")
        self.description = _describe(self.config, dtype, prefix, has_mtp)

    @property
    def draft_head(self) -> DraftHead | None:
        """See Model: there if the checkpoint has its tensors."""
        return self._draft_head

    def fold(self, folds: Sequence[Fold], pools: Pools) -> None:
        """See Model."""
        if self._recurrent:
            fold_layers(self._prefix, folds, pools, self._ends.backend)

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        """See Model."""
        stream = self._ends.backend.pick_rows(self._ends.embedding, batch.tokens)
        angles = self._ends.angles(batch)
        for layer in self._layers:
            stream = layer(stream, angles, batch, pools)
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model."""
        return self._ends.head(self._ends.normed(hidden)).float()


def _take_ends(tensors: HybridTensors) -> Ends:
    config, backend, take = tensors.config, tensors.backend, tensors.take
    table = tensors.trunk + "embed_tokens.weight"
    embedding = take.take(table, (config.vocab_size, config.hidden))
    head, tied = take_head(take, table, embedding, config.tied)
    sizes = config.attention
    return Ends(
        embedding=embedding.to(backend.device),
        norm=tensors.norm(tensors.trunk + "norm.weight", config.hidden),
        head=backend.pack_linear(head, None),
        tied=tied,
        rotary=make_partial_rotary(sizes.size, sizes.rotated, config.theta, config.scaling).on(
            tensors.backend
        ),
        eps=config.eps,
        backend=backend,
    )


def _take_layers(tensors: HybridTensors) -> list[Layer]:
    config, layers, counts = tensors.config, [], dict.fromkeys(tensors.config.kinds, 0)
    for index, kind in enumerate(config.kinds):
        name = f"{tensors.trunk}layers.{index}."
        place = counts[kind]
        counts[kind] += 1
        mixer: GatedAttention | DeltaMixer
        if kind == FULL:
            mixer = tensors.attention(name, KeyCache(tensors.prefix + "kv", place))
        else:
            mixer = tensors.delta(name, place)
        norm = tensors.norm(name + "post_attention_layernorm.weight", config.hidden)
        layers.append(Layer(mixer, norm, tensors.feed(name + "mlp.", config.feeds[index])))
    return layers
