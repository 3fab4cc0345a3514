"""The gated delta rule token by token, replayed from the checkpoint.

A position is known by its k, its decay and what it wrote, u = beta (v - S'^T k) with S' the decayed
state before it. Those before it stay as long as it does, so u is kept and never made again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.operands import DeltaCaches, DeltaInputs, Fold, RowLayout


def read(state: Tensor, row: Tensor) -> Tensor:
    """State^T row for each head: state [Hv, dk, dv], row [Hv, dk], to [Hv, dv]."""
    return (state * row[:, :, None]).sum(1)


def delta_rows(layout: RowLayout, inputs: DeltaInputs, caches: DeltaCaches) -> Tensor:
    """See RowOperators.delta_rule."""
    out = torch.empty_like(inputs.v)
    for row in range(len(layout.first)):
        if layout.length(row):
            _delta_row(layout, row, inputs, caches, out)
    return out


def _delta_row(
    layout: RowLayout, row: int, inputs: DeltaInputs, caches: DeltaCaches, out: Tensor
) -> None:
    block, slot, first = caches.block, layout.slots[row], layout.first[row]
    base, stop = layout.settled[row] // block * block, first + layout.length(row)
    group = inputs.v.shape[1] // inputs.k.shape[1]
    state = caches.state[slot].clone()
    new: list[tuple[int, Tensor]] = []
    for position in range(base, stop):
        if position < first:
            state = _replayed(state, caches, slot, position)
        else:
            token = layout.starts[row] + position - first
            q, k = (x[token].repeat_interleave(group, 0) for x in (inputs.q, inputs.k))
            state = _faded(state, inputs.decay[token])
            u = inputs.beta[token][:, None] * (inputs.v[token] - read(state, k))
            state = _written(state, k, u)
            out[token] = read(state, q)
            new.append((token, u))
        if (position + 1) % block == 0 and position + 1 <= layout.settles[row]:
            caches.state[slot] = state
    capacity = caches.k.shape[1]
    for token, u in new[-capacity:]:
        column = (token - layout.starts[row] + first) % capacity
        caches.k[slot, column] = inputs.k[token]
        caches.value[slot, column] = u
        caches.decay[slot, column] = inputs.decay[token]
        caches.beta[slot, column] = inputs.beta[token]


def _faded(state: Tensor, decay: Tensor) -> Tensor:
    """State [Hv, dk, dv] after a decay by exp(decay), decay [Hv]."""
    return state * torch.exp(decay)[:, None, None]


def _written(state: Tensor, k: Tensor, u: Tensor) -> Tensor:
    """State [Hv, dk, dv] once u [Hv, dv] is written at k [Hv, dk]."""
    return state + k[:, :, None] * u[:, None, :]


def _replayed(state: Tensor, caches: DeltaCaches, slot: int, position: int) -> Tensor:
    """State [Hv, dk, dv] after a position that is in the ring."""
    column = position % caches.k.shape[1]
    group = caches.value.shape[2] // caches.k.shape[2]
    k = caches.k[slot, column].repeat_interleave(group, 0)
    return _written(_faded(state, caches.decay[slot, column]), k, caches.value[slot, column])


def fold_block(caches: DeltaCaches, fold: Fold) -> None:
    """Move one checkpoint on by one block; see Backend.fold_delta."""
    state = caches.state[fold.slot].clone()
    for position in range(fold.base, fold.base + caches.block):
        state = _replayed(state, caches, fold.slot, position)
    caches.state[fold.slot] = state
