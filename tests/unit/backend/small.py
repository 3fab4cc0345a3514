"""Attention alone, as something that the machine of `cuts` can compute."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.state.pool import Pools
from surefoot.state.spec import Held, Paged, Part, Ring
from surefoot.step import Batch

VOCAB = 50


@dataclass(frozen=True)
class Vectors:
    """Queries, keys and values by token id: [VOCAB, heads, D] each."""

    q: Tensor
    k: Tensor
    v: Tensor

    @staticmethod
    def of(seed: int, heads: tuple[int, int], size: int) -> Vectors:
        """Random vectors for (query heads, key heads)."""
        draws = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(VOCAB, count, size, generator=draws)
            for count in (heads[0], heads[1], heads[1])
        )
        return Vectors(q, k, v)

    @property
    def parts(self) -> tuple[Part, Part]:
        shape = (self.k.shape[1], self.k.shape[2])
        return Part("k", shape, "float32"), Part("v", shape, "float32")

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[2])


@dataclass(frozen=True)
class PagedAttention:
    """One layer of attention over pages."""

    vectors: Vectors

    @property
    def caches(self) -> tuple[Paged]:
        return (Paged("kv", 1, self.vectors.parts),)

    def compute(self, batch: Batch, pools: Pools) -> Tensor:
        k_pool, v_pool = (pools.paged("kv", part)[0] for part in ("k", "v"))
        batch.rows.paged_write(k_pool, self.vectors.k[batch.tokens])
        batch.rows.paged_write(v_pool, self.vectors.v[batch.tokens])
        q = self.vectors.q[batch.tokens]
        return batch.rows.paged_attention(q, k_pool, v_pool, self.vectors.scale)


@dataclass(frozen=True)
class WindowAttention:
    """One layer of attention over a window, on rings as `ring` lays them out."""

    vectors: Vectors
    ring: Ring

    @property
    def caches(self) -> tuple[Ring]:
        return (self.ring,)

    def compute(self, batch: Batch, pools: Pools) -> Tensor:
        rings = pools.rows("window", "k")[0], pools.rows("window", "v")[0]
        kv = self.vectors.k[batch.tokens], self.vectors.v[batch.tokens]
        q = self.vectors.q[batch.tokens]
        window = self.ring.window
        out = batch.rows.window_attention(q, kv, rings, window, self.vectors.scale)
        for ring, entries in zip(rings, kv, strict=True):
            batch.rows.ring_write(ring, entries)
        return out


def window_attention(vectors: Vectors, window: int) -> WindowAttention:
    return WindowAttention(vectors, Ring("window", 1, vectors.parts, window, Held(window)))
