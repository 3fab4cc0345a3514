"""Experts chosen by sigmoid scores within the best groups, beside one that all tokens share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import LEAST_SUM
from surefoot.backend.protocol import Backend, Experts, Linear
from surefoot.model.layers.feed import DenseSizes
from surefoot.step import Batch
from surefoot.weights.counts import Linears


@dataclass(frozen=True)
class GroupedSizes:
    """A feed-forward of experts in groups.

    Attributes:
        experts: how many there are, the shared one aside.
        chosen: how many each token takes.
        groups: how many groups they form, one after the other.
        chosen_groups: from how many groups a token takes them.
        inner: width of an expert.
        shared: width of the expert that all tokens share.
        renormalised: the weights of a token's experts are divided by their sum.
        scale: factor on what the chosen ones put out (`routed_scaling_factor`).
    """

    experts: int
    chosen: int
    groups: int
    chosen_groups: int
    inner: int
    shared: int
    renormalised: bool
    scale: float

    @property
    def group(self) -> int:
        """Experts of a group."""
        return self.experts // self.groups

    def parameters(self, hidden: int) -> int:
        """How many numbers the weights are."""
        wide = self.experts * self.inner + self.shared
        return (3 * wide + self.experts) * hidden + self.experts

    def linears(self, hidden: int) -> Linears:
        """What W8A8 makes int8: not the router."""
        expert, shared = (DenseSizes(inner).linears(hidden) for inner in (self.inner, self.shared))
        return expert * self.experts + shared


@dataclass(frozen=True)
class GroupedChoice:
    """Which experts a token takes, and with what weights.

    A score is the sigmoid of the router's number; what counts for the choice is score + bias. A
    group counts as much as its two best experts together, and only experts of the best groups are
    chosen. Among equals the lowest index is the best. Weights are the scores without bias.

    Attributes:
        bias: [experts] float32.
        sizes: how many.
        backend: computes.
    """

    bias: Tensor
    sizes: GroupedSizes
    backend: Backend

    def __call__(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids and weights, both [T, chosen], for the router's numbers [T, experts]."""
        sizes = self.sizes
        # Not the library's sigmoid, whose bits depend on how many numbers there are.
        scores = 1 / (1 + torch.exp(-numbers))
        worth = self._allowed(scores + self.bias)
        choice = self.backend.top_k(worth, sizes.chosen)[1]
        weights = scores.gather(1, choice)
        if sizes.renormalised:
            # Added term by term, which is the same for any number of tokens.
            total = weights[:, 0]
            for place in range(1, sizes.chosen):
                total = total + weights[:, place]
            weights = weights / (total + LEAST_SUM)[:, None]
        return choice, weights * sizes.scale

    def _allowed(self, worth: Tensor) -> Tensor:
        """Worth [T, experts] with -inf outside the best groups."""
        sizes = self.sizes
        if sizes.chosen_groups == sizes.groups:
            return worth
        best = self.backend.top_k(worth.view(-1, sizes.group), 2)[0]
        of_groups = (best[:, 0] + best[:, 1]).view(-1, sizes.groups)
        groups = self.backend.top_k(of_groups, sizes.chosen_groups)[1]
        left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, groups, False)
        by_group = worth.view(-1, sizes.groups, sizes.group)
        return by_group.masked_fill(left_out[..., None], -torch.inf).flatten(1)


@dataclass(frozen=True)
class GroupedFeed:
    """A token's experts and the shared one.

    Attributes:
        router: to a number for each expert, in float32.
        choice: which experts a token takes.
        experts: all of them, packed.
        gated: inner values of the shared expert.
        down: of the shared expert.
    """

    router: Linear
    choice: GroupedChoice
    experts: Experts
    gated: Callable[[Tensor], Tensor]
    down: Linear

    def __call__(self, x: Tensor, stream: Tensor, batch: Batch) -> Tensor:
        """The feed-forward of x [T, hidden] added to `stream`."""
        choice, weights = self.choice(self.router(x.float()))
        mixed = stream + self.experts(x, batch.routed(choice), weights)
        return self.down.add(self.gated(x), mixed)
