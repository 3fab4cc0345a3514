"""Functions written out in sums and products, whose bits do not depend on an element's place."""

from __future__ import annotations

import torch
from torch import Tensor

_TERMS = 8


def log1p(x: Tensor) -> Tensor:
    """log(1 + x) for float32 numbers from 0 to 1; a NaN stays one.

    It is 2 artanh(x / (2 + x)), whose series is right to three units in the last place. The
    library's own may treat the end of a vector differently (seen on processors of one maker).
    """
    ratio = x / (x + 2)
    square = ratio * ratio
    total = torch.full_like(ratio, 1 / (2 * _TERMS - 1))
    for term in range(_TERMS - 1, 0, -1):
        total = total.mul_(square).add_(1 / (2 * term - 1))
    return total.mul_(ratio).mul_(2)
