"""Experts chosen by a table or by scores, beside one that all tokens share (DeepSeek V4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from surefoot.backend.protocol import Backend, Experts, Linear
from surefoot.step import Batch
from surefoot.weights.counts import Linears


@dataclass(frozen=True)
class RoutedSizes:
    """A feed-forward of experts.

    Attributes:
        experts: how many there are, the shared one aside.
        chosen: how many each token takes.
        inner: width of an expert, the shared one too.
        scale: factor on what the chosen ones put out (`routed_scaling_factor`).
        limit: inner values are cut off there (`swiglu_limit`).
    """

    experts: int
    chosen: int
    inner: int
    scale: float
    limit: float

    def parameters(self, hidden: int) -> int:
        """How many numbers the weights are, without a bias for the choice."""
        return (3 * self.inner * (self.experts + 1) + self.experts) * hidden

    def linears(self, hidden: int) -> Linears:
        """What W8A8 makes int8: not the router."""
        return Linears.feed(hidden, self.inner) * (self.experts + 1)


@dataclass(frozen=True)
class TableChoice:
    """Experts by token id; `table` is [vocabulary, chosen] int64."""

    table: Tensor

    def __call__(self, tokens: Tensor, scores: Tensor, backend: Backend) -> Tensor:
        """[T, chosen] expert ids of tokens [T]."""
        return self.table[tokens]


@dataclass(frozen=True)
class BiasedChoice:
    """The best experts by Backend.choose_experts; `bias` is [experts] float32."""

    bias: Tensor
    chosen: int

    def __call__(self, tokens: Tensor, scores: Tensor, backend: Backend) -> Tensor:
        """[T, chosen] expert ids for scores [T, experts]."""
        return backend.choose_experts(scores, self.bias, self.chosen)


@dataclass(frozen=True)
class RoutedFeed:
    """A token's experts, weighted by Backend.weigh_experts, and the shared expert.

    Attributes:
        scale: factor on what the chosen experts put out.
        router: to a number for each expert.
        choice: which experts a token takes.
        experts: all of them, packed.
        gated: inner values of the shared expert.
        down: of the shared expert.
        backend: computes.
    """

    scale: float
    router: Linear
    choice: TableChoice | BiasedChoice
    experts: Experts
    gated: Callable[[Tensor], Tensor]
    down: Linear
    backend: Backend

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """Map [T, hidden] to [T, hidden]."""
        scores = self.router(x.float())
        chosen = self.choice(batch.tokens, scores, self.backend)
        weights = self.backend.weigh_experts(scores, chosen, self.scale)
        mixed = self.experts(x, batch.routed(chosen), weights)
        return self.down.add(self.gated(x), mixed)
