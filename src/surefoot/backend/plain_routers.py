"""Choosing and weighing experts in a form whose bits do not depend on how many tokens there are."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from surefoot.backend.operands import LEAST_SUM
from surefoot.backend.plain_streams import total
from surefoot.backend.series import log1p


class PlainRouters(ABC):
    """The operators of routers, for whichever device the tensors are on."""

    @abstractmethod
    def top_k(self, scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """See Backend."""

    def choose_experts(self, scores: Tensor, bias: Tensor, n: int) -> Tensor:
        """See Backend."""
        return self.top_k(_sqrt_softplus(scores) + bias, n)[1]

    def weigh_experts(self, scores: Tensor, choice: Tensor, scale: float) -> Tensor:
        """See Backend."""
        chosen = _sqrt_softplus(scores.gather(1, choice))
        return chosen / (total(chosen.unbind(1)) + LEAST_SUM)[:, None] * scale


def _sqrt_softplus(x: Tensor) -> Tensor:
    return log1p(torch.exp(-x.abs())).add_(x.clamp(min=0)).sqrt_()
