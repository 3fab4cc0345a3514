"""Feed-forward experts one after another, each for the tokens that chose it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import Weight, experts_of
from surefoot.backend.protocol import Linear


@dataclass(frozen=True)
class Expert:
    """One expert.

    Attributes:
        gated: [T, hidden] to silu(gate) * up, [T, inner].
        down: [T, inner] to [T, hidden].
    """

    gated: Callable[[Tensor], Tensor]
    down: Linear


@dataclass(frozen=True)
class LoopedExperts:
    """See Experts. Tokens do not meet in it if the experts' linears keep them apart."""

    experts: tuple[Expert, ...]

    def __call__(self, x: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        """See Experts."""
        tokens, count = choice.shape
        flat = choice.flatten()
        order = flat.argsort(stable=True)
        uses = torch.bincount(flat + 1, minlength=len(self.experts) + 1).tolist()
        places = order[uses[0] :]
        entering = x.index_select(0, places // count)
        parts = [
            expert.down(expert.gated(rows))
            for expert, rows in zip(self.experts, entering.split(uses[1:]), strict=True)
            if len(rows)
        ]
        products = x.new_zeros(tokens * count, x.shape[1])
        if parts:
            products.index_copy_(0, places, torch.cat(parts))
        used = weights.masked_fill(choice < 0, 0.0)
        return _combine(products.view(tokens, count, x.shape[1]), used)


def _combine(products: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over axis 1 of [T, n, hidden], one term after another."""
    weighted = products.float() * weights.unsqueeze(-1)
    total = weighted[:, 0]
    for place in range(1, weighted.shape[1]):
        total.add_(weighted[:, place])
    return total.to(products.dtype)


def pack_experts(
    gate_up: Weight,
    down: Weight,
    pack_gated: Callable[[Weight, Tensor | None], Callable[[Tensor], Tensor]],
    pack_linear: Callable[[Weight, Tensor | None], Linear],
) -> LoopedExperts:
    """Experts of a backend's own linears; see Backend.pack_experts."""
    return LoopedExperts(
        tuple(
            Expert(pack_gated(inner, None), pack_linear(outer, None))
            for inner, outer in zip(experts_of(gate_up), experts_of(down), strict=True)
        )
    )


def top_k(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """See Backend.top_k: a stable sort keeps the order of indices among equals."""
    values, indices = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[:, :n], indices[:, :n]
