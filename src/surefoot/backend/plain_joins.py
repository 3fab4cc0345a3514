"""What a draft head reads, put together from other operators."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor


class PlainJoins(ABC):
    """Joins tokens and states, for whichever device the tensors are on."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""

    def join_tokens(
        self, tokens: Tensor, table: Tensor, states: Tensor, norms: Tensor, eps: float
    ) -> Tensor:
        """See Backend."""
        both = torch.stack((F.embedding(tokens, table), states), dim=1)
        return self.rms_norm(both, norms, eps).flatten(1)
