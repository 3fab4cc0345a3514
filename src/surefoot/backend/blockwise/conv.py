"""Depthwise causal convolution along the rows of a step.

The taps are multiplied and added one after another, so a token's bits are the same in every form:
the tokens of short rows gather their inputs together, a long row shifts its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import RowLayout

_SHORT = 16
"""Longest row whose inputs are gathered token by token."""
_STRETCH = 1 << 17
"""Numbers of a long row that are computed at a time, so that they stay in the cache."""


@dataclass(frozen=True)
class Gathered:
    """All tokens of short rows.

    Attributes:
        count: tokens.
        ring: [count * K] ring columns, counted over all slots; 0 for inputs from elsewhere.
        own: [n] which of count * K inputs come from the step.
        tokens: [n] their tokens, or None for all tokens of the step in order.
        zero: [n] which inputs lie before position 0, or None.
        targets: [count] the tokens, or None for all tokens of the step in order.
    """

    count: int
    ring: Tensor
    own: Tensor
    tokens: Tensor | None
    zero: Tensor | None
    targets: Tensor | None


@dataclass(frozen=True)
class Shifted:
    """One long row.

    Attributes:
        tokens: the row's tokens.
        ring: [at most K - 1] ring columns of what comes before, counted over all slots.
    """

    tokens: slice
    ring: Tensor


@dataclass(frozen=True)
class ConvPlan:
    """One step's convolution, for every layer with K taps and the same ring capacity.

    Attributes:
        taps: K.
        short: short rows, or None.
        long: long rows.
    """

    taps: int
    short: Gathered | None
    long: tuple[Shifted, ...]


def plan_conv(layout: RowLayout, taps: int, capacity: int, device: torch.device) -> ConvPlan:
    """Index tensors of a step."""
    lengths = [layout.length(row) for row in range(len(layout.first))]
    short = [row for row, length in enumerate(lengths) if 0 < length <= _SHORT]
    long = [row for row, length in enumerate(lengths) if length > _SHORT]
    return ConvPlan(
        taps=taps,
        short=_gather(layout, short, (taps, capacity), device) if short else None,
        long=tuple(
            Shifted(
                slice(layout.starts[row], layout.starts[row + 1]),
                torch.tensor(
                    [
                        layout.slots[row] * capacity + position % capacity
                        for position in _before(layout.first[row], taps)
                    ],
                    dtype=torch.long,
                    device=device,
                ),
            )
            for row in long
        ),
    )


def _before(first: int, taps: int) -> range:
    """Positions before `first` that its convolution reads."""
    return range(max(0, first - taps + 1), first)


def _gather(
    layout: RowLayout, rows: list[int], ring: tuple[int, int], device: torch.device
) -> Gathered:
    taps, capacity = ring
    columns: list[int] = []
    own: list[tuple[int, int]] = []
    zero: list[int] = []
    for row in rows:
        first, shift = layout.first[row], layout.starts[row] - layout.first[row]
        for stop in range(first + 1, first + layout.length(row) + 1):
            for position in range(stop - taps, stop):
                if position >= first:
                    own.append((len(columns), position + shift))
                elif position < 0:
                    zero.append(len(columns))
                from_ring = 0 <= position < first
                column = layout.slots[row] * capacity + position % capacity
                columns.append(column if from_ring else 0)
    targets = [token for row in rows for token in range(layout.starts[row], layout.starts[row + 1])]
    every = list(range(layout.starts[-1]))
    tokens = [token for _, token in own]

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return Gathered(
        count=len(targets),
        ring=tensor(columns),
        own=tensor([place for place, _ in own]),
        tokens=None if tokens == every else tensor(tokens),
        zero=tensor(zero) if zero else None,
        targets=None if targets == every else tensor(targets),
    )


def run_conv(plan: ConvPlan, x: Tensor, ring: Tensor, weight: Tensor) -> Tensor:
    """Compute a step; see RowOperators.causal_conv.

    It is quickest with a weight whose taps lie one after another: weight.t() contiguous.
    """
    taps = weight.t().float()
    flat = ring.view(-1, ring.shape[-1])
    if plan.short is not None and plan.short.targets is None:
        return silu(_gathered(plan.short, x, flat, taps)).to(x.dtype)
    out = x.new_empty(x.shape)
    if plan.short is not None and plan.short.targets is not None:
        short = silu(_gathered(plan.short, x, flat, taps))
        out.index_copy_(0, plan.short.targets, short.to(x.dtype))
    for row in plan.long:
        _shift(row, x, flat, taps, out[row.tokens])
    return out


def _gathered(plan: Gathered, x: Tensor, ring: Tensor, taps: Tensor) -> Tensor:
    inputs = ring.index_select(0, plan.ring)
    if plan.zero is not None:
        inputs.index_fill_(0, plan.zero, 0.0)
    inputs.index_copy_(0, plan.own, x if plan.tokens is None else x.index_select(0, plan.tokens))
    terms = inputs.view(plan.count, len(taps), -1) * taps
    total = terms[:, 0]
    for tap in range(1, len(taps)):
        total.add_(terms[:, tap])
    return total


def _shift(row: Shifted, x: Tensor, ring: Tensor, taps: Tensor, out: Tensor) -> None:
    own, before = x[row.tokens], len(taps) - 1
    zeros = own.new_zeros(before - len(row.ring), own.shape[1])
    inputs = torch.cat((zeros, ring.index_select(0, row.ring), own))
    stretch = max(1, _STRETCH // own.shape[1])
    for start in range(0, len(own), stretch):
        stop = min(start + stretch, len(own))
        total = inputs[start:stop] * taps[0]
        for tap in range(1, len(taps)):
            total.add_(inputs[start + tap : stop + tap] * taps[tap])
        out[start:stop] = silu(total)


def silu(x: Tensor) -> Tensor:
    """X * sigmoid(x), written out: the library's may treat the end of a vector differently."""
    divisor = torch.exp(-x).add_(1)
    return torch.div(x, divisor, out=divisor)
