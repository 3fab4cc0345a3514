"""What a device must offer: operators on plain tensors, and a frozen statement of its limits.

Those that need to know where a step's tokens lie are in `row_operators`. Shapes use T for the
tokens of a step (all rows one after the other), H query heads, K key/value heads, D the head size,
P the tokens of a page. Pools come without their layer axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from surefoot.backend.noise import NoiseKey
from surefoot.backend.operands import (
    CacheShape,
    DeltaCaches,
    Fold,
    LayoutBounds,
    RowLayout,
    StreamGates,
    Weight,
)
from surefoot.backend.row_operators import RowOperators

UNCHOSEN = -1
"""Stands for the token of a row whose scores are not numbers; equals no draft."""

LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""The least temperature that is told from 0."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend can and cannot do; printed by `surefoot inspect`.

    Attributes:
        name: the backend's name.
        bitwise: a row's result never depends, to the last bit, on how the work was cut.
        dtypes: element types its operators take, best first.
        page_tokens: default page size in tokens.
        max_draft_tokens: longest draft that one verify row may carry.
        recordings: how many recorded steps it can hold; 0 if it cannot record any.
        padded_recordings: steps are padded to a few sizes, for each of which one of padding alone
            is recorded. Otherwise a size is recorded while a step of that size is computed.
        host_lengths: its attention takes lengths from the host, so that a step cannot be replayed
            before the accepted counts of the last one are known there.
        ordered_entries: among equal scores `choose_entries` takes the lowest index.
        composed: operators for which the device has none, made of several.
        int8: whether it packs weights in int8.
    """

    name: str
    bitwise: bool
    dtypes: tuple[str, ...]
    page_tokens: int
    max_draft_tokens: int
    recordings: int
    padded_recordings: bool = True
    host_lengths: bool = False
    ordered_entries: bool = True
    composed: tuple[str, ...] = ()
    int8: bool = False


class Experts(Protocol):
    """Packed feed-forward experts."""

    def __call__(self, x: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        """Sum over a token's experts of weight * down(silu(gate(x)) * up(x)), in order of choice.

        Args:
            x: [T, hidden].
            choice: [T, n] int64 expert ids; -1 stands for no expert.
            weights: [T, n] float32.

        Returns:
            [T, hidden] in x's dtype.
        """
        ...


class Linear(Protocol):
    """A packed weight: y = x W^T + b, exactly as Int8Weight says for one of those."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs], same dtype; T may be 0."""
        ...

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """The product of x added to `stream` [T, outputs], which is left as it is."""
        ...


class Recording(Protocol):
    """Work that was recorded once and can be done again."""

    @property
    def outputs(self) -> Sequence[Tensor]:
        """What the work returned; every replay writes the same tensors."""
        ...

    def replay(self, layout: RowLayout) -> None:
        """Do it again for a step of as many rows and tokens that lie elsewhere."""
        ...


class Backend(Protocol):
    """A device: packs weights, computes rows, and prepares what belongs to one step."""

    @property
    def capabilities(self) -> Capabilities:
        """The limits of this backend, fixed for its life."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        ...

    def prepare(self, progress: Callable[[str], None]) -> None:
        """Do what is done once and takes long, and say so; otherwise it is done when it is due."""
        ...

    def free_memory(self) -> int:
        """Bytes that could be allocated on the device now."""
        ...

    def check_caches(self, caches: Sequence[CacheShape], page_tokens: int) -> None:
        """Refuse caches that the operators cannot work on; called when the plan is made.

        Raises:
            SettingError: it says which limit, and what came.
        """
        ...

    def pack_linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """Prepare weight [outputs, inputs] and bias [outputs] for repeated use.

        What an Int8Weight gives is defined to the last bit; see there.
        """
        ...

    def pack_gated(
        self, weight: Weight, bias: Tensor | None, limit: float = math.inf
    ) -> Callable[[Tensor], Tensor]:
        """Prepare silu(gate) * up of one input.

        Args:
            weight: [2 * outputs, inputs], the gate's rows first.
            bias: [2 * outputs] or None.
            limit: gate and up are cut off above it, up below its negative too.

        Returns:
            A map from [T, inputs] to [T, outputs].
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """X / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32.

        Args:
            x: [T, size] or [T, heads, size].
            weight: [size], or [heads, size] for a weight of its own for each head.
            eps: added to the mean square.
        """
        ...

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the halves of the last axis.

        Args:
            x: [T, heads, D].
            cos: [T, 1, D], both halves alike; float32.
            sin: [T, 1, D], the first half negated; float32.

        Returns:
            x * cos + swapped_halves(x) * sin, in x's dtype.
        """
        ...

    def rows(self, layout: RowLayout) -> RowOperators:
        """Prepare the cache writes and attention of one step."""
        ...

    def record(
        self,
        layout: RowLayout,
        bounds: LayoutBounds,
        inputs: Sequence[Tensor],
        work: Callable[[RowOperators], Sequence[Tensor]],
    ) -> Recording | None:
        """Record work on the rows of a step.

        Args:
            layout: of a step of padding alone, and what is computed now need not be kept; but a
                real step, which is computed, if `capabilities.padded_recordings` is false.
            bounds: of the layouts to come.
            inputs: the tensors that are filled anew before each replay.
            work: may read those, caches, weights and these rows, and nothing else.

        Returns:
            The recording, which takes room on the device as long as anybody holds it; None if
            the device holds as many as it can, for whatever engines, or this work cannot be
            recorded.

        Raises:
            NotImplementedError: `capabilities.recordings` is 0.
        """
        ...

    def pack_experts(self, gate_up: Weight, down: Weight, limit: float = math.inf) -> Experts:
        """Prepare experts.

        Args:
            gate_up: [E, 2 * inner, hidden], the gate's rows first.
            down: [E, hidden, inner]; either may be int8.
            limit: see pack_gated.
        """
        ...

    def choose_experts(self, scores: Tensor, bias: Tensor, n: int) -> Tensor:
        """The n best experts of each token, by sqrt(log(1 + e^score)) + bias; see top_k.

        Args:
            scores: [T, E] float32.
            bias: [E] float32.
            n: how many.

        Returns:
            [T, n] int64 ids, the best first.
        """
        ...

    def weigh_experts(self, scores: Tensor, choice: Tensor, scale: float) -> Tensor:
        """Weights of chosen experts: sqrt(log(1 + e^score)) / (their sum + LEAST_SUM) * scale.

        Args:
            scores: [T, E] float32.
            choice: [T, n] int64 ids.
            scale: what a token's weights add up to, unless all are next to nothing.

        Returns:
            [T, n] float32.
        """
        ...

    def enter_streams(
        self, streams: Tensor, products: Tensor, gates: StreamGates
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a layer reads of each token's streams, and the coefficients of what it writes.

        Args:
            streams: [T, n, d].
            products: [T, n (n + 2)] float32, of the streams as one vector: n numbers for what is
                read, n for what is written, and n rows of n for the mixing. Before use they are
                divided by sqrt(mean square of that vector + norm_eps), which makes them products
                of the normed vector.
            gates: how they become coefficients.

        Returns:
            [T, d] in the streams' dtype: the normed sum over streams of share * stream, where a
            share is sigmoid + eps; [T, n] factors of what is written, twice the sigmoid; [T, n, n]
            mixing matrices: the softmax of each row plus eps, whose columns and rows are brought
            to the sum 1 in turn, columns first and last.
        """
        ...

    def read_streams(self, streams: Tensor, shares: Tensor) -> Tensor:
        """Sum over streams [T, n, d] of share [T, n] * stream: [T, d] in the streams' dtype."""
        ...

    def write_streams(
        self, streams: Tensor, out: Tensor, factors: Tensor, mixing: Tensor
    ) -> Tensor:
        """Mix the streams and add to each what a layer has put out.

        Args:
            streams: [T, n, d].
            out: [T, d].
            factors: [T, n] float32.
            mixing: [T, n, n] float32; stream j goes to stream k with factor mixing[j, k].

        Returns:
            [T, n, d] in the streams' dtype.
        """
        ...

    def top_k(self, scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The n greatest of scores [T, E] in a total order: by score, then the lowest index.

        Returns:
            Values [T, n] and int64 indices [T, n], the greatest first.
        """
        ...

    def choose(
        self, scores: Tensor, temperatures: Sequence[float], keys: Sequence[NoiseKey]
    ) -> Tensor:
        """In each row the token with the highest (score - peak) / temperature + noise.

        The noise is that of `backend.noise`, bit for bit, and each operation rounds to float32; so
        equal scores give equal tokens on every backend. At temperature 0 it is the highest score.

        Args:
            scores: [R, V] float32.
            temperatures: of the R rows, 0 or at least LEAST_TEMPERATURE.
            keys: of the R rows' noise.

        Returns:
            [R] int64 token ids on the device, the lowest among equals; UNCHOSEN where the highest
            score is not finite.
        """
        ...

    def read(self, numbers: Tensor) -> list[int]:
        """Bring int64 numbers [n] to the host; the one place that waits for the device."""
        ...

    def clean(self, entries: Tensor, tokens: Tensor) -> None:
        """Put 0 in place of NaN and infinities in some rows, in place.

        Args:
            entries: [T, n].
            tokens: [m] int64, which rows.
        """
        ...

    def pack_angles(
        self, frequencies: Tensor, factor: float, passing: int
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Prepare cosines and sines by position, as `rotary` takes them.

        Args:
            frequencies: [n] float64, radians per position.
            factor: multiplies both.
            passing: pairs after the n that turn by nothing and are not multiplied.

        Returns:
            A map from positions [T] int64 to cos and sin, each [T, 1, D] float32 with
            D = 2 (n + passing); at a million positions they are off by less than 2^-21 factor.
        """
        ...

    def pick_rows(self, table: Tensor, places: Tensor) -> Tensor:
        """Rows of table [n, ...] by their places [m] int64, below n: [m, ...]."""
        ...

    def join_tokens(
        self, tokens: Tensor, table: Tensor, states: Tensor, norms: Tensor, eps: float
    ) -> Tensor:
        """The norm of each token's embedding, and beside it the norm of the state before it.

        Args:
            tokens: [T] int64, below V.
            table: [V, n] embeddings.
            states: [T, n] in the table's dtype.
            norms: [2, n] weights of the norms, that of embeddings first.
            eps: added to the mean squares.

        Returns:
            [T, 2 n] in the table's dtype.
        """
        ...

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """X * sigmoid(gate), elementwise; the shapes may broadcast."""
        ...

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm first, then the gate: rms_norm(x, weight) * silu(gate), computed in float32.

        Args:
            x: [..., size]; the norm is over the last axis.
            gate: the same shape.
            weight: [size].
            eps: added to the mean square.

        Returns:
            x's shape and dtype.
        """
        ...

    def delta_gates(
        self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Decay and beta of the gated delta rule.

        Args:
            a: [T, Hv].
            b: [T, Hv].
            a_log: [Hv].
            dt_bias: [Hv].

        Returns:
            -exp(a_log) * softplus(a + dt_bias) and sigmoid(b), both [T, Hv] float32.
        """
        ...

    def fold_delta(self, caches: DeltaCaches, folds: Sequence[Fold]) -> None:
        """Move each checkpoint on by one block, whose inputs are all in the ring.

        The caches may be those of several layers, one layer's rows after another's; no checkpoint
        comes twice. Gives the bits that `delta_rule` would have given, had the tokens been certain.
        """
        ...
