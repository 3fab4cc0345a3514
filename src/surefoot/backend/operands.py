"""What the operators of a step take besides tensors; shapes as in protocol.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surefoot.errors import WeightsError


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
    """Checkpoints and the ring of inputs since then; S0 is the state at a block's start.

    They are one layer's, or for folds those of all layers, one layer's rows after another's.

    The ring keeps for each position what later tokens of its block need: k, decay, beta, and
    `value`, what the backend makes of v. With u or the error only new tokens ever read the state:

        u, what the position wrote, where positions are computed one by one
        the error beta (v - exp(G) k S0), with G the sum of `decay` from the block's start up to
            and including the position, where a whole block is solved at once
        v, where the operator wants it

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
        slot: its row in the bounded pools, or in the caches that it comes with.
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


@dataclass(frozen=True)
class LatentPages:
    """One vector a position that is value and key at once, and a part of the key that is turned.

    Attributes:
        values: [pages, P, R].
        turned: [pages, P, dr], rotated by position.
    """

    values: Tensor
    turned: Tensor


def check_chosen(queries: Tensor, chosen: Tensor | None) -> None:
    """Refuse a choice of positions that does not belong to these queries.

    Raises:
        ValueError: it has more rows than there are queries, or fewer.
    """
    if chosen is not None and len(chosen) != len(queries):
        raise ValueError(
            f"{len(chosen)} rows of chosen positions came for {len(queries)} queries; each query "
            "needs the row that was chosen for it, padding included"
        )


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


MOST_INPUTS = 131071
"""Most products of two int8 numbers, each at most 128 * 128, whose sum surely fits int32."""

LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Where a scale would be less, it is 1, and what it is of counts as 0."""


@dataclass(frozen=True)
class FixedInput:
    """How inputs become int8 where that was settled beforehand (ModelSlim's static W8A8).

    Attributes:
        scale: what a step from one code to the next is worth, above 0.
        offset: the code that stands for 0.
        added: [outputs] int32, added to the sums: the bias, and what the offset brings into them.
    """

    scale: float
    offset: int
    added: Tensor


@dataclass(frozen=True)
class Int8Weight:
    """A linear's weight in int8, whose inputs become int8 too (W8A8, and W4A8 with its codes).

    Of each row m of the input x come codes q[m] and a scale s[m], with halves rounded to even:

        s[m] = max |x[m]| / 127, or 1 if that is below LEAST_SCALE;  q[m] = round(x[m] / s[m])
        with `fixed`: s[m] = 1;  q[m] = round(x[m] / scale) + offset, cut off at -128 and 127

    The result, whose operations are done one by one in float32 but for the sum, is

        y[m, n] = float32(sum over k of q[m, k] values[n, k] (+ added[n])) * scales[n] * s[m]
        y[m, n] + bias[n], if there is a bias

    With scales for G groups of neighbouring inputs, group g from k = g K / G on, sums are made
    group by group, and what they are worth is added up from the first group to the last:

        t[m, n, 0] = float32(sum over k of group 0 of q[m, k] values[n, k]) * scales[n, 0]
        t[m, n, g] = t[m, n, g - 1] + float32(sum over k of group g of ...) * scales[n, g]
        y[m, n] = t[m, n, G - 1] * s[m], and the bias as above

    A row that holds NaN or an infinity becomes NaN throughout; it changes no other row. The sum is
    exact in int32, in whatever order it is made; groups are few, and have an order. So every
    backend gives the same bits for float32, and a row's bits never depend on the rows beside it: no
    fixed tiles and no tests of shapes are needed. What comes in another element type is computed in
    float32 and rounded once.

    Attributes:
        values: [outputs, inputs] int8 with at most MOST_INPUTS inputs; [E, outputs, inputs] for
            experts.
        scales: [outputs] float32, or [outputs, G] for groups; [E, outputs] or [E, outputs, G] for
            experts.
        fixed: None if scales of inputs are found row by row; always so for experts and groups.
    """

    values: Tensor
    scales: Tensor
    fixed: FixedInput | None = None

    def __post_init__(self) -> None:
        """Refuse what int32 might not hold.

        Raises:
            WeightsError: there are more than MOST_INPUTS inputs, or as many as what is added to
                their sums leaves no room for.
        """
        assert self.values.dtype == torch.int8, "codes are int8"
        outputs = self.values.shape[:-1]
        assert self.scales.shape[: len(outputs)] == outputs, "each output has its scales"
        assert self.scales.dim() - len(outputs) in (0, 1), (
            "an output has one scale, or a row of them"
        )
        if self.groups:
            assert self.values.shape[-1] % self.groups == 0, "groups are of one size"
            assert self.fixed is None, "inputs of groups are scaled row by row"
        inputs, added = self.values.shape[-1], 0
        if self.fixed is not None and self.fixed.added.numel():
            added = int(self.fixed.added.long().abs().max())
        if inputs > MOST_INPUTS or inputs * 128 * 128 + added > torch.iinfo(torch.int32).max:
            raise WeightsError(
                f"a weight in int8 has {inputs} inputs; with {added} added to sums of their "
                f"products these might not fit int32; at most {MOST_INPUTS} inputs can be summed"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight it stands for."""
        return tuple(self.values.shape)

    @property
    def groups(self) -> int:
        """G; 0 where each output has one scale for all of its inputs."""
        return self.scales.shape[-1] if self.scales.dim() == self.values.dim() else 0

    def to(self, device: torch.device) -> Int8Weight:
        """The same on another device."""
        fixed = self.fixed and replace(self.fixed, added=self.fixed.added.to(device))
        return Int8Weight(self.values.to(device), self.scales.to(device), fixed)

    def rows(self, pick: Callable[[Tensor], Tensor]) -> Int8Weight:
        """Some of the outputs, or all in a new order; `pick` says which, along the first axis."""
        if self.fixed is None:
            return Int8Weight(pick(self.values), pick(self.scales))
        fixed = replace(self.fixed, added=pick(self.fixed.added))
        return Int8Weight(pick(self.values), pick(self.scales), fixed)

    def columns(self, order: Tensor) -> Int8Weight:
        """The inputs in a new order; groups would be torn apart."""
        assert not self.groups, "inputs of groups stay where they are"
        return replace(self, values=self.values[..., order])


Weight = Tensor | Int8Weight
"""A linear's weight, as backends pack it."""


def experts_of(weight: Weight) -> tuple[Weight, ...]:
    """The weight of each expert; they share memory with the whole."""
    if isinstance(weight, Int8Weight):
        return tuple(map(Int8Weight, weight.values.unbind(), weight.scales.unbind()))
    return weight.unbind()
