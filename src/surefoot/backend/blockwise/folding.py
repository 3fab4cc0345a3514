"""Moves checkpoints over a block whose inputs are all in the ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from surefoot.backend.blockwise.blocks import CHECKPOINT, DeltaShape, Run
from surefoot.backend.blockwise.recurrent import (
    States,
    by_tile,
    delta_shape,
    faded_products,
    make_advance,
)
from surefoot.backend.operands import DeltaCaches, Fold


class Folder:
    """Folds checkpoints layer by layer; index tensors are made for the first layer of a round."""

    def __init__(self, width: Callable[[DeltaShape], int]) -> None:
        """`width` gives the least number of new positions of a tile for a shape."""
        self._width = width
        self._round: tuple[tuple[Fold, ...], DeltaShape] | None = None
        self._columns = self._bias = torch.empty(0)

    def __call__(self, caches: DeltaCaches, folds: Sequence[Fold]) -> None:
        """See Backend.fold_delta."""
        if not folds:
            return
        shape, now = delta_shape(caches), tuple(folds)
        if self._round != (now, shape):
            self._columns, self._bias = _fold_tensors(now, shape, caches.k.device)
            self._round = (now, shape)
        width = self._width(shape)
        heads = shape.value_heads
        k = by_tile(caches.k.flatten(0, 1), self._columns, len(now))
        errors = by_tile(caches.value.flatten(0, 1), self._columns, len(now)).flatten(0, 1)
        decay, beta = (
            by_tile(ring.flatten(0, 1), self._columns, len(now)).contiguous()
            for ring in (caches.decay.unsqueeze(-1), caches.beta.unsqueeze(-1))
        )
        sums = decay.squeeze(-1).cumsum(-1)
        rows = torch.cat((k, k, k), 2)[:, :, : shape.block + 2 * width].contiguous()
        n = faded_products(rows, sums, sums, self._bias).mul_(beta)
        advance = make_advance(n, rows[:, :, : shape.block], sums, None)
        written = torch.bmm(advance.inverse, errors)
        states = States(caches.state)
        for at, fold in enumerate(now):
            theirs = written[at * heads : (at + 1) * heads]
            run = Run(at, 1, CHECKPOINT, fold.slot, settles=True)
            states.move(run, advance.select(slice(at, at + 1)), theirs)


def _fold_tensors(
    folds: tuple[Fold, ...], shape: DeltaShape, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Ring columns [n * B] of the blocks, and -inf [B, B] where a key is not before a row."""
    columns = [
        fold.slot * shape.capacity + (fold.base + at) % shape.capacity
        for fold in folds
        for at in range(shape.block)
    ]
    bias = torch.full((shape.block, shape.block), float("-inf"), device=device).triu_()
    return torch.tensor(columns, device=device), bias
