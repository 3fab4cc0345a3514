"""What a device must offer: operators on plain tensors, and a frozen statement of its limits.

Shapes use T for the tokens of a step (all rows one after the other), H query heads, K key/value
heads, D the head size, P the tokens of a page. Pools come without their layer axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from surefoot.backend.noise import NoiseKey
from surefoot.backend.operands import DeltaCaches, DeltaInputs, Fold, Placing, RowLayout

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
        capture: whether steps can be recorded and replayed.
    """

    name: str
    bitwise: bool
    dtypes: tuple[str, ...]
    page_tokens: int
    max_draft_tokens: int
    capture: bool


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
    """A packed weight: y = x W^T + b."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs], same dtype; T may be 0."""
        ...

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """The product of x added to `stream` [T, outputs], which is left as it is."""
        ...


class RowOperators(Protocol):
    """Cache writes and attention of one step, prepared once and used by every layer."""

    def paged_write(self, pool: Tensor, entries: Tensor) -> None:
        """Store each token's entry at its page and offset.

        Args:
            pool: [pages, *lead, P, dim]; written in place.
            entries: [T, *lead, dim], finite: a masked entry is multiplied by zero.
        """
        ...

    def paged_attention(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float) -> Tensor:
        """Causal attention of each token over its row's pages, its own entry included.

        Args:
            q: [T, H, D].
            k_pool: [pages, K, P, D]; the step's entries are already written.
            v_pool: the same for values.
            scale: factor on the scores.

        Returns:
            [T, H, D] in q's dtype.
        """
        ...

    def attend_pages(
        self,
        q_and_k: Tensor,
        v: Tensor,
        placing: Placing,
        pools: tuple[Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        """Norm and rotate heads, store keys and values, and attend as `paged_attention` does.

        Args:
            q_and_k: [T, H + K, D], queries first.
            v: [T, K, D].
            placing: what happens to `q_and_k`.
            pools: of keys and of values, each [pages, K, P, D]; written in place.
            scale: factor on the scores.

        Returns:
            [T, H, D] in q_and_k's dtype.
        """
        ...

    def ring_write(self, ring: Tensor, entries: Tensor) -> None:
        """Store the last min(n, capacity) entries of each row in columns position % capacity.

        Args:
            ring: [slots, capacity, *shape]; written in place.
            entries: [T, *shape], finite.
        """
        ...

    def window_attention(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        rings: tuple[Tensor, Tensor],
        window: int,
        scale: float,
    ) -> Tensor:
        """Causal attention over the last `window` positions, the token's own included.

        Ring columns are read only for positions before the row's first token; the step's own keys
        and values are taken from `kv`. Must run before `ring_write` of the same layer.

        Args:
            q: [T, H, D].
            kv: keys and values of the step, each [T, K, D].
            rings: key ring and value ring, each [slots, capacity, K, D].
            window: positions each token sees.
            scale: factor on the scores.

        Returns:
            [T, H, D] in q's dtype.
        """
        ...

    def causal_conv(self, x: Tensor, ring: Tensor, weight: Tensor) -> Tensor:
        """Silu of a depthwise causal convolution along each row.

        Ring columns are read only for positions before the row's first token; before position 0
        there are zeros. Must run before `ring_write` of the same inputs.

        Args:
            x: [T, C] inputs of the step.
            ring: [slots, capacity, C] earlier inputs.
            weight: [C, K]; the last tap meets the token itself.

        Returns:
            [T, C] in x's dtype.
        """
        ...

    def delta_rule(self, inputs: DeltaInputs, caches: DeltaCaches) -> Tensor:
        """Gated delta rule (arXiv 2412.06464) of each row from its checkpoint.

        With S the state before a token: S' = exp(decay) S; u = beta (v - S'^T k);
        S = S' + k u^T; the output is S^T q. Computed block by block at absolute multiples of
        `caches.block`, so a token's bits do not depend on where the row starts. Ring columns are
        read for positions from the checkpoint to the row's first token. Afterwards the step's own
        columns are written (the last `capacity` of them), and the checkpoint stands at the last
        block boundary up to `settles`.

        Returns:
            [T, Hv, dv] float32.
        """
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

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Prepare weight [outputs, inputs] and bias [outputs] for repeated use."""
        ...

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Prepare silu(gate) * up of one input.

        Args:
            weight: [2 * outputs, inputs], the gate's rows first.
            bias: [2 * outputs] or None.

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

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> Experts:
        """Prepare experts.

        Args:
            gate_up: [E, 2 * inner, hidden], the gate's rows first.
            down: [E, hidden, inner].
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
    ) -> list[int]:
        """In each row the token with the highest (score - peak) / temperature + noise.

        The noise is that of `backend.noise`, bit for bit, and each operation rounds to float32; so
        equal scores give equal tokens on every backend. At temperature 0 it is the highest score.

        Args:
            scores: [R, V] float32.
            temperatures: of the R rows, 0 or at least LEAST_TEMPERATURE.
            keys: of the R rows' noise.

        Returns:
            R token ids, the lowest among equals; UNCHOSEN where the highest score is not finite.
        """
        ...

    def clean(self, entries: Tensor, tokens: Tensor) -> None:
        """Put 0 in place of NaN and infinities in some rows, in place.

        Args:
            entries: [T, n].
            tokens: [m] int64, which rows.
        """
        ...

    def angles(
        self, positions: Tensor, frequencies: Tensor, factor: float, passing: int
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines as `rotary` takes them, computed in float64.

        Args:
            positions: [T] int64.
            frequencies: [n] float64, radians per position.
            factor: multiplies both.
            passing: pairs after the n that turn by nothing and are not multiplied.

        Returns:
            cos and sin, each [T, 1, D] float32 with D = 2 (n + passing): exact to their last bits
            at a million positions.
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

        Gives the bits that `delta_rule` would have given, had the tokens been certain.
        """
        ...
