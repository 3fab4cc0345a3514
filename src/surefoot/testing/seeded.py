"""Seeded random numbers for weights, and the next-token table that makes them predictable."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class SeededNumbers:
    """Numbers of one checkpoint, drawn in order.

    Attributes:
        own: draws what belongs to the seed alone.
    """

    def __init__(self, seed: int, drift: float) -> None:
        """`drift` says how much of other numbers is mixed in, as a fraction of their size."""
        self.own = torch.Generator().manual_seed(2 * seed)
        self._other = torch.Generator().manual_seed(2 * seed + 1)
        self._drift = drift

    def matrix(self, outputs: int, inputs: int, scale: float = 1.0) -> Tensor:
        """[outputs, inputs] that keeps the size of what it maps, times `scale`."""
        return self.normal(outputs, inputs) * (scale / math.sqrt(inputs))

    def vector(self, size: int) -> Tensor:
        """[size] small numbers."""
        return self.normal(size) * 0.1

    def normal(self, *shape: int) -> Tensor:
        """Numbers of size 1."""
        own, other = (torch.randn(shape, generator=g) for g in (self.own, self._other))
        return own.add(other, alpha=self._drift)


def next_in_table(vocab: int, seed: int) -> Tensor:
    """[vocab] the token that the table of a dial model has after each token: one long cycle."""
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    return torch.empty_like(order).index_copy_(0, order, order.roll(-1))


def codes_of(embedding: Tensor) -> Tensor:
    """[vocab, hidden] the embedding with rows of size 1."""
    return embedding / embedding.pow(2).mean(dim=1, keepdim=True).sqrt()


def table_head(codes: Tensor, seed: int, sharpness: float) -> Tensor:
    """[vocab, hidden] the output head that answers a token's code with the next in the table."""
    head = torch.empty_like(codes).index_copy_(0, next_in_table(len(codes), seed), codes)
    return head * (sharpness / math.sqrt(codes.shape[1]))
