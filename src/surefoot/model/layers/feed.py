"""Feed-forwards: one gated pair, or a choice of experts beside one that all tokens share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.protocol import Backend, Experts, Linear
from surefoot.step import Batch
from surefoot.weights.counts import Linears


@dataclass(frozen=True)
class DenseSizes:
    """A gated feed-forward; `inner` is its width."""

    inner: int

    def parameters(self, hidden: int) -> int:
        """How many numbers the weights are."""
        return 3 * self.inner * hidden

    def linears(self, hidden: int) -> Linears:
        """What W8A8 makes int8."""
        return Linears.feed(hidden, self.inner)


@dataclass(frozen=True)
class ExpertSizes:
    """A feed-forward of experts.

    Attributes:
        experts: how many there are.
        chosen: how many each token takes.
        inner: width of an expert.
        shared: width of the expert that all tokens share.
        renormalised: the weights of a token's experts are divided by their sum.
    """

    experts: int
    chosen: int
    inner: int
    shared: int
    renormalised: bool

    @property
    def joint(self) -> tuple[int, int, int, int]:
        """Widths of the joint product: shared gate, shared up, router, shared expert's weight."""
        return self.shared, self.shared, self.experts, 1

    def parameters(self, hidden: int) -> int:
        """How many numbers the weights are."""
        return (3 * (self.experts * self.inner + self.shared) + self.experts + 1) * hidden

    def linears(self, hidden: int) -> Linears:
        """What W8A8 makes int8: not the router, and not the shared expert's weight."""
        expert, shared = (DenseSizes(inner).linears(hidden) for inner in (self.inner, self.shared))
        return expert * self.experts + shared


FeedSizes = DenseSizes | ExpertSizes


@dataclass(frozen=True)
class DenseFeed:
    """down(silu(gate(x)) * up(x))."""

    gated: Callable[[Tensor], Tensor]
    down: Linear

    def __call__(self, x: Tensor, stream: Tensor, batch: Batch) -> Tensor:
        """The feed-forward of x [T, hidden] added to `stream`."""
        return self.down.add(self.gated(x), stream)


@dataclass(frozen=True)
class ExpertFeed:
    """A token's best experts by softmax of the router, and the shared expert times its sigmoid.

    Attributes:
        sizes: of the experts.
        joint: everything that reads the input, but for the experts, in one product.
        experts: the packed experts.
        down: of the shared expert.
        backend: computes.
    """

    sizes: ExpertSizes
    joint: Linear
    experts: Experts
    down: Linear
    backend: Backend

    def __call__(self, x: Tensor, stream: Tensor, batch: Batch) -> Tensor:
        """The feed-forward of x [T, hidden] added to `stream`."""
        gate, up, scores, share = self.joint(x).split(self.sizes.joint, dim=1)
        weights, choice = self.backend.top_k(_softmax(scores), self.sizes.chosen)
        if self.sizes.renormalised:
            weights = weights / weights.sum(dim=1, keepdim=True)
        mixed = stream + self.experts(x, batch.routed(choice), weights)
        shared = self.backend.gate(gate, gate) * up
        return self.down.add(self.backend.gate(shared, share), mixed)


def _softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores.float(), dim=1)


Feed = DenseFeed | ExpertFeed
