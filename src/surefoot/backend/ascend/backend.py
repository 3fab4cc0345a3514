"""The Ascend NPU backend: the vendor's public operators, and torch's where it has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from surefoot.backend.ascend.angles import AngleTables
from surefoot.backend.ascend.choose import choose
from surefoot.backend.ascend.delta import fold_delta
from surefoot.backend.ascend.experts import AscendExperts, FloatGroups, Groups
from surefoot.backend.ascend.graph import AscendRecording
from surefoot.backend.ascend.group_scales import GroupScaledExperts, GroupScaledLinear
from surefoot.backend.ascend.heads import rms_norm, rotary
from surefoot.backend.ascend.int8 import Int8Groups, Int8Linear
from surefoot.backend.ascend.limits import beyond_limits
from surefoot.backend.ascend.linear import AscendGated, AscendLinear
from surefoot.backend.ascend.places import Places
from surefoot.backend.ascend.rows import CAUSAL_MASK, AscendRows
from surefoot.backend.ascend.vendor import Vendor
from surefoot.backend.blockwise.gates import delta_gates, sigmoid_gate, swish
from surefoot.backend.noise import NoiseKey
from surefoot.backend.operands import (
    CacheShape,
    DeltaCaches,
    Fold,
    Int8Weight,
    LayoutBounds,
    RowLayout,
    Weight,
)
from surefoot.backend.plain_joins import PlainJoins
from surefoot.backend.plain_routers import PlainRouters
from surefoot.backend.plain_streams import PlainStreams
from surefoot.backend.protocol import Capabilities, Experts, Linear, Recording
from surefoot.backend.row_operators import RowOperators


@dataclass(frozen=True)
class Machine:
    """What the operators run on.

    Attributes:
        vendor: the operators.
        device: where tensors live.
        capabilities: what the backend may promise on it.
        misfit: is told of sizes that the operators do not take.
    """

    vendor: Vendor
    device: torch.device
    capabilities: Capabilities
    misfit: Callable[[Sequence[str]], None]


class AscendBackend(PlainStreams, PlainRouters, PlainJoins):
    """Operators on an NPU, or on the CPU by the emulation."""

    def __init__(self, machine: Machine) -> None:
        """Compute on a machine."""
        self.capabilities, self.device = machine.capabilities, machine.device
        self._vendor, self._misfit = machine.vendor, machine.misfit
        self._recordings: WeakSet[AscendRecording] = WeakSet()
        side = (CAUSAL_MASK, CAUSAL_MASK)
        self._triangle = torch.ones(side, dtype=torch.bool, device=self.device).triu(1)

    def prepare(self, progress: Callable[[str], None]) -> None:
        """See Backend: there is nothing to do."""

    def check_caches(self, caches: Sequence[CacheShape], page_tokens: int) -> None:
        """See Backend."""
        if reasons := beyond_limits(caches, page_tokens):
            self._misfit(reasons)

    def free_memory(self) -> int:
        """See Backend."""
        return self._vendor.npu.mem_get_info()[0]

    def rows(self, layout: RowLayout) -> RowOperators:
        """See Backend."""
        return self._rows(Places.of(layout, self.device))

    def _rows(self, places: Places) -> AscendRows:
        return AscendRows(places, self._vendor, self._triangle)

    def record(
        self,
        layout: RowLayout,
        bounds: LayoutBounds,
        inputs: Sequence[Tensor],
        work: Callable[[RowOperators], Sequence[Tensor]],
    ) -> Recording | None:
        """See Backend."""
        if len(self._recordings) >= self.capabilities.recordings:
            return None
        places = Places(layout, bounds, self.device)
        recording = AscendRecording(places, self._rows, work, self._vendor)
        self._recordings.add(recording)
        return recording

    def read(self, numbers: Tensor) -> list[int]:
        """See Backend."""
        values: list[int] = numbers.tolist()
        return values

    def pack_linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """See Backend."""
        if isinstance(weight, Int8Weight):
            form = GroupScaledLinear if weight.groups else Int8Linear
            return form.of(weight, bias, self.device, self._vendor)
        moved = None if bias is None else bias.to(self.device)
        return AscendLinear(weight.to(self.device), moved, self._vendor)

    def pack_gated(
        self, weight: Weight, bias: Tensor | None, limit: float = math.inf
    ) -> Callable[[Tensor], Tensor]:
        """See Backend."""
        return AscendGated(self.pack_linear(weight, bias), limit, self._vendor)

    def pack_experts(self, gate_up: Weight, down: Weight, limit: float = math.inf) -> Experts:
        """See Backend."""
        groups = self._groups(gate_up), self._groups(down)
        return AscendExperts(gate_up.shape[0], *groups, limit, self._vendor)

    def _groups(self, weight: Weight) -> Groups:
        if isinstance(weight, Int8Weight):
            form = GroupScaledExperts if weight.groups else Int8Groups
            return form.of(weight, self.device, self._vendor)
        return FloatGroups(weight.to(self.device).mT.contiguous(), self._vendor)

    def pack_angles(
        self, frequencies: Tensor, factor: float, passing: int
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """See Backend."""
        return AngleTables(frequencies, factor, passing, self.device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""
        return rms_norm(self._vendor, x, weight, eps)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See Backend."""
        return rotary(x, cos, sin)

    def top_k(self, scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """See Backend: a stable sort keeps the lowest index first among equals."""
        values, indices = torch.sort(scores, dim=1, descending=True, stable=True)
        return values[:, :n], indices[:, :n]

    def choose(
        self, scores: Tensor, temperatures: Sequence[float], keys: Sequence[NoiseKey]
    ) -> Tensor:
        """See Backend."""
        return choose(scores, temperatures, keys)

    def clean(self, entries: Tensor, tokens: Tensor) -> None:
        """See Backend."""
        cleaned = entries.index_select(0, tokens).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        entries.index_copy_(0, tokens, cleaned)

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
        fold_delta(self._vendor, caches, folds)
