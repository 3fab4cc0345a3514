"""The output head of a checkpoint."""

from __future__ import annotations

from torch import Tensor

from surefoot.weights.load import TensorTaker


def take_head(take: TensorTaker, embedding: Tensor, tied: bool) -> Tensor:
    """The head's weight [vocabulary, hidden].

    Args:
        take: where tensors come from.
        embedding: [vocabulary, hidden], which is the head where `tied`; a stored one is left out.
        tied: what the config says.

    Raises:
        WeightsError: the config does not tie the head and there is none.
    """
    if tied:
        take.skip("lm_head.weight")
        return embedding
    return take.take("lm_head.weight", (embedding.shape[0], embedding.shape[1]))
