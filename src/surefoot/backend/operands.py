"""What the operators of a step take besides tensors; shapes as in protocol.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowLayout:
    """Where the tokens of one step lie; host integers, one entry a row.

    Attributes:
        starts: index in [0, T] of each row's first token; one more entry closes the last row.
        first: absolute position of each row's first token.
        tables: page table of each row, in order of position.
        slots: row of the bounded pools.
        visible_from: attention sees no position below this one.
        settled: positions below are final before the step. Recurrent checkpoints stand at the last
            block boundary up to there; a row starts there or, in a draft, somewhat later.
        settles: positions below are final after the step: the row's known tokens count, drafted
            ones do not.
        page_tokens: P.
    """

    starts: tuple[int, ...]
    first: tuple[int, ...]
    tables: tuple[Sequence[int], ...]
    slots: tuple[int, ...]
    visible_from: tuple[int, ...]
    settled: tuple[int, ...]
    settles: tuple[int, ...]
    page_tokens: int

    def length(self, row: int) -> int:
        """Tokens of this row in the step."""
        return self.starts[row + 1] - self.starts[row]


@dataclass(frozen=True)
class CacheShape:
    """What one part of a cache keeps.

    Attributes:
        kind: "paged", "ring" or "recurrent".
        ratio: tokens of an entry; 1 but for some paged caches.
        part: its name.
        shape: of an entry, or of a state.
    """

    kind: str
    ratio: int
    part: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LayoutBounds:
    """What the layouts never exceed for which a step is recorded.

    Attributes:
        longest_table: pages of a row.
        bounded: whether a row may have a `visible_from`.
    """

    longest_table: int
    bounded: bool


@dataclass(frozen=True)
class DeltaInputs:
    """What the gated delta rule reads of the step's tokens; all float32.

    Attributes:
        q: [T, Hk, dk], unit length times dk^-0.5.
        k: [T, Hk, dk], unit length.
        v: [T, Hv, dv]; value head h belongs to key head h // (Hv / Hk).
        decay: [T, Hv], the logarithm of the factor on the state, at most 0.
        beta: [T, Hv], how much of the error is written, in (0, 1).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


@dataclass(frozen=True)
class DeltaCaches:
    """One layer's checkpoint and the ring of inputs since then; S0 is the state at a block's start.

    The ring keeps for each position what later tokens of its block need: k, decay, beta, and
    `value`, what the backend makes of v. Most keep the error beta (v - exp(G) k S0), with G the sum
    of `decay` from the block's start up to and including the position, so that only new tokens ever
    read the state; a backend whose operator wants v keeps v.

    Attributes:
        state: [rows, Hv, dk, dv] float32, the state before position block * floor(settled / block).
        k: [rows, capacity, Hk, dk]; column of position p is p % capacity, here and below.
        value: [rows, capacity, Hv, dv].
        decay: [rows, capacity, Hv].
        beta: [rows, capacity, Hv].
        block: tokens of a block; at least the longest draft + 1.
    """

    state: Tensor
    k: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    block: int


@dataclass(frozen=True)
class Fold:
    """A checkpoint that falls due because drafted tokens turned out to stay.

    Attributes:
        slot: its row in the bounded pools.
        base: the position where the checkpoint stands; it moves on by one block.
    """

    slot: int
    base: int


@dataclass(frozen=True)
class Placing:
    """What happens to query and key heads before they meet.

    Attributes:
        norms: [H + K, D] weights of the norm of each head, queries first; None for no norm.
        eps: of the norm.
        cos: [T, 1, D], as Backend.rotary takes it.
        sin: likewise.
    """

    norms: Tensor | None
    eps: float
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Compression:
    """How windows of tokens become entries (a compressor).

    Window w covers positions ratio * w to ratio * w + ratio - 1. A token's raw row holds values and
    then scores, each `size` numbers, or twice as many where windows overlap: the first half is read
    by the window after the token's own, the second by its own.

    Attributes:
        ratio: tokens of a window.
        overlapped: whether an entry reads the window before its own too.
        norm: [size] weights of the norm of an entry.
        eps: of the norm.
        cos: [T, 1, size], the angle of the first position of each token's window.
        sin: likewise.
    """

    ratio: int
    overlapped: bool
    norm: Tensor
    eps: float
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Entries:
    """Compressed entries that attention reads.

    Attributes:
        pool: [pages, P / ratio, D].
        ratio: tokens of an entry. Entry w can be seen from position ratio * w + ratio - 1 on.
        chosen: [T, n] int64 entries that each token looks at, ascending, then -1; None for all that
            it can see.
    """

    pool: Tensor
    ratio: int
    chosen: Tensor | None


@dataclass(frozen=True)
class Latents:
    """One vector a position that is key and value at once, over a sliding window.

    Attributes:
        own: [T, D] of the step.
        ring: [slots, capacity, D]; read for positions before each row's first token.
        window: positions each token sees, its own included.
    """

    own: Tensor
    ring: Tensor
    window: int


LEAST_SUM = 1e-20
"""Added to a sum of experts' weights before it divides them."""


@dataclass(frozen=True)
class StreamGates:
    """Coefficients of hyper-connections, and the norm of what is read.

    See arXiv 2409.19606; the mixing is kept doubly stochastic.

    Attributes:
        base: [n (n + 2)] float32.
        scale: [3] float32: of what is read, of what is written, of the mixing.
        streams: n.
        rounds: how often rows and columns are normalised.
        eps: in every denominator, and the least share of a stream that is read.
        norm: [d] weights of the norm of what is read.
        norm_eps: of that norm, and of the streams'.
    """

    base: Tensor
    scale: Tensor
    streams: int
    rounds: int
    eps: float
    norm: Tensor
    norm_eps: float
