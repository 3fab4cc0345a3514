"""Attention over chosen positions of a latent cache (multi-head latent attention with an indexer).

    x -> low-rank queries -> heads: a plain part, which is mapped to the latents' space, and a part
                             that turns with the position
      -> one latent [R] and one turned key [dr] for all heads, which go to the pages
      -> one index key, which goes to the pages too, and weights of the indexer's heads

    the indexer scores all positions; heads attend to the best of them
    values come out of the latents' space head by head

A layer without an indexer looks where the layer before has looked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import LatentPages
from surefoot.backend.protocol import Backend, Linear
from surefoot.model.layers.attention import Angles, paired_order
from surefoot.model.layers.finite import finite_drafts
from surefoot.state.pool import Pools
from surefoot.step import Batch
from surefoot.weights.counts import Linears

LATENT_EPS = 1e-6
"""Of the norms inside attention, whatever the config says of the others."""


@dataclass(frozen=True)
class ChosenSizes:
    """Heads and widths.

    Attributes:
        heads: query heads, H.
        plain: numbers of a head that do not turn.
        turned: numbers of a head that turn with the position, dr.
        value: numbers of a head's value.
        query_rank: width between the two products of queries.
        rank: numbers of a latent, R.
        sharpened: factor on the scores besides that of a head's size.
    """

    heads: int
    plain: int
    turned: int
    value: int
    query_rank: int
    rank: int
    sharpened: float

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float((self.plain + self.turned) ** -0.5 * self.sharpened)

    def parameters(self, hidden: int) -> int:
        """How many numbers the weights are, the indexer aside."""
        queries = self.query_rank * (hidden + 1 + self.heads * (self.plain + self.turned))
        latents = (self.rank + self.turned) * hidden + self.rank
        spread = self.heads * (self.plain + self.value) * self.rank
        return queries + latents + spread + self.heads * self.value * hidden

    def linears(self, hidden: int) -> Linears:
        """What W8A8 makes int8, the indexer aside."""
        inward = Linears.of(hidden, self.query_rank, self.rank + self.turned)
        queries = Linears.of(self.query_rank, self.heads * (self.plain + self.turned))
        return inward + queries + Linears.of(self.heads * self.value, hidden)


@dataclass(frozen=True)
class IndexSizes:
    """Of what chooses positions.

    Attributes:
        heads: query heads.
        size: numbers of a head and of a key.
        chosen: most positions that a token looks at.
        neighbours: neighbouring numbers turn as pairs, rather than numbers half a part away.
    """

    heads: int
    size: int
    chosen: int
    neighbours: bool

    def parameters(self, hidden: int, query_rank: int) -> int:
        """How many numbers the weights are."""
        return self.heads * (self.size * query_rank + hidden) + self.size * (hidden + 2)

    def linears(self, query_rank: int) -> Linears:
        """What W8A8 makes int8: the queries."""
        return Linears.of(query_rank, self.heads * self.size)

    def order(self, turned: int) -> Tensor:
        """Order of a head's numbers that makes the backend's rotation that of its first ones.

        Returns:
            [size] int64, for each new place the old one.
        """
        order = paired_order(self.size, turned)
        if self.neighbours:
            places = torch.arange(self.size)
            places[:turned] = halves_of_pairs(turned)
            order = places[order]
        return order


def halves_of_pairs(size: int) -> Tensor:
    """Order that makes neighbours halves: [size] int64, for each new place the old one."""
    return torch.arange(size).view(-1, 2).t().flatten()


@dataclass(frozen=True)
class PerHead:
    """A linear for each head."""

    linears: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, H, inputs] to [T, H, outputs]."""
        return torch.stack([linear(x[:, h]) for h, linear in enumerate(self.linears)], dim=1)


@dataclass(frozen=True)
class ChosenCaches:
    """Where one layer keeps what it keeps: names of caches, and its place in each.

    Attributes:
        latents: pages of latents and turned keys.
        layer: place among them.
        index: pages of index keys.
        index_layer: place among them.
    """

    latents: str
    layer: int
    index: str
    index_layer: int

    def keys(self, pools: Pools) -> LatentPages:
        """What attention reads."""
        values, turned = (
            pools.layers(self.latents, part)[self.layer] for part in ("values", "turned")
        )
        return LatentPages(values, turned)

    def index_keys(self, pools: Pools) -> Tensor:
        """What the indexer reads: [pages, P, size]."""
        return pools.layers(self.index, "index")[self.index_layer]


@dataclass(frozen=True)
class Indexer:
    """Chooses positions.

    Attributes:
        sizes: of the heads.
        queries: from the low-rank queries.
        keys: from the layer's input.
        weights: of the heads, from the layer's input, in float32.
        norm: [size] float32 weights of the norm of keys.
        bias: [size] float32, added to normed keys.
        backend: computes.
    """

    sizes: IndexSizes
    queries: Linear
    keys: Linear
    weights: Linear
    norm: Tensor
    bias: Tensor
    backend: Backend

    def write(self, x: Tensor, angles: Angles, batch: Batch, pool: Tensor) -> None:
        """Write the keys of x [T, hidden]; a key is normed about its mean."""
        key = self.keys(x).float()
        key = key - key.mean(dim=1, keepdim=True)
        key = self.backend.rms_norm(key, self.norm, LATENT_EPS) + self.bias
        key = self.backend.rotary(key[:, None], *angles)[:, 0].to(pool.dtype)
        batch.rows.paged_write(pool, finite_drafts(key, batch.tentative, self.backend))

    def __call__(
        self, x: Tensor, low: Tensor, angles: Angles, batch: Batch, pool: Tensor
    ) -> Tensor:
        """Positions [T, chosen] for x [T, hidden] and its low-rank queries [T, rank]."""
        sizes = self.sizes
        q = self.queries(low).view(-1, sizes.heads, sizes.size)
        q = self.backend.rotary(q, *angles)
        weights = self.weights(x.float()) * (sizes.heads * sizes.size) ** -0.5
        return batch.rows.choose_entries(q, weights, pool, 1, sizes.chosen)


@dataclass(frozen=True)
class StepAngles:
    """Rotary angles of a step's tokens: for heads of attention and for those of the indexer."""

    own: Angles
    index: Angles


@dataclass(frozen=True)
class ChosenAttention:
    """One layer's attention.

    Attributes:
        sizes: of the heads.
        eps: of the norm before.
        norm: [hidden] weights of the norm before.
        low: low-rank queries, the latent and the turned key in one product.
        low_norm: [query_rank] weights.
        latent_norm: [rank] weights.
        queries: from the low-rank queries to all heads; a head's plain part, then the turned one.
        enter: from a head's plain part to the latents' space.
        leave: from there to a head's value.
        output: back to the stream.
        indexer: chooses positions, or None where those of the layer before are taken.
        caches: where things go.
        backend: computes.
    """

    sizes: ChosenSizes
    eps: float
    norm: Tensor
    low: Linear
    low_norm: Tensor
    latent_norm: Tensor
    queries: Linear
    enter: PerHead
    leave: PerHead
    output: Linear
    indexer: Indexer | None
    caches: ChosenCaches
    backend: Backend

    def __call__(
        self,
        stream: Tensor,
        angles: StepAngles,
        batch: Batch,
        pools: Pools,
        chosen: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Map the stream [T, hidden] to the stream after attention.

        Args:
            stream: goes in.
            angles: of the tokens.
            batch: the step.
            pools: the caches.
            chosen: [T, n] positions to look at; None to choose them here, as a layer with an
                indexer can.

        Returns:
            The stream after attention, and the positions that were looked at.
        """
        x = self.backend.rms_norm(stream, self.norm, self.eps)
        low = self._write(x, angles, batch, pools)
        if chosen is None:
            assert self.indexer is not None, "the first layer has an indexer"
            pool = self.caches.index_keys(pools)
            self.indexer.write(x, angles.index, batch, pool)
            chosen = self.indexer(x, low, angles.index, batch, pool)
        sizes = self.sizes
        heads = self.queries(low).view(-1, sizes.heads, sizes.plain + sizes.turned)
        plain, turned = heads.split((sizes.plain, sizes.turned), dim=2)
        turned = self.backend.rotary(turned, *angles.own)
        keys = self.caches.keys(pools)
        mixed = batch.rows.attend_chosen(self.enter(plain), turned, keys, chosen, sizes.scale)
        return self.output.add(self.leave(mixed).flatten(1), stream), chosen

    def write(self, stream: Tensor, angles: StepAngles, batch: Batch, pools: Pools) -> None:
        """Write the entries of the stream [T, hidden], and nothing else."""
        x = self.backend.rms_norm(stream, self.norm, self.eps)
        self._write(x, angles, batch, pools)
        if self.indexer is not None:
            self.indexer.write(x, angles.index, batch, self.caches.index_keys(pools))

    def _write(self, x: Tensor, angles: StepAngles, batch: Batch, pools: Pools) -> Tensor:
        """Write latents and turned keys of x [T, hidden]; returns low-rank queries [T, rank]."""
        sizes, backend = self.sizes, self.backend
        parts = (sizes.query_rank, sizes.rank, sizes.turned)
        low, latent, turned = self.low(x).split(parts, dim=1)
        latent = backend.rms_norm(latent.contiguous(), self.latent_norm, LATENT_EPS)
        turned = backend.rotary(turned[:, None], *angles.own)[:, 0]
        keys = self.caches.keys(pools)
        for pool, entries in ((keys.values, latent), (keys.turned, turned)):
            batch.rows.paged_write(pool, finite_drafts(entries, batch.tentative, backend))
        return backend.rms_norm(low.contiguous(), self.low_norm, LATENT_EPS)
