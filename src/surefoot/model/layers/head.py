"""The output head of a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.weights.load import TensorTaker


def take_head(take: TensorTaker, embedding: Tensor, tied: bool) -> Tensor:
    """The head's weight [vocabulary, hidden]: `embedding` itself where they are tied.

    A stored head has the last word, as it has in transformers: a config that ties it although it
    differs is wrong, and the embedding in its place would give other tokens without an error.

    Args:
        take: where tensors come from.
        embedding: [vocabulary, hidden].
        tied: what the config says.

    Raises:
        WeightsError: the config does not tie the head and there is none.
    """
    name = "lm_head.weight"
    if tied and not take.has(name):
        return embedding
    head = take.take(name, (embedding.shape[0], embedding.shape[1]))
    return embedding if tied and torch.equal(head, embedding) else head
