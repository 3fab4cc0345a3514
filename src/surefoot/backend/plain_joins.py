"""Rows of tables, and what a draft head reads, put together from other operators."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class PlainJoins(ABC):
    """Picks rows and joins them, for whichever device the tensors are on."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""

    def pick_rows(self, table: Tensor, places: Tensor) -> Tensor:
        """See Backend."""
        return table.index_select(0, places)

    def join_tokens(
        self, tokens: Tensor, table: Tensor, states: Tensor, norms: Tensor, eps: float
    ) -> Tensor:
        """See Backend."""
        both = torch.stack((self.pick_rows(table, tokens), states), dim=1)
        return self.rms_norm(both, norms, eps).flatten(1)
