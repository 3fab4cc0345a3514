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


@dataclass(frozen=True)
class RowLayout:
    """Where the tokens of one step lie; host integers, one entry a row.

    Attributes:
        starts: index in [0, T] of each row's first token; one more entry closes the last row.
        first: absolute position of each row's first token.
        tables: page table of each row, in order of position.
        slots: row of the bounded pools.
        visible_from: attention sees no position below this one.
        page_tokens: P.
    """

    starts: tuple[int, ...]
    first: tuple[int, ...]
    tables: tuple[Sequence[int], ...]
    slots: tuple[int, ...]
    visible_from: tuple[int, ...]
    page_tokens: int

    def length(self, row: int) -> int:
        """Tokens of this row in the step."""
        return self.starts[row + 1] - self.starts[row]


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
        """X / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32."""
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
