"""Log-probabilities of tokens under the model's own distribution, before any processing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.backend.order import Blocks


def top_logprobs(logits: Tensor, chosen: Sequence[int], count: int) -> list[dict[int, float]]:
    """Log-probabilities of the best tokens and of the chosen one.

    Args:
        logits: [R, V] float32, as the model gave them.
        chosen: the emitted token of each row.
        count: how many of the best tokens to report; 0 reports only the chosen one.

    Returns:
        One {token id: log-probability} per row: the best tokens first, the lower id first among
        equals, then the chosen one if it is not among them. Tokens at -inf are not among the best.
    """
    normal = torch.log_softmax(logits, dim=-1)
    return [
        _row(logits[at], normal[at], token, count)
        for at, token in zip(range(len(logits)), chosen, strict=True)
    ]


def _row(logits: Tensor, normal: Tensor, chosen: int, count: int) -> dict[int, float]:
    best = Blocks.of(logits).best(count).tolist() if count else []
    ids = best if chosen in best else [*best, chosen]
    return dict(zip(ids, normal[ids].tolist(), strict=True))
