"""A recurrent mixer: short convolution, gated delta rule, gated norm (arXiv 2412.06464)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import DeltaCaches, DeltaInputs, Fold
from surefoot.backend.protocol import Backend, Linear
from surefoot.model.layers.finite import finite_drafts
from surefoot.state.pool import Pools
from surefoot.state.spec import Held, Part, Recurrent, Ring
from surefoot.step import Batch
from surefoot.weights.counts import Linears

BLOCK = 16
_UNIT_EPS = 1e-6
_FOLDS = 64  # of a call, at most: some backends take room for each


@dataclass(frozen=True)
class DeltaSizes:
    """Heads of a recurrent mixer.

    Attributes:
        key_heads: query and key heads; value head h belongs to key head h // (value / key heads).
        value_heads: value heads, a multiple.
        key_size: numbers of a query or key.
        value_size: numbers of a value.
        taps: tokens that the convolution sees, the current one included.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int

    @property
    def keys(self) -> int:
        """Width of all keys."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Width of what is convolved: queries, keys, values."""
        return 2 * self.keys + self.values

    @property
    def joint(self) -> tuple[int, int, int, int]:
        """Widths of the joint product: what is convolved, output gate, b, a."""
        return self.channels, self.values, self.value_heads, self.value_heads

    def unit(self) -> Tensor:
        """[2 * key_heads, key_size] what a norm by the mean is multiplied with for unit lengths.

        That is key_size^-0.5, and for queries, which come first, its square.
        """
        heads = torch.tensor([self.key_size**-1.0, self.key_size**-0.5])
        return heads.repeat_interleave(self.key_heads)[:, None].repeat(1, self.key_size)

    def parameters(self, hidden: int) -> int:
        """How many numbers the weights are."""
        vectors = 2 * self.value_heads + self.value_size
        return (sum(self.joint) + self.values) * hidden + self.channels * self.taps + vectors

    def linears(self, hidden: int) -> Linears:
        """What W8A8 makes int8: not b and a."""
        return Linears.of(hidden, self.channels, self.values) + Linears.of(self.values, hidden)

    def caches(self, layers: int, dtype: str, prefix: str) -> tuple[Ring, Recurrent]:
        """What `layers` such layers keep of a request; convolved inputs have `dtype`."""
        heads = (self.value_heads,)
        inputs = {
            "k": (self.key_heads, self.key_size),
            "value": (self.value_heads, self.value_size),
            "decay": heads,
            "beta": heads,
        }
        state = Part("state", (self.value_heads, self.key_size, self.value_size), "float32")
        parts = tuple(Part(name, shape, "float32") for name, shape in inputs.items())
        convolved, window = (Part("x", (self.channels,), dtype),), self.taps - 1
        conv = Ring(prefix + "conv", layers, convolved, window, Held(window))
        return conv, Recurrent(prefix + "delta", layers, (state,), parts, BLOCK)


@dataclass(frozen=True)
class DeltaMixer:
    """One recurrent layer's mixer.

    Attributes:
        sizes: of its heads.
        eps: of the norms before and after.
        norm: [hidden] weight of the norm before.
        joint: queries, keys, values, output gate, b and a in one product.
        taps: [channels, taps] weights of the convolution, those of a tap side by side.
        unit: see DeltaSizes.unit.
        a_log: [value_heads] float32, decay = -exp(a_log) softplus(a + dt_bias).
        dt_bias: [value_heads] float32.
        gated_norm: [value_size] float32 weight of the norm after.
        output: back to the stream.
        prefix: before the names of its caches.
        layer: its place among the recurrent layers.
        backend: computes.
    """

    sizes: DeltaSizes
    eps: float
    norm: Tensor
    joint: Linear
    taps: Tensor
    unit: Tensor
    a_log: Tensor
    dt_bias: Tensor
    gated_norm: Tensor
    output: Linear
    prefix: str
    layer: int
    backend: Backend

    def __call__(self, stream: Tensor, batch: Batch, pools: Pools) -> Tensor:
        """Map the stream [T, hidden] to the stream after this mixer."""
        sizes, backend, tokens = self.sizes, self.backend, stream.shape[0]
        fused = self.joint(backend.rms_norm(stream, self.norm, self.eps))
        # What follows, into the caches too, is finite because this is.
        fused = finite_drafts(fused, batch.tentative, backend)
        x, gate, b, a = fused.split(sizes.joint, dim=1)
        q, k, v = self._convolved(x, batch, pools)
        decay, beta = backend.delta_gates(a, b, self.a_log, self.dt_bias)
        inputs = DeltaInputs(q, k, v, decay, beta)
        out = batch.rows.delta_rule(inputs, self._caches(pools))
        gate = gate.view(tokens, sizes.value_heads, sizes.value_size).float()
        out = backend.gated_norm(out, gate, self.gated_norm, self.eps)
        return self.output.add(out.to(stream.dtype).reshape(tokens, sizes.values), stream)

    def _convolved(self, x: Tensor, batch: Batch, pools: Pools) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys of unit length, queries times key_size^-0.5, and values, float32."""
        sizes, rows = self.sizes, batch.rows
        ring = pools.layers(self.prefix + "conv", "x")[self.layer]
        y = rows.causal_conv(x, ring, self.taps).float()
        rows.ring_write(ring, x)
        q_and_k = y[:, : 2 * sizes.keys].view(-1, 2 * sizes.key_heads, sizes.key_size)
        v = y[:, 2 * sizes.keys :].view(-1, sizes.value_heads, sizes.value_size)
        q, k = self._unit(q_and_k).chunk(2, dim=1)
        return q, k, v

    def _unit(self, x: Tensor) -> Tensor:
        """Each head divided by sqrt(sum of squares + 1e-6), in terms of a norm by the mean.

        Queries are made key_size^-0.5 times as long too.
        """
        return self.backend.rms_norm(x, self.unit, _UNIT_EPS / self.sizes.key_size)

    def _caches(self, pools: Pools) -> DeltaCaches:
        name, layer = self.prefix + "delta", self.layer
        return DeltaCaches(
            state=pools.layers(name, "state")[layer],
            k=pools.layers(name, "k")[layer],
            value=pools.layers(name, "value")[layer],
            decay=pools.layers(name, "decay")[layer],
            beta=pools.layers(name, "beta")[layer],
            block=BLOCK,
        )


def fold_layers(prefix: str, folds: Sequence[Fold], pools: Pools, backend: Backend) -> None:
    """Move the checkpoints of all layers on by one block each, many in a call.

    Args:
        prefix: before the names of the layers' caches.
        folds: what is due in each of the layers.
        pools: hold the caches.
        backend: computes.
    """
    name = prefix + "delta"
    layers, slots = pools.rows(name, "state").shape[:2]
    caches = DeltaCaches(
        state=pools.every_row(name, "state"),
        k=pools.every_row(name, "k"),
        value=pools.every_row(name, "value"),
        decay=pools.every_row(name, "decay"),
        beta=pools.every_row(name, "beta"),
        block=BLOCK,
    )
    every = [
        Fold(layer * slots + fold.slot, fold.base) for layer in range(layers) for fold in folds
    ]
    for begin in range(0, len(every), _FOLDS):
        backend.fold_delta(caches, every[begin : begin + _FOLDS])
