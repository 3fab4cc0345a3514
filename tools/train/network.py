"""What training, measuring and exporting need of an architecture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from tools.train.text import VOCABULARY


@dataclass(frozen=True)
class ModelSizes:
    """What shapes a model; the names are those of the public config."""

    vocab_size: int = VOCABULARY


class Network(nn.Module, ABC):
    """Trunk and draft head. B sequences, T tokens; hidden states are [B, T, ...].

    Attributes:
        sizes: what it was made with.
    """

    sizes: ModelSizes

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states [B, T, ...] for token ids [B, T]: what the draft head reads."""
        return self.run(ids)[0]

    def drafts(self, ids: Tensor, hidden: Tensor, depths: int) -> list[Tensor]:
        """Draft states of depths 1..`depths`, [B, T - depths, ...] each.

        Row t of depth d saw the tokens up to t + d and predicts token t + d + 1. All depths run
        for all rows at once, yet every row attends to what a running engine would have there.
        """
        return self.run_drafts(ids, hidden, depths)[0]

    @abstractmethod
    def run(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, and what layers want learned besides the text: a loss, 0 if nothing."""

    @abstractmethod
    def run_drafts(self, ids: Tensor, hidden: Tensor, depths: int) -> tuple[list[Tensor], Tensor]:
        """Draft states, and the same loss of the head's layer."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocabulary] of hidden states."""

    @abstractmethod
    def draft_logits(self, state: Tensor) -> Tensor:
        """Scores [..., vocabulary] of draft states."""
