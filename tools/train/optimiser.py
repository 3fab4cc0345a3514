"""The two optimisers: Muon for the matrices of the layers, AdamW for everything else.

Muon (Jordan and others, 2024) takes the momentum of a matrix and replaces it by a matrix with
nearly the same directions and singular values near 1, by a few Newton-Schulz steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
MATRIX_DECAY = 0.05
NEWTON_SCHULZ_STEPS = 4
# Coefficients of the quintic from the Muon article: steep at 0, near 1 on [0.7, 1.2].
_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
SMALLEST_MATRIX = 64
CLIP = 1.0
# Names of what has a row per token begin so: AdamW takes it, though it is as large as a matrix.
_VOCABULARY_TABLES = ("model.embed_tokens.", "lm_head.")


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring the singular values of [N, rows, columns] near 1."""
    tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.transpose(1, 2) if tall else matrices
    length: Tensor = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / (length + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.transpose(1, 2)
        x = _LINEAR * x + (_CUBIC * square + _QUINTIC * (square @ square)) @ x
    return x.transpose(1, 2) if tall else x


class Muon:
    """Muon with Nesterov momentum; matrices of one shape are handled together.

    A parameter of three dimensions is a stack of matrices.
    """

    def __init__(self, parameters: Iterable[Tensor], rate: float) -> None:
        self.rate = rate
        self.groups: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in parameters:
            self.groups.setdefault(tuple(parameter.shape[-2:]), []).append(parameter)
        self.momentum = {
            shape: torch.zeros(
                sum(parameter.numel() for parameter in group) // math.prod(shape), *shape
            )
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Move every matrix against its gradient; `scale` multiplies the rate."""
        for shape, group in self.groups.items():
            gradients = torch.cat([_gradient(parameter).view(-1, *shape) for parameter in group])
            momentum = self.momentum[shape].lerp_(gradients, 1 - MOMENTUM)
            updates = orthogonalise(gradients.lerp(momentum, MOMENTUM))
            rate = self.rate * scale
            length = rate * max(1.0, shape[0] / shape[1]) ** 0.5
            shares = updates.split([parameter.numel() // math.prod(shape) for parameter in group])
            for parameter, share in zip(group, shares, strict=True):
                update = share.view_as(parameter)
                parameter.mul_(1 - rate * MATRIX_DECAY).sub_(update, alpha=length)


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} has no gradient")
    return parameter.grad


class Optimiser:
    """Both optimisers over the parameters that have to learn."""

    def __init__(self, network: nn.Module, matrix_rate: float, other_rate: float) -> None:
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                layered = parameter.dim() in (2, 3) and not name.startswith(_VOCABULARY_TABLES)
                large = layered and min(parameter.shape[-2:]) >= SMALLEST_MATRIX
                (matrices if large else others).append(parameter)
        self.others, self.other_rate = others, other_rate
        self.muon = Muon(matrices, matrix_rate)
        groups = [
            {"params": [p for p in others if p.dim() == 2], "weight_decay": 0.05},
            {"params": [p for p in others if p.dim() != 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self.adam = torch.optim.AdamW(groups, lr=other_rate, betas=(0.9, 0.95), fused=True)

    def step(self, scale: float) -> None:
        """Take one step with the gradients at hand, then drop them."""
        torch.nn.utils.clip_grad_norm_(self.others, CLIP)
        for group in self.adam.param_groups:
            group["lr"] = self.other_rate * scale
        self.adam.step()
        self.muon.step(scale)
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, object]:
        """What a checkpoint keeps."""
        return {"muon": list(self.muon.momentum.values()), "adam": self.adam.state_dict()}

    def restore(self, state: dict[str, object]) -> None:
        """Take over what `state` returned."""
        momentum, adam = state["muon"], state["adam"]
        assert isinstance(momentum, list)
        assert isinstance(adam, dict)
        self.muon.momentum = dict(zip(self.muon.groups, momentum, strict=True))
        self.adam.load_state_dict(adam)
