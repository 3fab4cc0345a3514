"""The fast backend for CPUs: prepacked linears, batched attention, bitwise by default."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import psutil
import torch
from torch import Tensor

from surefoot.backend.blockwise.attention import ProductShape, Widths, least_tile_width
from surefoot.backend.blockwise.backend import BlockwiseBackend
from surefoot.backend.blockwise.blocks import DeltaShape
from surefoot.backend.blockwise.linear import PlainGated
from surefoot.backend.blockwise.recurrent import least_new_width
from surefoot.backend.cpu.experts import CompiledExperts, CompiledGated
from surefoot.backend.cpu.grouped import pack_int8
from surefoot.backend.cpu.halves import HalvesLinear, suits_vectors
from surefoot.backend.cpu.int8 import Int8Gated
from surefoot.backend.cpu.kernels import choose as choosing
from surefoot.backend.cpu.kernels import prepare_kernels, routed, rowwise
from surefoot.backend.cpu.kernels import streams as mixed
from surefoot.backend.cpu.linear import RowInvariant, pack_fast
from surefoot.backend.cpu.pieces import PiecesGated, PiecesLinear, suits_unit
from surefoot.backend.cpu.recording import record_step
from surefoot.backend.cpu.rows import CompiledRows, are_float32, fold_delta, rows_packed
from surefoot.backend.cpu.threads import threads_for
from surefoot.backend.noise import NoiseKey
from surefoot.backend.operands import (
    DeltaCaches,
    Fold,
    Int8Weight,
    LayoutBounds,
    RowLayout,
    StreamGates,
    Weight,
    experts_of,
)
from surefoot.backend.protocol import UNCHOSEN, Capabilities, Experts, Linear, Recording
from surefoot.backend.row_operators import RowOperators

_RECORDINGS = 192


class CpuBackend(BlockwiseBackend):
    """Products of packed weights and compiled loops over rows: no row's bits depend on another."""

    def __init__(self, bitwise: bool = True) -> None:
        """Choose between forms that keep a row's bits however the work is cut, and the quickest."""
        self.capabilities = Capabilities(
            name="cpu",
            bitwise=bitwise,
            dtypes=("float32", "bfloat16"),
            page_tokens=32,
            max_draft_tokens=16,
            recordings=_RECORDINGS,
            padded_recordings=False,
            int8=True,
        )
        self.invariant = RowInvariant()
        self._tile_widths: dict[ProductShape, int] = {}
        self._new_widths: dict[DeltaShape, int] = {}
        super().__init__(torch.device("cpu"), Widths(self._tile_width, self._new_width))

    def prepare(self, progress: Callable[[str], None]) -> None:
        """See Backend: compile the kernels."""
        prepare_kernels(progress)

    def pack_linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """See Backend."""
        if isinstance(weight, Int8Weight):
            return pack_int8(weight, bias)
        if suits_unit(weight):
            return PiecesLinear.pack(weight, bias)
        if suits_vectors(weight):
            return HalvesLinear.pack(weight, bias)
        if self.capabilities.bitwise:
            return self.invariant.pack(weight, bias)
        return pack_fast(weight, bias)

    def pack_gated(
        self, weight: Weight, bias: Tensor | None, limit: float = math.inf
    ) -> Callable[[Tensor], Tensor]:
        """See Backend."""
        if isinstance(weight, Int8Weight):
            return Int8Gated(pack_int8(weight, bias), limit)
        if suits_unit(weight):
            return PiecesGated.pack(weight, bias, limit)
        both = self.pack_linear(weight, bias)
        if weight.dtype == torch.float32:
            return CompiledGated(both, limit)
        return PlainGated(both, limit)

    def pack_experts(self, gate_up: Weight, down: Weight, limit: float = math.inf) -> Experts:
        """See Backend."""
        weights = (gate_up, down)
        if any(isinstance(each, Tensor) and each.dtype != torch.float32 for each in weights):
            return super().pack_experts(gate_up, down, limit)
        packed = [
            tuple(self.pack_linear(one, None) for one in experts_of(each)) for each in weights
        ]
        return CompiledExperts(packed[0], packed[1], limit)

    def choose_experts(self, scores: Tensor, bias: Tensor, n: int) -> Tensor:
        """See Backend."""
        choice = torch.empty(len(scores), n, dtype=torch.int64)
        routed.choose_experts(scores.numpy(), bias.numpy(), choice.numpy())
        return choice

    def weigh_experts(self, scores: Tensor, choice: Tensor, scale: float) -> Tensor:
        """See Backend."""
        weights = torch.empty(choice.shape)
        routed.weigh_experts(scores.numpy(), choice.numpy(), np.float32(scale), weights.numpy())
        return weights

    def rows(self, layout: RowLayout) -> RowOperators:
        """See Backend."""
        return CompiledRows(layout, self._widths)

    def record(
        self,
        layout: RowLayout,
        bounds: LayoutBounds,
        inputs: Sequence[Tensor],
        work: Callable[[RowOperators], Sequence[Tensor]],
    ) -> Recording | None:
        """See Backend."""
        return record_step(layout, bounds, self._widths, inputs, work)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""
        if not are_float32(x, weight):
            return super().rms_norm(x, weight, eps)
        out = torch.empty(x.shape)
        by_head = (-1, *x.shape[-2:]) if x.dim() == 3 else (-1, 1, x.shape[-1])
        rowwise.rms_norm(
            rows_packed(x).numpy().reshape(by_head),
            weight.numpy().reshape(-1, x.shape[-1]),
            np.float32(eps),
            out.numpy().reshape(by_head),
        )
        return out

    def pick_rows(self, table: Tensor, places: Tensor) -> Tensor:
        """See Backend."""
        if not (are_float32(table) and table.is_contiguous()):
            return super().pick_rows(table, places)
        out = torch.empty(len(places), *table.shape[1:])
        rowwise.pick_rows(table.flatten(1).numpy(), places.numpy(), out.flatten(1).numpy())
        return out

    def join_tokens(
        self, tokens: Tensor, table: Tensor, states: Tensor, norms: Tensor, eps: float
    ) -> Tensor:
        """See Backend."""
        if not are_float32(table, states, norms):
            return super().join_tokens(tokens, table, states, norms, eps)
        assert states.shape == (len(tokens), table.shape[1]), "states do not fit the tokens"
        out = torch.empty(len(tokens), 2, table.shape[1])
        rowwise.join_tokens(
            tokens.numpy(),
            table.numpy(),
            states.contiguous().numpy(),
            norms.numpy(),
            np.float32(eps),
            out.numpy(),
        )
        return out.flatten(1)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See Backend."""
        if not are_float32(x, cos, sin):
            return super().rotary(x, cos, sin)
        assert cos.shape == sin.shape == (x.shape[0], 1, x.shape[2]), "angles are for other heads"
        out = torch.empty(x.shape)
        rowwise.rotary(x.numpy(), cos.numpy()[:, 0], sin.numpy()[:, 0], out.numpy())
        return out

    def choose(
        self, scores: Tensor, temperatures: Sequence[float], keys: Sequence[NoiseKey]
    ) -> Tensor:
        """See Backend."""
        assert len(scores) == len(temperatures) == len(keys), "rows do not agree"
        tokens = torch.empty(len(keys), dtype=torch.long)
        words = np.array(keys, dtype=np.int32).view(np.uint32).reshape(-1, 2)
        warmths = np.array(temperatures, dtype=np.float32)
        choosing.choose(
            scores.contiguous().numpy(),
            warmths,
            words,
            UNCHOSEN,
            tokens.numpy(),
            threads_for(len(keys), scores.numel()),
        )
        return tokens

    def clean(self, entries: Tensor, tokens: Tensor) -> None:
        """See Backend."""
        if not are_float32(entries):
            super().clean(entries, tokens)
        else:
            rowwise.clean(entries.numpy(), tokens.numpy())

    def pack_angles(
        self, frequencies: Tensor, factor: float, passing: int
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """See Backend."""
        width = 2 * (len(frequencies) + passing)

        def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
            both = torch.empty(2, len(positions), 1, width)
            rowwise.angles(positions.numpy(), frequencies.numpy(), factor, both.numpy()[:, :, 0])
            return both[0], both[1]

        return angles

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """See Backend."""
        tokens, width = x.shape[0], x[0].numel() if len(x) else 0
        fits = width and (gate.shape == x.shape or (x.dim() == 2 and gate.shape == (tokens, 1)))
        if not fits or not are_float32(x, gate):
            return super().gate(x, gate)
        out = torch.empty(x.shape)
        rowwise.gate(
            rows_packed(x).numpy().reshape(tokens, -1),
            rows_packed(gate).numpy().reshape(tokens, -1),
            out.numpy().reshape(tokens, -1),
        )
        return out

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""
        if x.dim() != 3 or not are_float32(x, gate, weight):
            return super().gated_norm(x, gate, weight, eps)
        out = torch.empty(x.shape)
        inputs = rows_packed(x).numpy(), rows_packed(gate).numpy()
        rowwise.gated_norm(*inputs, weight.numpy(), np.float32(eps), out.numpy())
        return out

    def delta_gates(
        self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See Backend."""
        if not are_float32(a, b, a_log, dt_bias):
            return super().delta_gates(a, b, a_log, dt_bias)
        decay, beta = torch.empty(a.shape), torch.empty(a.shape)
        rowwise.delta_gates(
            a.numpy(), b.numpy(), a_log.numpy(), dt_bias.numpy(), decay.numpy(), beta.numpy()
        )
        return decay, beta

    def fold_delta(self, caches: DeltaCaches, folds: Sequence[Fold]) -> None:
        """See Backend."""
        fold_delta(caches, folds)

    def enter_streams(
        self, streams: Tensor, products: Tensor, gates: StreamGates
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Backend."""
        if not are_float32(streams, gates.norm):
            return super().enter_streams(streams, products, gates)
        tokens, count, size = streams.shape
        out, factors = torch.empty(tokens, size), torch.empty(tokens, count)
        mixing = torch.empty(tokens, count, count)
        mixed.enter_streams(
            streams.numpy(),
            products.numpy(),
            gates.base.numpy(),
            gates.scale.numpy(),
            gates.rounds,
            np.float32(gates.eps),
            gates.norm.numpy(),
            np.float32(gates.norm_eps),
            out.numpy(),
            factors.numpy(),
            mixing.numpy(),
        )
        return out, factors, mixing

    def read_streams(self, streams: Tensor, shares: Tensor) -> Tensor:
        """See Backend."""
        if not are_float32(streams):
            return super().read_streams(streams, shares)
        out = torch.empty(streams.shape[0], streams.shape[2])
        mixed.read_streams(streams.numpy(), shares.numpy(), out.numpy())
        return out

    def write_streams(
        self, streams: Tensor, out: Tensor, factors: Tensor, mixing: Tensor
    ) -> Tensor:
        """See Backend."""
        if not are_float32(streams, out):
            return super().write_streams(streams, out, factors, mixing)
        made = torch.empty(streams.shape)
        mixed.write_streams(
            streams.numpy(), out.numpy(), factors.numpy(), mixing.numpy(), made.numpy()
        )
        return made

    def free_memory(self) -> int:
        """See Backend."""
        return int(psutil.virtual_memory().available)

    def _tile_width(self, shape: ProductShape) -> int:
        """Least tokens per attention tile, measured once for each shape."""
        if not self.capabilities.bitwise:
            return 1
        if shape not in self._tile_widths:
            self._tile_widths[shape] = least_tile_width(shape)
        return self._tile_widths[shape]

    def _new_width(self, shape: DeltaShape) -> int:
        """Least new positions per block of the gated delta rule, measured once for each shape."""
        if not self.capabilities.bitwise:
            return 1
        if shape not in self._new_widths:
            self._new_widths[shape] = least_new_width(shape)
        return self._new_widths[shape]
