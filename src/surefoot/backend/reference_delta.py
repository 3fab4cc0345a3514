"""The gated delta rule token by token, replayed from the checkpoint.

A position is known by its k, decay, beta and error = beta (v - faded^T k), where `faded` is the
state S0 at the start of its block times exp(G). With S' the decayed state before the position,
beta (v - S'^T k) = error - beta (S' - faded)^T k, so old positions need no v.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import DeltaCaches, DeltaInputs, Fold, RowLayout


@dataclass(frozen=True)
class Entry:
    """What one position writes into the state.

    Attributes:
        k: [Hv, dk], repeated for the value heads.
        error: [Hv, dv].
        decay: [Hv].
        beta: [Hv].
    """

    k: Tensor
    error: Tensor
    decay: Tensor
    beta: Tensor


class Replay:
    """A running state [Hv, dk, dv] and the state of its block's start, faded by now."""

    def __init__(self, state: Tensor) -> None:
        self.state = state.clone()
        self.faded = state.clone()

    def start_block(self) -> None:
        """What follows is relative to the state as it is now."""
        self.faded = self.state.clone()

    def fade(self, decay: Tensor) -> None:
        """Decay both by exp(decay), decay [Hv]."""
        factor = torch.exp(decay)[:, None, None]
        self.state, self.faded = self.state * factor, self.faded * factor

    def error(self, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        """The ring's `error` of a new position, [Hv, dv]; after `fade`."""
        return beta[:, None] * (v - read(self.faded, k))

    def write(self, k: Tensor, error: Tensor, beta: Tensor) -> None:
        """Write a position into the state; after `fade`."""
        u = error - beta[:, None] * read(self.state - self.faded, k)
        self.state = self.state + k[:, :, None] * u[:, None, :]


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
    replay = Replay(caches.state[slot])
    new: list[tuple[int, Tensor]] = []
    for position in range(base, stop):
        if position % block == 0:
            replay.start_block()
        if position < first:
            entry = _stored(caches, slot, position, group)
            replay.fade(entry.decay)
        else:
            token = layout.starts[row] + position - first
            k = inputs.k[token].repeat_interleave(group, 0)
            replay.fade(inputs.decay[token])
            error = replay.error(k, inputs.v[token], inputs.beta[token])
            entry = Entry(k, error, inputs.decay[token], inputs.beta[token])
            new.append((token, error))
        replay.write(entry.k, entry.error, entry.beta)
        if position >= first:
            q = inputs.q[token].repeat_interleave(group, 0)
            out[token] = read(replay.state, q)
        if (position + 1) % block == 0 and position + 1 <= layout.settles[row]:
            caches.state[slot] = replay.state
    capacity = caches.k.shape[1]
    for token, error in new[-capacity:]:
        column = (token - layout.starts[row] + first) % capacity
        caches.k[slot, column] = inputs.k[token]
        caches.value[slot, column] = error
        caches.decay[slot, column] = inputs.decay[token]
        caches.beta[slot, column] = inputs.beta[token]


def _stored(caches: DeltaCaches, slot: int, position: int, group: int) -> Entry:
    column = position % caches.k.shape[1]
    return Entry(
        caches.k[slot, column].repeat_interleave(group, 0),
        caches.value[slot, column],
        caches.decay[slot, column],
        caches.beta[slot, column],
    )


def fold_block(caches: DeltaCaches, fold: Fold) -> None:
    """Move one checkpoint on by one block; see Backend.fold_delta."""
    group = caches.value.shape[2] // caches.k.shape[2]
    replay = Replay(caches.state[fold.slot])
    for position in range(fold.base, fold.base + caches.block):
        entry = _stored(caches, fold.slot, position, group)
        replay.fade(entry.decay)
        replay.write(entry.k, entry.error, entry.beta)
    caches.state[fold.slot] = replay.state
