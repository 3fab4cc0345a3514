"""Elementwise operators, written out so that an element's bits do not depend on its place.

The library's sigmoid, silu and softplus may treat the end of a vector differently from the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.series import log1p


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in float32."""
    return torch.exp(-x.float()).add_(1).reciprocal_()


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), without overflow."""
    return log1p(torch.exp(-x.abs())).add_(x.clamp(min=0))


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See Backend.gate."""
    return (x.float() * sigmoid(gate)).to(x.dtype)


def swish(x: Tensor, gate: Tensor) -> Tensor:
    """X * silu(gate), in float32."""
    wide = gate.float()
    divisor = torch.exp(-wide).add_(1)
    return torch.div(wide, divisor, out=divisor).mul_(x)


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See Backend.delta_gates."""
    decay = softplus(a.float() + dt_bias.float()).mul_(-a_log.float().exp())
    return decay, sigmoid(b)
