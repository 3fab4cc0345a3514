"""Norms on queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.protocol import Backend


def norm_heads(x: Tensor, weights: Tensor, eps: float, backend: Backend) -> Tensor:
    """Norm each head over its own size, with weights of its own.

    Args:
        x: [T, heads, size].
        weights: [heads, size].
        eps: of the norm.
        backend: computes.
    """
    unit = torch.ones_like(weights[0])
    return backend.rms_norm(x, unit, eps) * weights
