"""Hyper-connections in a form whose bits do not depend on how many tokens there are.

Sums over streams are written term by term: the library may add in another order for other shapes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.backend.operands import StreamGates


class PlainStreams(ABC):
    """The operators of streams, for whichever device the tensors are on."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""

    def enter_streams(
        self, streams: Tensor, products: Tensor, gates: StreamGates
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Backend."""
        square = _row_mean(streams.flatten(1).float().square())
        products = products * torch.rsqrt(square + gates.norm_eps)
        shares, factors, mixing = _gate(products, gates)
        return self.rms_norm(_read(streams, shares), gates.norm, gates.norm_eps), factors, mixing

    def read_streams(self, streams: Tensor, shares: Tensor) -> Tensor:
        """See Backend."""
        return _read(streams, shares)

    def write_streams(
        self, streams: Tensor, out: Tensor, factors: Tensor, mixing: Tensor
    ) -> Tensor:
        """See Backend."""
        count, wide = streams.shape[1], streams.float()
        made = torch.empty_like(streams)
        for k in range(count):
            parts = [wide[:, j] * mixing[:, j, k, None] for j in range(count)]
            made[:, k] = total([out.float() * factors[:, k, None], *parts]).to(streams.dtype)
        return made


def _gate(x: Tensor, gates: StreamGates) -> tuple[Tensor, Tensor, Tensor]:
    n, eps = gates.streams, gates.eps
    parts = x.split((n, n, n * n), dim=1)
    bases = gates.base.split((n, n, n * n))
    read, write, mix = (
        part * gates.scale[i] + base
        for i, (part, base) in enumerate(zip(parts, bases, strict=True))
    )
    mixing = mix.reshape(-1, n, n)
    mixing = torch.exp(mixing - mixing.amax(2, keepdim=True))
    mixing = mixing / total(mixing.unbind(2))[:, :, None] + eps
    mixing = mixing / (total(mixing.unbind(1))[:, None] + eps)
    for _ in range(gates.rounds - 1):
        mixing = mixing / (total(mixing.unbind(2))[:, :, None] + eps)
        mixing = mixing / (total(mixing.unbind(1))[:, None] + eps)
    return _sigmoid(read) + eps, 2 * _sigmoid(write), mixing


def _read(streams: Tensor, shares: Tensor) -> Tensor:
    parts = [streams[:, j].float() * shares[:, j, None] for j in range(streams.shape[1])]
    return total(parts).to(streams.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    return torch.exp(-x).add_(1).reciprocal_()


def total(parts: Sequence[Tensor]) -> Tensor:
    """Sum of tensors of one shape, one after the other."""
    added = parts[0]
    for part in parts[1:]:
        added = added + part
    return added


def _row_mean(x: Tensor) -> Tensor:
    """[T, 1] means of the rows of [T, D], each by adding its halves again and again."""
    count = x.shape[1]
    while (width := x.shape[1]) > 1:
        half = width // 2
        added = x[:, :half] + x[:, half : 2 * half]
        x = torch.cat((added, x[:, 2 * half :]), 1)
    return x / count
