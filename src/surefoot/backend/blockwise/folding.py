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
    """Folds checkpoints, all products of a call in one batch."""

    def __init__(self, width: Callable[[DeltaShape], int]) -> None:
        """`width` gives the least number of new positions of a tile for a shape."""
        self._width = width

    def __call__(self, caches: DeltaCaches, folds: Sequence[Fold]) -> None:
        """See Backend.fold_delta."""
        if not folds:
            return
        shape = delta_shape(caches)
        columns, bias = _fold_tensors(folds, shape, caches.k.device)
        width = self._width(shape)
        heads = shape.value_heads
        k = by_tile(caches.k.flatten(0, 1), columns, len(folds))
        errors = by_tile(caches.value.flatten(0, 1), columns, len(folds)).flatten(0, 1)
        decay, beta = (
            by_tile(ring.flatten(0, 1), columns, len(folds)).contiguous()
            for ring in (caches.decay.unsqueeze(-1), caches.beta.unsqueeze(-1))
        )
        sums = decay.squeeze(-1).cumsum(-1)
        rows = torch.cat((k, k, k), 2)[:, :, : shape.block + 2 * width].contiguous()
        n = faded_products(rows, sums, sums, bias).mul_(beta)
        advance = make_advance(n, rows[:, :, : shape.block], sums, None)
        written = torch.bmm(advance.inverse, errors)
        states = States(caches.state)
        for at, fold in enumerate(folds):
            theirs = written[at * heads : (at + 1) * heads]
            run = Run(at, 1, CHECKPOINT, fold.slot, settles=True)
            states.move(run, advance.select(slice(at, at + 1)), theirs)


def _fold_tensors(
    folds: Sequence[Fold], shape: DeltaShape, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Ring columns [n * B] of the blocks, and -inf [B, B] where a key is not before a row."""
    columns = [
        fold.slot * shape.capacity + (fold.base + at) % shape.capacity
        for fold in folds
        for at in range(shape.block)
    ]
    bias = torch.full((shape.block, shape.block), float("-inf"), device=device).triu_()
    return torch.tensor(columns, device=device), bias
