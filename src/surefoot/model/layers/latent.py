"""Attention over a window of latents and over compressed entries (DeepSeek V4).

    stream -> q [H, D] and one latent [D], key and value at once, which goes to the window's ring
           -> raw rows [2 width] to a ring; every `ratio` tokens an entry [D] to the pages
    q looks at its window, at entries and at a sink, in one softmax

Heads are stored so that rotated pairs lie half a head apart; see `trailing_order`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import Compression, Entries, Latents
from surefoot.backend.protocol import Backend, Linear
from surefoot.model.layers.attention import Angles
from surefoot.model.layers.finite import finite_drafts
from surefoot.state.pool import Pools
from surefoot.step import Batch
from surefoot.weights.counts import Linears


@dataclass(frozen=True)
class LatentSizes:
    """Heads and widths.

    Attributes:
        heads: query heads, H.
        size: numbers of a head and of a latent, D.
        rotated: how many of them, the last ones, turn with the position.
        query_rank: width between the two products of queries.
        groups: heads go out in so many groups.
        output_rank: width of a group between the two products of outputs.
        window: positions each token sees, its own included.
    """

    heads: int
    size: int
    rotated: int
    query_rank: int
    groups: int
    output_rank: int
    window: int

    def parameters(self, hidden: int) -> int:
        """How many numbers the weights are, compressor and indexer aside."""
        wide = self.heads * self.size
        queries = self.query_rank * (hidden + 1 + wide)
        outputs = self.output_rank * (wide + self.groups * hidden)
        return queries + outputs + self.size * (hidden + 1) + self.heads

    def linears(self, hidden: int) -> Linears:
        """What W8A8 makes int8, the indexer aside."""
        wide, low = self.heads * self.size, self.groups * self.output_rank
        inward = Linears.of(hidden, self.query_rank, self.size) + Linears.of(self.query_rank, wide)
        return inward + Linears.of(wide // self.groups, low) + Linears.of(low, hidden)


@dataclass(frozen=True)
class Compressor:
    """How many tokens make an entry, and whether it reads the window before its own too."""

    ratio: int
    overlapped: bool

    def width(self, size: int) -> int:
        """Values of a raw row for entries of `size`; there are as many scores."""
        return size * (2 if self.overlapped else 1)

    @property
    def window(self) -> int:
        """Positions up to a token whose raw rows an entry may need, its own included."""
        return self.ratio * (2 if self.overlapped else 1)

    def parameters(self, hidden: int, size: int) -> int:
        """How many numbers the weights are for entries of `size`."""
        return self.width(size) * (2 * hidden + self.ratio) + size


@dataclass(frozen=True)
class IndexerSizes:
    """Of what chooses entries.

    Attributes:
        heads: query heads.
        size: numbers of a head and of a key.
        chosen: most entries that a token looks at.
    """

    heads: int
    size: int
    chosen: int

    def parameters(self, hidden: int, query_rank: int) -> int:
        """How many numbers the weights are, the keys' compressor aside."""
        return self.heads * (self.size * query_rank + hidden)

    def linears(self, query_rank: int) -> Linears:
        """What W8A8 makes int8: not the heads' weights."""
        return Linears.of(query_rank, self.heads * self.size)


def trailing_order(size: int, rotated: int) -> Tensor:
    """Order of a head's numbers that makes neighbours among its last `rotated` numbers halves.

    The backend turns number i with number i + size / 2, where the pairs that turn come first. All
    that meets a head is ordered alike, so no product changes.

    Returns:
        [size] int64, for each new place the old one.
    """
    still, half = size - rotated, (size - rotated) // 2
    places = torch.arange(size)
    even, odd = places[still::2], places[still + 1 :: 2]
    return torch.cat((even, places[:half], odd, places[half:still]))


@dataclass(frozen=True)
class RawRows:
    """Makes and keeps the raw rows of entries of one kind, and the entries.

    Attributes:
        form: sizes.
        product: values, then scores, of one token.
        bias: [ratio, 2 width] float32, zero for values: what is added by place in the window.
        norm: [size] weights of the norm of entries.
        eps: of the norm.
        backend: computes.
    """

    form: Compressor
    product: Linear
    bias: Tensor
    norm: Tensor
    eps: float
    backend: Backend

    def __call__(
        self, x: Tensor, angles: Angles, batch: Batch, caches: tuple[Tensor, Tensor]
    ) -> None:
        """Write raw rows of x [T, hidden] to a ring, and entries that they complete to a pool."""
        ring, pool = caches
        ratio = self.form.ratio
        raw = self.product(x.float()) + self.bias[batch.positions % ratio]
        raw = finite_drafts(raw, batch.tentative, self.backend)
        form = Compression(ratio, self.form.overlapped, self.norm, self.eps, *angles)
        batch.rows.compress(raw, ring, pool, form)
        batch.rows.ring_write(ring, raw)


@dataclass(frozen=True)
class Indexer:
    """Chooses entries.

    Attributes:
        sizes: of the heads.
        queries: from the low-rank queries.
        weights: of the heads, from the layer's input.
        keys: makes the entries' keys.
        backend: computes.
    """

    sizes: IndexerSizes
    queries: Linear
    weights: Linear
    keys: RawRows
    backend: Backend

    def __call__(
        self, x: Tensor, low: Tensor, angles: Angles, batch: Batch, pool: Tensor
    ) -> Tensor:
        """Entries [T, chosen] for x [T, hidden] and its low-rank queries [T, rank]."""
        sizes = self.sizes
        q = self.queries(low).view(x.shape[0], sizes.heads, sizes.size)
        q = self.backend.rotary(q, *angles)
        weights = self.weights(x).float() * (sizes.heads * sizes.size) ** -0.5
        ratio = self.keys.form.ratio
        return batch.rows.choose_entries(q, weights, pool, ratio, sizes.chosen)


@dataclass(frozen=True)
class StepAngles:
    """Rotary angles of a step for one kind of layer.

    Attributes:
        own: at the tokens' positions.
        begin: at the first position of their windows; `own` where nothing is compressed.
        index: as `own`, for heads of the indexer's size.
        index_begin: as `begin`, for heads of the indexer's size.
    """

    own: Angles
    begin: Angles
    index: Angles
    index_begin: Angles


@dataclass(frozen=True)
class LatentCaches:
    """Where one layer keeps what it keeps: names of caches, and its place in each.

    Attributes:
        window: ring of latents.
        window_layer: place in it.
        compressed: pages of entries; the ring of raw rows has the same name with `.raw` behind.
        layer: place in both.
    """

    window: str
    window_layer: int
    compressed: str
    layer: int

    def ring(self, pools: Pools) -> Tensor:
        """The ring of latents [slots, capacity, D]."""
        return pools.layers(self.window, "kv")[self.window_layer]

    def entries(self, part: str, pools: Pools) -> tuple[Tensor, Tensor]:
        """Ring of raw rows and pool of entries of one part."""
        ring = pools.layers(self.compressed + ".raw", part)[self.layer]
        return ring, pools.layers(self.compressed, part)[self.layer]


@dataclass(frozen=True)
class LatentAttention:
    """One layer's attention.

    Attributes:
        sizes: of the heads.
        eps: of all norms.
        low: low-rank queries and the latent in one product.
        low_norm: [query_rank] weights.
        queries: from the low-rank queries to all heads.
        head_norm: [size] ones, as heads are normed without weights.
        latent_norm: [size] weights.
        raw: makes entries, or None in a layer that sees its window only.
        indexer: chooses among them, or None where all are seen.
        sinks: [heads] float32.
        groups: the first product of the outputs, group by group.
        output: the second.
        caches: where things go.
        backend: computes.
    """

    sizes: LatentSizes
    eps: float
    low: Linear
    low_norm: Tensor
    queries: Linear
    head_norm: Tensor
    latent_norm: Tensor
    raw: RawRows | None
    indexer: Indexer | None
    sinks: Tensor
    groups: tuple[Linear, ...]
    output: Linear
    caches: LatentCaches
    backend: Backend

    def __call__(self, x: Tensor, angles: StepAngles, batch: Batch, pools: Pools) -> Tensor:
        """Map the layer's input [T, hidden] to [T, hidden]."""
        sizes, backend = self.sizes, self.backend
        low, latent = self._low(x, angles, batch)
        q = self.queries(low).view(-1, sizes.heads, sizes.size)
        q = backend.rotary(backend.rms_norm(q, self.head_norm, self.eps), *angles.own)
        entries = self._entries(x, low, angles, batch, pools)
        ring = self.caches.ring(pools)
        latents, scale = Latents(latent, ring, sizes.window), sizes.size**-0.5
        mixed = batch.rows.attend_latents(q, latents, entries, self.sinks, scale)
        batch.rows.ring_write(ring, latent)
        cos, sin = angles.own
        wide = sizes.heads // sizes.groups * sizes.size
        mixed = backend.rotary(mixed, cos, -sin).view(-1, sizes.groups, wide)
        parts = [group(mixed[:, g]) for g, group in enumerate(self.groups)]
        return self.output(torch.cat(parts, dim=1))

    def write(self, x: Tensor, angles: StepAngles, batch: Batch, pools: Pools) -> None:
        """Write the latents of x [T, hidden] to the window's ring, and nothing else."""
        _, latent = self._low(x, angles, batch)
        batch.rows.ring_write(self.caches.ring(pools), latent)

    def _low(self, x: Tensor, angles: StepAngles, batch: Batch) -> tuple[Tensor, Tensor]:
        """Low-rank queries [T, rank] and latents [T, size]."""
        sizes, backend = self.sizes, self.backend
        low, latent = self.low(x).split((sizes.query_rank, sizes.size), dim=1)
        latent = backend.rms_norm(latent.contiguous(), self.latent_norm, self.eps)
        latent = backend.rotary(latent[:, None], *angles.own)[:, 0]
        latent = finite_drafts(latent, batch.tentative, backend)
        return backend.rms_norm(low.contiguous(), self.low_norm, self.eps), latent

    def _entries(
        self, x: Tensor, low: Tensor, angles: StepAngles, batch: Batch, pools: Pools
    ) -> Entries | None:
        if self.raw is None:
            return None
        caches = self.caches.entries("kv", pools)
        self.raw(x, angles.begin, batch, caches)
        chosen = None
        if self.indexer is not None:
            keys = self.caches.entries("index", pools)
            self.indexer.keys(x, angles.index_begin, batch, keys)
            chosen = self.indexer(x, low, angles.index, batch, keys[1])
        return Entries(caches[1], self.raw.form.ratio, chosen)
