"""Grouped-query attention whose output passes a gate, with heads that are rotated in part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import Placing
from surefoot.backend.protocol import Backend, Linear
from surefoot.model.layers.finite import finite_drafts
from surefoot.state.pool import Pools
from surefoot.step import Batch
from surefoot.weights.counts import Linears

Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AttentionSizes:
    """Heads of an attention layer.

    Attributes:
        heads: query heads, each with a gate of its own.
        key_heads: key and value heads.
        size: numbers of a head.
        rotated: how many of them, the first ones, turn with the position.
    """

    heads: int
    key_heads: int
    size: int
    rotated: int

    @property
    def joint(self) -> tuple[int, int, int]:
        """Heads of queries and keys, of values, of gates: the order of the joint product."""
        return self.heads + self.key_heads, self.key_heads, self.heads

    def parameters(self, hidden: int) -> int:
        """How many numbers the weights are."""
        return (3 * self.heads + 2 * self.key_heads) * self.size * hidden + 2 * self.size

    def linears(self, hidden: int) -> Linears:
        """What W8A8 makes int8."""
        wide, keys = self.heads * self.size, self.key_heads * self.size
        return Linears.of(hidden, 2 * wide, keys, keys) + Linears.of(wide, hidden)


@dataclass(frozen=True)
class KeyCache:
    """Where one layer keeps keys and values: a `Paged` cache with the parts k and v."""

    name: str
    layer: int

    def pools(self, pools: Pools) -> tuple[Tensor, Tensor]:
        """Key pool and value pool."""
        k, v = (pools.layers(self.name, part)[self.layer] for part in ("k", "v"))
        return k, v

    def write(self, k: Tensor, v: Tensor, batch: Batch, pools: Pools) -> None:
        """Store the step's keys and values, each [T, key_heads, size]."""
        for pool, entries in zip(self.pools(pools), (k, v), strict=True):
            batch.rows.paged_write(pool, entries)


def paired_order(size: int, rotated: int) -> Tensor:
    """Order of a head's numbers that makes a partial rotation one of the whole head.

    The backend turns number i with number i + size / 2. This order lays the pairs of the first
    `rotated` numbers there, and then those that pass through, whose angle is zero. Scores do not
    change when queries and keys are ordered alike.

    Returns:
        [size] int64, for each new place the old one.
    """
    half, passing = rotated // 2, (size - rotated) // 2
    places = torch.arange(size).split((half, half, passing, passing))
    return torch.cat((places[0], places[2], places[1], places[3]))


@dataclass(frozen=True)
class GatedAttention:
    """Attention over pages; each head's output is multiplied by the sigmoid of its gate.

    Attributes:
        sizes: of the heads.
        eps: of all norms.
        norm: [hidden] weight of the norm before.
        joint: queries, keys, values and gates in one product.
        norms: [heads + key_heads, size] weights of the norms on queries and keys.
        output: back to the stream.
        cache: where keys and values go.
        backend: computes.
    """

    sizes: AttentionSizes
    eps: float
    norm: Tensor
    joint: Linear
    norms: Tensor
    output: Linear
    cache: KeyCache
    backend: Backend

    def __call__(self, stream: Tensor, angles: Angles, batch: Batch, pools: Pools) -> Tensor:
        """Map the stream [T, hidden] to the stream after attention."""
        sizes, tokens = self.sizes, stream.shape[0]
        fused = self.joint(self.backend.rms_norm(stream, self.norm, self.eps))
        fused = finite_drafts(fused, batch.tentative, self.backend).view(tokens, -1, sizes.size)
        q_and_k, v, gate = fused.split(sizes.joint, dim=1)
        placing, scale = Placing(self.norms, self.eps, *angles), sizes.size**-0.5
        mixed = batch.rows.attend_pages(q_and_k, v, placing, self.cache.pools(pools), scale)
        mixed = self.backend.gate(mixed, gate).reshape(tokens, -1)
        return self.output.add(mixed, stream)


@dataclass(frozen=True)
class KeyWriter:
    """Writes the entries that a GatedAttention of the same cache would write, and nothing else.

    Attributes:
        sizes: of the heads.
        eps: of both norms.
        norm: [hidden] weight of the norm before.
        joint: keys and values in one product.
        norms: [key_heads, size] weights of the norm on keys.
        cache: where keys and values go.
        backend: computes.
    """

    sizes: AttentionSizes
    eps: float
    norm: Tensor
    joint: Linear
    norms: Tensor
    cache: KeyCache
    backend: Backend

    def __call__(self, stream: Tensor, angles: Angles, batch: Batch, pools: Pools) -> None:
        """Write the entries of the stream [T, hidden]."""
        fused = self.joint(self.backend.rms_norm(stream, self.norm, self.eps))
        fused = finite_drafts(fused, batch.tentative, self.backend)
        fused = fused.view(stream.shape[0], -1, self.sizes.size)
        k, v = fused.chunk(2, dim=1)
        k = self.backend.rotary(self.backend.rms_norm(k, self.norms, self.eps), *angles)
        self.cache.write(k, v, batch, pools)
