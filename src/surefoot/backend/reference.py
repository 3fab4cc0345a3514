"""The readable truth: every operator in the plainest form, one row at a time.

Other backends are tested against this one; it is not meant to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import psutil
import torch
from torch import Tensor

from surefoot.backend.angles import rotary_angles
from surefoot.backend.noise import NoiseField, NoiseKey
from surefoot.backend.operands import DeltaCaches, Fold, Int8Weight, RowLayout, Weight, experts_of
from surefoot.backend.order import argmax_rows, temper
from surefoot.backend.plain_int8 import PlainInt8Linear
from surefoot.backend.plain_joins import PlainJoins
from surefoot.backend.plain_routers import PlainRouters
from surefoot.backend.plain_streams import PlainStreams
from surefoot.backend.protocol import UNCHOSEN, Capabilities, Experts, Linear
from surefoot.backend.reference_delta import fold_block
from surefoot.backend.reference_rows import ReferenceRows
from surefoot.backend.row_operators import RowOperators
from surefoot.backend.unrecorded import Unrecorded


@dataclass(frozen=True)
class ReferenceLinear:
    """y = x W^T + b, each token on its own, so that no token sees how many others there are."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        y = x.new_empty(x.shape[0], self.weight.shape[0])
        for token in range(x.shape[0]):
            y[token] = torch.mv(self.weight, x[token])
        return y if self.bias is None else y + self.bias

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        return stream + self(x)


@dataclass(frozen=True)
class ReferenceExperts:
    """Experts, token by token.

    Attributes:
        gate_up: of each expert, [T, hidden] to [T, 2 * inner].
        down: of each expert, [T, inner] to [T, hidden].
        limit: see Backend.pack_gated.
    """

    gate_up: tuple[Linear, ...]
    down: tuple[Linear, ...]
    limit: float

    def __call__(self, x: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        """See Experts."""
        out = torch.zeros_like(x)
        for token, experts in enumerate(choice.tolist()):
            for place, expert in enumerate(experts):
                if expert < 0:
                    continue
                gate, up = self.gate_up[expert](x[token][None]).chunk(2, dim=1)
                gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
                inner = gate / (1 + torch.exp(-gate)) * up
                out[token] += weights[token, place] * self.down[expert](inner)[0]
        return out


class ReferenceBackend(PlainStreams, PlainRouters, PlainJoins, Unrecorded):
    """All operators in float32 on the CPU."""

    def __init__(self) -> None:
        """Take no settings: there is one way to be plain."""
        self.capabilities = Capabilities(
            name="reference",
            bitwise=True,
            dtypes=("float32",),
            page_tokens=16,
            max_draft_tokens=64,
            recordings=0,
            int8=True,
        )
        self.device = torch.device("cpu")

    def prepare(self, progress: Callable[[str], None]) -> None:
        """See Backend: there is nothing to do."""

    def pack_linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """See Backend."""
        if isinstance(weight, Int8Weight):
            return PlainInt8Linear(weight, bias)
        return ReferenceLinear(weight.float(), None if bias is None else bias.float())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    def pack_gated(
        self, weight: Weight, bias: Tensor | None, limit: float = math.inf
    ) -> Callable[[Tensor], Tensor]:
        """See Backend."""
        both = self.pack_linear(weight, bias)

        def gated(x: Tensor) -> Tensor:
            gate, up = both(x).chunk(2, dim=-1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return gate / (1 + torch.exp(-gate)) * up

        return gated

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See Backend."""
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((second, first), dim=-1) * sin

    def free_memory(self) -> int:
        """See Backend."""
        return int(psutil.virtual_memory().available)

    def rows(self, layout: RowLayout) -> RowOperators:
        """See Backend."""
        return ReferenceRows(layout)

    def pack_experts(self, gate_up: Weight, down: Weight, limit: float = math.inf) -> Experts:
        """See Backend."""
        gates, outs = (
            tuple(self.pack_linear(expert, None) for expert in experts_of(weight))
            for weight in (gate_up, down)
        )
        return ReferenceExperts(gates, outs, limit)

    def top_k(self, scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """See Backend."""
        ranked = [
            sorted(range(len(row)), key=lambda index: (-row[index], index))[:n]
            for row in scores.tolist()
        ]
        indices = torch.tensor(ranked, dtype=torch.long).view(-1, n)
        return scores.gather(1, indices), indices

    def choose(
        self, scores: Tensor, temperatures: Sequence[float], keys: Sequence[NoiseKey]
    ) -> Tensor:
        """See Backend."""
        tokens = []
        for row, temperature, key in zip(scores, temperatures, keys, strict=True):
            peak = row.amax()
            totals = row[None]
            if temperature:
                noise = NoiseField(len(row), self.device).gumbel(key)
                totals = temper(totals, peak[None], [temperature]) + noise
            tokens.append(int(argmax_rows(totals)) if peak.isfinite() else UNCHOSEN)
        return torch.tensor(tokens, dtype=torch.long)

    def read(self, numbers: Tensor) -> list[int]:
        """See Backend."""
        values: list[int] = numbers.tolist()
        return values

    def clean(self, entries: Tensor, tokens: Tensor) -> None:
        """See Backend."""
        entries[tokens] = torch.where(entries[tokens].isfinite(), entries[tokens], 0.0)

    def pack_angles(
        self, frequencies: Tensor, factor: float, passing: int
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """See Backend."""
        return partial(rotary_angles, frequencies, factor, passing)

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """See Backend."""
        return x * (1 / (1 + torch.exp(-gate)))

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""
        return self.rms_norm(x, weight, eps) * (gate / (1 + torch.exp(-gate)))

    def delta_gates(
        self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See Backend."""
        x = a + dt_bias
        softplus = torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)
        return -torch.exp(a_log) * softplus, 1 / (1 + torch.exp(-b))

    def fold_delta(self, caches: DeltaCaches, folds: Sequence[Fold]) -> None:
        """See Backend."""
        for fold in folds:
            fold_block(caches, fold)
