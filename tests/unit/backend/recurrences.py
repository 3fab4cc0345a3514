"""A recurrent layer, random steps for it, and a machine that settles what its drafts become."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surefoot.backend.operands import DeltaCaches, DeltaInputs, Fold
from surefoot.backend.protocol import Backend
from surefoot.ids import SlotId
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec, Held, Part, Recurrent, Ring
from surefoot.step import Batch, Row, Step
from tests.unit.backend.cuts import (
    Machine,
    Pad,
    Piece,
    Script,
    Setting,
    one_by_one,
    rejecting,
    sequences_of,
    shuffled,
    together,
    unpadded,
)

VOCAB = 50
TAPS = 4
NAN = float("nan")


@dataclass(frozen=True)
class Sizes:
    """Key heads, value heads, key size, value size, block."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    block: int = 16

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_size

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.value_heads * self.value_size

    @property
    def specs(self) -> tuple[Ring, Recurrent]:
        heads = (self.value_heads,)
        inputs = {
            "k": (self.key_heads, self.key_size),
            "value": (self.value_heads, self.value_size),
            "decay": heads,
            "beta": heads,
        }
        state = Part("state", (self.value_heads, self.key_size, self.value_size), "float32")
        parts = tuple(Part(name, shape, "float32") for name, shape in inputs.items())
        conv = Ring("conv", 1, (Part("x", (self.channels,), "float32"),), TAPS - 1, Held(TAPS - 1))
        return conv, Recurrent("delta", 1, (state,), parts, self.block)


def unit(x: Tensor) -> Tensor:
    """Each head with length 1, the sum written out in an order of its own."""
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def delta_caches(pools: Pools, block: int) -> DeltaCaches:
    state, k, error, decay, beta = (
        pools.rows("delta", name)[0] for name in ("state", "k", "value", "decay", "beta")
    )
    return DeltaCaches(state, k, error, decay, beta, block)


@dataclass(frozen=True)
class RecurrentLayer:
    """Convolution and gated delta rule; what goes in depends on the token id alone."""

    sizes: Sizes
    backend: Backend
    table: Tensor
    weight: Tensor
    a: Tensor
    b: Tensor

    @staticmethod
    def of(seed: int, sizes: Sizes, backend: Backend) -> RecurrentLayer:
        draws = torch.Generator().manual_seed(seed)
        return RecurrentLayer(
            sizes,
            backend,
            torch.randn(VOCAB, sizes.channels, generator=draws),
            torch.randn(sizes.channels, TAPS, generator=draws),
            torch.randn(VOCAB, sizes.value_heads, generator=draws) - 2,
            torch.randn(VOCAB, sizes.value_heads, generator=draws) * 2,
        )

    @property
    def caches(self) -> Sequence[CacheSpec]:
        return self.sizes.specs

    def inputs(self, y: Tensor, tokens: Tensor) -> DeltaInputs:
        """From convolved inputs y [T, C]."""
        sizes, zero = self.sizes, torch.zeros(self.sizes.value_heads)
        q, k, v = y.split((sizes.keys, sizes.keys, y.shape[1] - 2 * sizes.keys), 1)
        q, k = (unit(x.reshape(len(y), sizes.key_heads, sizes.key_size)) for x in (q, k))
        v = v.view(len(y), sizes.value_heads, sizes.value_size)
        decay, beta = self.backend.delta_gates(self.a[tokens], self.b[tokens], zero, zero)
        return DeltaInputs(q * sizes.key_size**-0.5, k, v, decay, beta)

    def compute(self, batch: Batch, pools: Pools) -> Tensor:
        ring = pools.rows("conv", "x")[0]
        x = self.table[batch.tokens]
        y = batch.rows.causal_conv(x, ring, self.weight)
        batch.rows.ring_write(ring, x)
        return batch.rows.delta_rule(
            self.inputs(y, batch.tokens), delta_caches(pools, self.sizes.block)
        )

    def truth(self, tokens: Sequence[int]) -> Tensor:
        """Outputs of one sequence from position 0, by the recurrence in float64."""
        index = torch.tensor(tokens)
        padded = torch.cat((torch.zeros(TAPS - 1, self.sizes.channels), self.table[index])).double()
        sums = padded.unfold(0, TAPS, 1) * self.weight
        inputs = self.inputs((sums.sum(-1) * sums.sum(-1).sigmoid()), index)
        group = self.sizes.value_heads // self.sizes.key_heads
        q, k = (x.double().repeat_interleave(group, 1) for x in (inputs.q, inputs.k))
        state = torch.zeros(self.sizes.value_heads, k.shape[2], inputs.v.shape[2]).double()
        out = []
        for at in range(len(tokens)):
            state = state * inputs.decay[at].double().exp()[:, None, None]
            seen = torch.einsum("hkv,hk->hv", state, k[at])
            u = inputs.beta[at].double()[:, None] * (inputs.v[at].double() - seen)
            state = state + k[at][:, :, None] * u[:, None]
            out.append(torch.einsum("hkv,hk->hv", state, q[at]))
        return torch.stack(out)


class RecurrentMachine(Machine):
    """Drafts that were right are not certain in their step; checkpoints are folded after it."""

    def __init__(self, layer: RecurrentLayer, backend: Backend, setting: Setting) -> None:
        super().__init__(layer, backend, setting)
        self._layer = layer
        for name in ("k", "value", "decay", "beta"):
            self.pools.rows("delta", name).fill_(NAN)

    def _row(self, piece: Piece) -> Row:
        row = super()._row(piece)
        verify = len(row.tokens) <= self._setting.depth + 1
        return replace(row, certain=1) if verify else row

    def _commit(self, pieces: Sequence[Piece], rows: Sequence[Row]) -> None:
        block = self._layer.sizes.block
        folds = [
            Fold(row.slot, row.settles // block * block)
            for piece, row in zip(pieces, rows, strict=True)
            if self.cursors[piece.sequence] // block > row.settles // block
        ]
        self.fold(folds)

    def fold(self, folds: Sequence[Fold]) -> None:
        self._backend.fold_delta(delta_caches(self.pools, self._layer.sizes.block), folds)

    def _spoil(self) -> None:
        sizes = self._layer.sizes
        for index, cursor in enumerate(self.cursors):
            self._spoil_ring(self.pools.rows("conv", "x"), index, cursor, TAPS)
            kept = cursor % sizes.block + 1
            for name in ("k", "value", "decay", "beta"):
                self._spoil_ring(self.pools.rows("delta", name), index, cursor, kept)

    @torch.inference_mode()
    def drafted(self, index: int, count: int) -> Tensor:
        """Outputs of `count` tokens, computed one a step as a draft model does, then settled."""
        first = self.cursors[index]
        out = []
        for at in range(first, first + count):
            row = super()._row(Piece(index, first, 1))
            token = self._setting.sequences[index][at]
            row = replace(row, tokens=[token], first=at, certain=int(at == first))
            if at > first:
                row = replace(row, settled=first + 1)
            batch = Step.of([row], self._setting.page_tokens).build(self._backend)
            out.append(self._model.compute(batch, self.pools))
        self.cursors[index] += count
        block = self._layer.sizes.block
        base = (first + 1) // block * block
        if self.cursors[index] >= base + block:
            self.fold([Fold(self.slots[index], base)])
        return torch.cat(out)

    def move(self, index: int, slot: SlotId) -> None:
        """Go on in another slot from a copy of what a block boundary needs."""
        old = self.slots[index]
        assert self.cursors[index] % self._layer.sizes.block == 0
        for cache, part in (("conv", "x"), ("delta", "state")):
            pool = self.pools.rows(cache, part)
            pool[:, slot] = pool[:, old]
            pool[:, old] = NAN
        self.slots[index] = slot

    def kept(self) -> list[Tensor]:
        """Checkpoints and the ring columns of what followed, sequence by sequence."""
        found = []
        for index, cursor in enumerate(self.cursors):
            slot, base = self.slots[index], cursor // self._layer.sizes.block
            found.append(self.pools.rows("delta", "state")[:, slot])
            positions = range(base * self._layer.sizes.block, cursor)
            for name in ("k", "value", "decay", "beta"):
                ring = self.pools.rows("delta", name)
                found.append(ring[:, slot, [p % ring.shape[2] for p in positions]])
        return [part.clone() for part in found]


def setting_of(lengths: Sequence[int], depth: int = 4) -> Setting:
    return Setting(sequences_of(3, VOCAB, lengths), page_tokens=16, depth=depth)


def machine(sizes: Sizes, setting: Setting, backend: Backend) -> RecurrentMachine:
    return RecurrentMachine(RecurrentLayer.of(1, sizes, backend), backend, setting)


def played(on: RecurrentMachine, script: Script, pad: Pad = unpadded) -> list[Tensor]:
    """Outputs of all tokens, then all states."""
    return [*on.play(script, pad), *on.kept()]


def scripts(setting: Setting, seed: int) -> dict[str, Script]:
    lengths, rng = setting.lengths, random.Random(seed)
    return {
        "together": together(lengths),
        "one by one": one_by_one(lengths),
        "rejecting": rejecting(lengths, setting.depth),
        "accepting": accepting(lengths, setting.depth),
        **{f"shuffled {i}": shuffled(lengths, setting.depth, rng) for i in range(3)},
    }


def accepting(lengths: Sequence[int], depth: int) -> Script:
    """Rows as long as drafts allow, all of them right."""
    longest = depth + 1
    return [
        [
            Piece(index, at, min(longest, length - at))
            for index, length in enumerate(lengths)
            if at < length
        ]
        for at in range(0, max(lengths), longest)
    ]
