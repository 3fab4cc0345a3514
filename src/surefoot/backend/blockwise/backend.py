"""What devices that run the framework's own operators have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from surefoot.backend.angles import rotary_angles
from surefoot.backend.blockwise.attention import BlockwiseRows, Widths
from surefoot.backend.blockwise.choose import choose
from surefoot.backend.blockwise.experts import pack_experts, top_k
from surefoot.backend.blockwise.folding import Folder
from surefoot.backend.blockwise.gates import delta_gates, sigmoid_gate, swish
from surefoot.backend.blockwise.heads import rms_norm, rotary
from surefoot.backend.noise import NoiseKey
from surefoot.backend.operands import DeltaCaches, Fold, RowLayout, Weight
from surefoot.backend.plain_joins import PlainJoins
from surefoot.backend.plain_routers import PlainRouters
from surefoot.backend.plain_streams import PlainStreams
from surefoot.backend.protocol import Experts, Linear
from surefoot.backend.row_operators import RowOperators
from surefoot.backend.unrecorded import Unrecorded


class BlockwiseBackend(PlainStreams, PlainRouters, PlainJoins, Unrecorded, ABC):
    """Operators of one step in blockwise form; linears are each device's own."""

    def __init__(self, device: torch.device, widths: Widths) -> None:
        """Compute on `device` in tiles of at least these widths."""
        self.device = device
        self._widths = widths
        self._folder = Folder(widths.delta)

    @abstractmethod
    def prepare(self, progress: Callable[[str], None]) -> None:
        """See Backend."""

    @abstractmethod
    def pack_linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """See Backend."""

    @abstractmethod
    def pack_gated(
        self, weight: Weight, bias: Tensor | None, limit: float = math.inf
    ) -> Callable[[Tensor], Tensor]:
        """See Backend."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""
        return rms_norm(x, weight, eps)

    def rows(self, layout: RowLayout) -> RowOperators:
        """See Backend."""
        return BlockwiseRows(layout, self._widths, self.device)

    def pack_experts(self, gate_up: Weight, down: Weight, limit: float = math.inf) -> Experts:
        """See Backend."""
        gated = partial(self.pack_gated, limit=limit)
        return pack_experts(gate_up, down, gated, self.pack_linear)

    def top_k(self, scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """See Backend."""
        return top_k(scores, n)

    def choose(
        self, scores: Tensor, temperatures: Sequence[float], keys: Sequence[NoiseKey]
    ) -> Tensor:
        """See Backend."""
        return choose(scores, temperatures, keys)

    def read(self, numbers: Tensor) -> list[int]:
        """See Backend."""
        values: list[int] = numbers.tolist()
        return values

    def clean(self, entries: Tensor, tokens: Tensor) -> None:
        """See Backend."""
        cleaned = entries.index_select(0, tokens).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        entries.index_copy_(0, tokens, cleaned)

    def pack_angles(
        self, frequencies: Tensor, factor: float, passing: int
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """See Backend."""
        return partial(rotary_angles, frequencies, factor, passing)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See Backend."""
        return rotary(x, cos, sin)

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """See Backend."""
        return sigmoid_gate(x, gate)

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""
        return swish(self.rms_norm(x.float(), weight.float(), eps), gate).to(x.dtype)

    def delta_gates(
        self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See Backend."""
        return delta_gates(a, b, a_log, dt_bias)

    def fold_delta(self, caches: DeltaCaches, folds: Sequence[Fold]) -> None:
        """See Backend."""
        self._folder(caches, folds)
