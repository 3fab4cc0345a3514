"""The output head of a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.operands import Weight
from surefoot.weights.load import TensorTaker


def take_head(take: TensorTaker, table: str, embedding: Tensor, tied: bool) -> tuple[Weight, bool]:
    """The head's weight [vocabulary, hidden], and whether the checkpoint ties it to the embedding.

    A stored head has the last word, as it has in transformers: a config that ties it although it
    differs is wrong, and the embedding in its place would give other tokens without an error.

    Args:
        take: where tensors come from.
        table: name of the embedding.
        embedding: [vocabulary, hidden].
        tied: what the config says.

    Raises:
        WeightsError: the config does not tie the head and there is none.
    """
    name = "lm_head.weight"
    if tied and not take.has(name):
        int8 = take.shared(name, table)
        return embedding if int8 is None else int8, True
    head = take.weight(name, (embedding.shape[0], embedding.shape[1]))
    if tied and isinstance(head, Tensor) and torch.equal(head, embedding):
        return embedding, True
    return head, False
