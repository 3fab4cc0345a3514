"""Hyper-connections in a form whose bits do not depend on how many tokens there are.

Sums over streams are written term by term: the library may add in another order for other shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.backend.operands import StreamGates


class PlainStreams:
    """The operators of streams, for whichever device the tensors are on."""

    def gate_streams(self, x: Tensor, gates: StreamGates) -> tuple[Tensor, Tensor, Tensor]:
        """See Backend."""
        n, eps = gates.streams, gates.eps
        read, write, mix = (
            part * gates.scale[i] + base
            for i, (part, base) in enumerate(
                zip(x.split((n, n, n * n), dim=1), gates.base.split((n, n, n * n)), strict=True)
            )
        )
        shares, factors = _sigmoid(read) + eps, 2 * _sigmoid(write)
        mixing = mix.reshape(-1, n, n)
        mixing = torch.exp(mixing - mixing.amax(2, keepdim=True))
        mixing = mixing / _total(mixing.unbind(2))[:, :, None] + eps
        mixing = mixing / (_total(mixing.unbind(1))[:, None] + eps)
        for _ in range(gates.rounds - 1):
            mixing = mixing / (_total(mixing.unbind(2))[:, :, None] + eps)
            mixing = mixing / (_total(mixing.unbind(1))[:, None] + eps)
        return shares, factors, mixing

    def read_streams(self, streams: Tensor, shares: Tensor) -> Tensor:
        """See Backend."""
        parts = [streams[:, j].float() * shares[:, j, None] for j in range(streams.shape[1])]
        return _total(parts).to(streams.dtype)

    def write_streams(
        self, streams: Tensor, out: Tensor, factors: Tensor, mixing: Tensor
    ) -> Tensor:
        """See Backend."""
        count, wide = streams.shape[1], streams.float()
        made = torch.empty_like(streams)
        for k in range(count):
            parts = [wide[:, j] * mixing[:, j, k, None] for j in range(count)]
            made[:, k] = _total([out.float() * factors[:, k, None], *parts]).to(streams.dtype)
        return made

    def sqrt_softplus(self, x: Tensor) -> Tensor:
        """See Backend."""
        wide = x.float()
        return torch.log1p(torch.exp(-wide.abs())).add_(wide.clamp(min=0)).sqrt_()


def _sigmoid(x: Tensor) -> Tensor:
    return torch.exp(-x).add_(1).reciprocal_()


def _total(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
