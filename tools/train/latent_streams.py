"""DeepSeek V4's hyper-connections: several streams instead of one residual.

Shapes: B sequences, T tokens, D hidden size, n streams, N matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tools.train.latent_layers import scale_to_one
from tools.train.latent_sizes import LatentSizes


# Opaque to the compiler, which would unroll the rounds of every layer.
@torch.library.custom_op("train::make_doubly_stochastic", mutates_args=())
def make_doubly_stochastic(scores: Tensor, rounds: int, eps: float) -> Tensor:
    """Bring rows and columns of [..., n, n] to sums of 1 by Sinkhorn's rounds, columns last."""
    return _to_rows(_rounds(scores, rounds, eps)[-1][0]).view(scores.shape)


def _rounds(scores: Tensor, rounds: int, eps: float) -> list[tuple[Tensor, Tensor]]:
    """What every division gave, [n, n, N], and what it divided by; first the softmax."""
    mixing = scores.flatten(0, -3).permute(1, 2, 0).contiguous().softmax(1)
    steps = [(mixing, mixing)]
    mixing = mixing + eps
    for turn in range(2 * rounds - 1):
        divisor = mixing.sum(turn % 2, keepdim=True) + eps
        mixing = mixing / divisor
        steps.append((mixing, divisor))
    return steps


def _to_rows(mixing: Tensor) -> Tensor:
    """Back from [n, n, N], in which sums run over long rows, to [N, n, n]."""
    return mixing.permute(2, 0, 1).contiguous()


@make_doubly_stochastic.register_fake
def _(scores: Tensor, rounds: int, eps: float) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, int, float], output: Tensor) -> None:
    scores, ctx.rounds, ctx.eps = inputs
    ctx.save_for_backward(scores)


@torch.library.custom_op("train::doubly_stochastic_gradient", mutates_args=())
def doubly_stochastic_gradient(scores: Tensor, gradient: Tensor, rounds: int, eps: float) -> Tensor:
    """The gradient of `make_doubly_stochastic`, by running it again."""
    (softened, _), *steps = _rounds(scores, rounds, eps)
    slope = gradient.flatten(0, -3).permute(1, 2, 0).contiguous()
    for turn, (mixing, divisor) in reversed(list(enumerate(steps))):
        slope = (slope - (slope * mixing).sum(turn % 2, keepdim=True)) / divisor
    slope = softened * (slope - (slope * softened).sum(1, keepdim=True))
    return _to_rows(slope).view(scores.shape)


@doubly_stochastic_gradient.register_fake
def _(scores: Tensor, gradient: Tensor, rounds: int, eps: float) -> Tensor:
    return torch.empty_like(scores)


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (scores,) = ctx.saved_tensors
    return (
        doubly_stochastic_gradient(scores, gradient.contiguous(), ctx.rounds, ctx.eps),
        None,
        None,
    )


make_doubly_stochastic.register_autograd(_gradient, setup_context=_keep)


class HyperConnection(nn.Module):
    """Reads a weighted sum of n streams, and adds an output to all of them, mixing them."""

    def __init__(self, sizes: LatentSizes, place: int) -> None:
        """`place` counts sub-layers: each begins by reading mostly another stream."""
        super().__init__()
        self.sizes = sizes
        count = sizes.hc_mult
        self.fn = nn.Parameter(torch.empty(count * (count + 2), count * sizes.hidden_size))
        nn.init.normal_(self.fn, std=0.02)
        shares = torch.full((count,), -3.0)
        shares[place % count] = 2.0
        mixing = torch.full((count, count), -4.0).fill_diagonal_(0.0)
        self.base = nn.Parameter(torch.cat([shares, torch.zeros(count), mixing.flatten()]))
        self.scale = nn.Parameter(torch.full((3,), 0.05))

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of streams [B, T, n, D]: input [B, T, D], factors [B, T, n], mixing [B, T, n, n]."""
        count, eps = self.sizes.hc_mult, self.sizes.hc_eps
        gates = scale_to_one(streams.flatten(2), self.sizes.rms_norm_eps) @ self.fn.T
        shares, factors, mixing = gates.split([count, count, count * count], -1)
        bases = self.base.split([count, count, count * count])
        shares = (shares * self.scale[0] + bases[0]).sigmoid() + eps
        factors = 2 * (factors * self.scale[1] + bases[1]).sigmoid()
        mixing = (mixing * self.scale[2] + bases[2]).unflatten(-1, (count, count))
        mixing = make_doubly_stochastic(mixing, self.sizes.hc_sinkhorn_iters, eps)
        return (shares[..., None] * streams).sum(2), factors, mixing

    @staticmethod
    def write(streams: Tensor, out: Tensor, factors: Tensor, mixing: Tensor) -> Tensor:
        """The streams after a sub-layer that gave `out` [B, T, D]."""
        return mixing.transpose(-1, -2) @ streams + factors[..., None] * out[:, :, None]


class StreamHead(nn.Module):
    """Joins the streams [B, T, n, D] to one, [B, T, D]."""

    def __init__(self, sizes: LatentSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.hc_fn = nn.Parameter(torch.empty(sizes.hc_mult, sizes.hc_mult * sizes.hidden_size))
        nn.init.normal_(self.hc_fn, std=0.02)
        self.hc_base = nn.Parameter(torch.full((sizes.hc_mult,), -1.0))
        self.hc_scale = nn.Parameter(torch.full((1,), 0.05))

    def forward(self, streams: Tensor) -> Tensor:
        gates = scale_to_one(streams.flatten(2), self.sizes.rms_norm_eps) @ self.hc_fn.T
        shares = (gates * self.hc_scale + self.hc_base).sigmoid() + self.sizes.hc_eps
        return (shares[..., None] * streams).sum(2)
