"""DeepSeek V4 and its draft head.

    embedding -> n streams -> layers: attention, experts -> one stream -> norm -> head

Every layer looks back over a window; sparse layers also at the entries of 4 tokens each that an
indexer chooses, heavy layers at all entries of 128 tokens each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from surefoot.backend.operands import Fold
from surefoot.backend.protocol import Backend, Linear
from surefoot.model.deepseek_v4_config import (
    ARCHITECTURES,
    BIASED,
    HEAVY,
    SPARSE,
    WINDOW,
    LatentConfig,
    read_config,
)
from surefoot.model.deepseek_v4_weights import INT8_LINEARS, LatentTensors
from surefoot.model.layers.hyper import HyperConnection, StreamHead
from surefoot.model.layers.latent import (
    Compressor,
    LatentAttention,
    LatentCaches,
    StepAngles,
)
from surefoot.model.layers.rotary import AnglesAt, make_partial_rotary
from surefoot.model.layers.routed import RoutedFeed
from surefoot.model.model import Description, DraftHead
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec, Held, Paged, Part, Ring
from surefoot.step import Batch
from surefoot.weights.load import TensorTaker

__all__ = ["ARCHITECTURES", "INT8_LINEARS", "LatentModel", "MtpHead", "describe"]

_MTP = "mtp"


def describe(config: Mapping[str, object], dtype: str, prefix: str) -> Description:
    """What the config tells; cache names start with `prefix`, entries have `dtype`."""
    known = read_config(config)
    return _describe(known, dtype, prefix, known.promises_mtp)


def _describe(config: LatentConfig, dtype: str, prefix: str, mtp: bool) -> Description:
    return Description(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        parameters=config.parameters(mtp),
        layers=config.kinds,
        caches=_caches(config, dtype, prefix),
        draft_head=_MTP if mtp else None,
        draft_caches=(_window(config, dtype, _mtp_cache(prefix), 1),) if mtp else (),
        hidden_shape=(config.streams.count, config.hidden),
        linears=config.linears(mtp),
    )


def _caches(config: LatentConfig, dtype: str, prefix: str) -> tuple[CacheSpec, ...]:
    caches: list[CacheSpec] = [_window(config, dtype, prefix + WINDOW, len(config.kinds))]
    for kind in (SPARSE, HEAVY):
        layers, compressor = config.kinds.count(kind), config.compressor(kind)
        if not layers or compressor is None:
            continue
        sizes = {"kv": config.attention.size}
        if kind == SPARSE:
            sizes["index"] = config.indexer.size
        entries = tuple(Part(name, (size,), dtype) for name, size in sizes.items())
        raw = tuple(
            Part(name, (2 * compressor.width(size),), "float32") for name, size in sizes.items()
        )
        held = _held_raw(sizes, compressor)
        caches.append(Paged(prefix + kind, layers, entries, compressor.ratio))
        caches.append(Ring(f"{prefix}{kind}.raw", layers, raw, compressor.window, held))
    return tuple(caches)


def _held_raw(sizes: Mapping[str, int], compressor: Compressor) -> Held | None:
    """A page ends with a window. Where windows overlap, the next entry reads the last one too.

    A raw row then has 2 size values and as many scores; of both it reads the first half.
    """
    if not compressor.overlapped:
        return None
    spans = {name: ((0, size), (2 * size, 3 * size)) for name, size in sizes.items()}
    return Held(compressor.ratio, spans)


def _window(config: LatentConfig, dtype: str, name: str, layers: int) -> Ring:
    part, window = Part("kv", (config.attention.size,), dtype), config.attention.window
    # A token sees itself in its window, so the one behind a page needs one position less of it.
    return Ring(name, layers, (part,), window, Held(window - 1))


def _mtp_cache(prefix: str) -> str:
    return prefix + "mtp.window"


@dataclass(frozen=True)
class Block:
    """Attention and experts, each with its hyper-connection."""

    kind: str
    around_attention: HyperConnection
    attention: LatentAttention
    around_feed: HyperConnection
    feed: RoutedFeed

    def __call__(self, streams: Tensor, angles: StepAngles, batch: Batch, pools: Pools) -> Tensor:
        """Map the streams [T, n, hidden] to the streams after this layer."""
        x, *rest = self.around_attention.read(streams)
        out = self.attention(x, angles, batch, pools)
        streams = self.around_attention.write(streams, out, *rest)
        x, *rest = self.around_feed.read(streams)
        return self.around_feed.write(streams, self.feed(x, batch), *rest)

    def write(self, streams: Tensor, angles: StepAngles, batch: Batch, pools: Pools) -> None:
        """Write the window's entries of the streams and nothing else."""
        x, *_ = self.around_attention.read(streams)
        self.attention.write(x, angles, batch, pools)


@dataclass(frozen=True)
class RotaryKinds:
    """Rotary angles by kind of layer; heads of the indexer have frequencies of their own size."""

    config: LatentConfig
    plain: AnglesAt
    compressed: AnglesAt
    index: AnglesAt

    @staticmethod
    def make(config: LatentConfig, backend: Backend) -> RotaryKinds:
        """For all layers."""
        size, rotated = config.attention.size, config.attention.rotated
        scaling, theta = config.scaling, config.compressed_theta
        index = config.indexer.size if SPARSE in config.kinds else size
        return RotaryKinds(
            config,
            make_partial_rotary(size, rotated, config.theta, {}).on(backend),
            make_partial_rotary(size, rotated, theta, scaling).on(backend),
            make_partial_rotary(index, rotated, theta, scaling).on(backend),
        )

    def of(self, kind: str, positions: Tensor) -> StepAngles:
        """Of a step's tokens at positions [T]."""
        compressor = self.config.compressor(kind)
        if compressor is None:
            own = self.plain(positions)
            return StepAngles(own, own, own, own)
        begins = positions // compressor.ratio * compressor.ratio
        own, begin = (self.compressed(at) for at in (positions, begins))
        if kind != SPARSE:
            return StepAngles(own, begin, own, begin)
        index, index_begin = (self.index(at) for at in (positions, begins))
        return StepAngles(own, begin, index, index_begin)


@dataclass(frozen=True)
class Ends:
    """What the model and its draft head share."""

    embedding: Tensor
    head: Linear
    angles: RotaryKinds


class MtpHead:
    """One layer with a window that reads the next token and the model's streams before it."""

    def __init__(self, tensors: LatentTensors, ends: Ends, prefix: str) -> None:
        """Take all tensors of the head; it shares the model's `ends`."""
        hidden, name = tensors.config.hidden, _MTP + ".0."
        self._ends, self._eps, self._backend = ends, tensors.config.eps, tensors.backend
        self._token_norm = tensors.vector(name + "enorm.weight", hidden)
        self._stream_norm = tensors.vector(name + "hnorm.weight", hidden)
        self._from_token = tensors.linear(name + "e_proj", hidden, hidden)
        self._from_streams = tensors.linear(name + "h_proj", hidden, hidden)
        caches = LatentCaches(_mtp_cache(prefix), 0, "", 0)
        self._block = _take_block(tensors, name, WINDOW, BIASED, caches)
        self._join = tensors.stream_head(name + "hc_head.")
        self._norm = tensors.vector(name + "norm.weight", hidden)

    @property
    def deepens(self) -> bool:
        """See DraftHead: every pass is alike."""
        return False

    def enter(self, hidden: Tensor) -> Tensor:
        """See DraftHead: the streams as they are."""
        return hidden

    def catch_up(self, batch: Batch, hidden: Tensor, pools: Pools) -> None:
        """See DraftHead."""
        self._block.write(self._joined(batch, hidden), self._angles(batch), batch, pools)

    def forward(self, batch: Batch, hidden: Tensor, pools: Pools) -> Tensor:
        """See DraftHead."""
        return self._block(self._joined(batch, hidden), self._angles(batch), batch, pools)

    def deepen(self, batch: Batch, hidden: Tensor, pools: Pools) -> Tensor:
        """See DraftHead."""
        return self.forward(batch, hidden, pools)

    def logits(self, hidden: Tensor) -> Tensor:
        """See DraftHead."""
        normed = self._backend.rms_norm(self._join(hidden), self._norm, self._eps)
        return self._ends.head(normed).float()

    def _angles(self, batch: Batch) -> StepAngles:
        return self._ends.angles.of(WINDOW, batch.positions)

    def _joined(self, batch: Batch, hidden: Tensor) -> Tensor:
        """[T, n, hidden] of each token's embedding and the streams before it."""
        backend, eps = self._backend, self._eps
        token = backend.pick_rows(self._ends.embedding, batch.tokens)
        token = self._from_token(backend.rms_norm(token, self._token_norm, eps))
        flat = backend.rms_norm(hidden.flatten(0, 1), self._stream_norm, eps)
        return self._from_streams(flat).view(hidden.shape) + token[:, None]


class LatentModel:
    """A loaded model."""

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
        tensors = LatentTensors(take, self.config, backend)
        self._ends = _take_ends(tensors)
        self._blocks = _take_blocks(tensors, prefix)
        self._join: StreamHead = tensors.stream_head("model.hc_head.")
        self._norm = tensors.vector("model.norm.weight", self.config.hidden)
        self._backend = backend
        has_mtp = take.has_module(_MTP)
        self._draft_head = MtpHead(tensors, self._ends, prefix) if has_mtp else None
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
        token = self._backend.pick_rows(self._ends.embedding, batch.tokens)
        streams = token[:, None].expand(-1, self.config.streams.count, -1).contiguous()
        angles = {
            kind: self._ends.angles.of(kind, batch.positions) for kind in set(self.config.kinds)
        }
        for block in self._blocks:
            streams = block(streams, angles[block.kind], batch, pools)
        return streams

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model."""
        normed = self._backend.rms_norm(self._join(hidden), self._norm, self.config.eps)
        return self._ends.head(normed).float()


def _take_ends(tensors: LatentTensors) -> Ends:
    config = tensors.config
    table = (config.vocab_size, config.hidden)
    embedding = tensors.take.take("model.embed_tokens.weight", table)
    return Ends(
        embedding=embedding.to(tensors.backend.device),
        head=tensors.linear("lm_head", *table),
        angles=RotaryKinds.make(config, tensors.backend),
    )


def _take_blocks(tensors: LatentTensors, prefix: str) -> list[Block]:
    config, blocks, counts = tensors.config, [], dict.fromkeys(tensors.config.kinds, 0)
    for index, (kind, router) in enumerate(zip(config.kinds, config.routers, strict=True)):
        caches = LatentCaches(prefix + WINDOW, index, prefix + kind, counts[kind])
        counts[kind] += 1
        blocks.append(_take_block(tensors, f"model.layers.{index}.", kind, router, caches))
    return blocks


def _take_block(
    tensors: LatentTensors, name: str, kind: str, router: str, caches: LatentCaches
) -> Block:
    return Block(
        kind=kind,
        around_attention=tensors.connection(name + "attn_hc.", name + "input_layernorm.weight"),
        attention=tensors.attention(name + "self_attn.", kind, caches),
        around_feed=tensors.connection(name + "ffn_hc.", name + "post_attention_layernorm.weight"),
        feed=tensors.feed(name + "mlp.", router),
    )
