"""A backend that records steps on any device, and is stricter than any device that records.

Operators are taken as wholes, torch's own calls one by one. What is filled before each replay is
spoilt after it, so whoever forgets to fill a part is found out; nothing may read values on the host
or make tensors of the host's values while recording.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

from torch import Tensor

from surefoot.backend.noise import NoiseKey
from surefoot.backend.operands import (
    CacheShape,
    Compression,
    DeltaCaches,
    DeltaInputs,
    Entries,
    Fold,
    LatentPages,
    Latents,
    LayoutBounds,
    Placing,
    RowLayout,
    StreamGates,
    Weight,
)
from surefoot.backend.protocol import Backend, Experts, Linear, Recording
from surefoot.backend.row_operators import RowOperators
from surefoot.backend.tape import Tape, poison

P = ParamSpec("P")
R = TypeVar("R")

_RECORDINGS = 64


class Tapes:
    """Hands calls to the tape that is being recorded, if one is."""

    def __init__(self) -> None:
        """No tape runs."""
        self.running: list[Tape] = []

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function, as a whole if a tape runs."""
        if self.running:
            return self.running[-1].call(function, *args, **kwargs)
        return function(*args, **kwargs)


@dataclass(frozen=True)
class _Linear:
    inner: Linear
    tapes: Tapes

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self.tapes.call(self.inner.__call__, x)

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        return self.tapes.call(self.inner.add, x, stream)


class RecordedRows:
    """Rows of a step that may come to lie elsewhere."""

    def __init__(self, layout: RowLayout, backend: Backend, tapes: Tapes) -> None:
        """Begin with the rows of `layout`."""
        self._backend, self._tapes = backend, tapes
        self._size = len(layout.first), layout.starts[-1]
        self.move(layout)

    def move(self, layout: RowLayout) -> None:
        """Take the rows of another step of as many rows and tokens."""
        size = len(layout.first), layout.starts[-1]
        assert size == self._size, f"{size} rows and tokens, recorded were {self._size}"
        self.inner = self._backend.rows(layout)

    def paged_write(self, pool: Tensor, entries: Tensor) -> None:
        """See RowOperators."""

        def now(pool: Tensor, entries: Tensor) -> None:
            return self.inner.paged_write(pool, entries)

        self._tapes.call(now, pool, entries)

    def paged_attention(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float) -> Tensor:
        """See RowOperators."""

        def now(q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float) -> Tensor:
            return self.inner.paged_attention(q, k_pool, v_pool, scale)

        return self._tapes.call(now, q, k_pool, v_pool, scale)

    def attend_pages(
        self,
        q_and_k: Tensor,
        v: Tensor,
        placing: Placing,
        pools: tuple[Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        """See RowOperators."""

        def now(
            q_and_k: Tensor, v: Tensor, placing: Placing, pools: tuple[Tensor, Tensor], scale: float
        ) -> Tensor:
            return self.inner.attend_pages(q_and_k, v, placing, pools, scale)

        return self._tapes.call(now, q_and_k, v, placing, pools, scale)

    def ring_write(self, ring: Tensor, entries: Tensor) -> None:
        """See RowOperators."""

        def now(ring: Tensor, entries: Tensor) -> None:
            return self.inner.ring_write(ring, entries)

        self._tapes.call(now, ring, entries)

    def window_attention(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        rings: tuple[Tensor, Tensor],
        window: int,
        scale: float,
    ) -> Tensor:
        """See RowOperators."""

        def now(
            q: Tensor,
            kv: tuple[Tensor, Tensor],
            rings: tuple[Tensor, Tensor],
            window: int,
            scale: float,
        ) -> Tensor:
            return self.inner.window_attention(q, kv, rings, window, scale)

        return self._tapes.call(now, q, kv, rings, window, scale)

    def causal_conv(self, x: Tensor, ring: Tensor, weight: Tensor) -> Tensor:
        """See RowOperators."""

        def now(x: Tensor, ring: Tensor, weight: Tensor) -> Tensor:
            return self.inner.causal_conv(x, ring, weight)

        return self._tapes.call(now, x, ring, weight)

    def delta_rule(self, inputs: DeltaInputs, caches: DeltaCaches) -> Tensor:
        """See RowOperators."""

        def now(inputs: DeltaInputs, caches: DeltaCaches) -> Tensor:
            return self.inner.delta_rule(inputs, caches)

        return self._tapes.call(now, inputs, caches)

    def compress(self, raw: Tensor, ring: Tensor, pool: Tensor, form: Compression) -> None:
        """See RowOperators."""

        def now(raw: Tensor, ring: Tensor, pool: Tensor, form: Compression) -> None:
            return self.inner.compress(raw, ring, pool, form)

        self._tapes.call(now, raw, ring, pool, form)

    def choose_entries(
        self, q: Tensor, weights: Tensor, pool: Tensor, ratio: int, count: int
    ) -> Tensor:
        """See RowOperators."""

        def now(q: Tensor, weights: Tensor, pool: Tensor, ratio: int, count: int) -> Tensor:
            return self.inner.choose_entries(q, weights, pool, ratio, count)

        return self._tapes.call(now, q, weights, pool, ratio, count)

    def attend_latents(
        self, q: Tensor, latents: Latents, entries: Entries | None, sinks: Tensor, scale: float
    ) -> Tensor:
        """See RowOperators."""

        def now(
            q: Tensor, latents: Latents, entries: Entries | None, sinks: Tensor, scale: float
        ) -> Tensor:
            return self.inner.attend_latents(q, latents, entries, sinks, scale)

        return self._tapes.call(now, q, latents, entries, sinks, scale)

    def attend_chosen(
        self, q: Tensor, turned: Tensor, keys: LatentPages, chosen: Tensor | None, scale: float
    ) -> Tensor:
        """See RowOperators."""

        def now(
            q: Tensor, turned: Tensor, keys: LatentPages, chosen: Tensor | None, scale: float
        ) -> Tensor:
            return self.inner.attend_chosen(q, turned, keys, chosen, scale)

        return self._tapes.call(now, q, turned, keys, chosen, scale)


class RecordedReplay:
    """A backend over another one: the same numbers, and steps can be recorded."""

    def __init__(self, inner: Backend) -> None:
        """Record what `inner` computes."""
        self._inner, self._tapes = inner, Tapes()
        self.capabilities = replace(
            inner.capabilities, recordings=_RECORDINGS, padded_recordings=True
        )
        self.device = inner.device
        self.recordings: list[TapedRecording] = []

    def prepare(self, progress: Callable[[str], None]) -> None:
        """See Backend."""
        self._inner.prepare(progress)

    def free_memory(self) -> int:
        """See Backend."""
        return self._inner.free_memory()

    def check_caches(self, caches: Sequence[CacheShape], page_tokens: int) -> None:
        """See Backend."""
        self._inner.check_caches(caches, page_tokens)

    def read(self, numbers: Tensor) -> list[int]:
        """See Backend."""
        return self._inner.read(numbers)

    def rows(self, layout: RowLayout) -> RowOperators:
        """See Backend."""
        return RecordedRows(layout, self._inner, self._tapes)

    def record(
        self,
        layout: RowLayout,
        bounds: LayoutBounds,
        inputs: Sequence[Tensor],
        work: Callable[[RowOperators], Sequence[Tensor]],
    ) -> Recording:
        """See Backend."""
        rows, tape = RecordedRows(layout, self._inner, self._tapes), Tape()
        self._tapes.running.append(tape)
        try:
            with tape.recording(keep=False):
                outputs = work(rows)
        finally:
            self._tapes.running.pop()
        self.recordings.append(TapedRecording(tape, rows, outputs, inputs, bounds))
        return self.recordings[-1]

    def pack_linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """See Backend."""
        return _Linear(self._inner.pack_linear(weight, bias), self._tapes)

    def pack_gated(
        self, weight: Weight, bias: Tensor | None, limit: float = math.inf
    ) -> Callable[[Tensor], Tensor]:
        """See Backend."""
        return self._whole(self._inner.pack_gated(weight, bias, limit))

    def pack_experts(self, gate_up: Weight, down: Weight, limit: float = math.inf) -> Experts:
        """See Backend."""
        return self._whole(self._inner.pack_experts(gate_up, down, limit))

    def pack_angles(
        self, frequencies: Tensor, factor: float, passing: int
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """See Backend."""
        return self._whole(self._inner.pack_angles(frequencies, factor, passing))

    def _whole(self, function: Callable[P, R]) -> Callable[P, R]:
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return self._tapes.call(function, *args, **kwargs)

        return call

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""
        return self._tapes.call(self._inner.rms_norm, x, weight, eps)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See Backend."""
        return self._tapes.call(self._inner.rotary, x, cos, sin)

    def choose_experts(self, scores: Tensor, bias: Tensor, n: int) -> Tensor:
        """See Backend."""
        return self._tapes.call(self._inner.choose_experts, scores, bias, n)

    def weigh_experts(self, scores: Tensor, choice: Tensor, scale: float) -> Tensor:
        """See Backend."""
        return self._tapes.call(self._inner.weigh_experts, scores, choice, scale)

    def enter_streams(
        self, streams: Tensor, products: Tensor, gates: StreamGates
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Backend."""
        return self._tapes.call(self._inner.enter_streams, streams, products, gates)

    def read_streams(self, streams: Tensor, shares: Tensor) -> Tensor:
        """See Backend."""
        return self._tapes.call(self._inner.read_streams, streams, shares)

    def write_streams(
        self, streams: Tensor, out: Tensor, factors: Tensor, mixing: Tensor
    ) -> Tensor:
        """See Backend."""
        return self._tapes.call(self._inner.write_streams, streams, out, factors, mixing)

    def top_k(self, scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """See Backend."""
        return self._tapes.call(self._inner.top_k, scores, n)

    def clean(self, entries: Tensor, tokens: Tensor) -> None:
        """See Backend."""
        self._tapes.call(self._inner.clean, entries, tokens)

    def pick_rows(self, table: Tensor, places: Tensor) -> Tensor:
        """See Backend."""
        return self._tapes.call(self._inner.pick_rows, table, places)

    def join_tokens(
        self, tokens: Tensor, table: Tensor, states: Tensor, norms: Tensor, eps: float
    ) -> Tensor:
        """See Backend."""
        return self._tapes.call(self._inner.join_tokens, tokens, table, states, norms, eps)

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """See Backend."""
        return self._tapes.call(self._inner.gate, x, gate)

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""
        return self._tapes.call(self._inner.gated_norm, x, gate, weight, eps)

    def delta_gates(
        self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See Backend."""
        return self._tapes.call(self._inner.delta_gates, a, b, a_log, dt_bias)

    def choose(
        self, scores: Tensor, temperatures: Sequence[float], keys: Sequence[NoiseKey]
    ) -> Tensor:
        """See Backend; never part of a recording."""
        return self._inner.choose(scores, temperatures, keys)

    def fold_delta(self, caches: DeltaCaches, folds: Sequence[Fold]) -> None:
        """See Backend; never part of a recording."""
        self._inner.fold_delta(caches, folds)


class TapedRecording:
    """A recorded step; what is filled before a replay does not outlive it.

    Attributes:
        outputs: what the work returned.
        replays: how often it was replayed.
    """

    def __init__(
        self,
        tape: Tape,
        rows: RecordedRows,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        bounds: LayoutBounds,
    ) -> None:
        """Replay `tape`, whose rows and inputs change from one replay to the next."""
        self._tape, self._rows, self._inputs = tape, rows, inputs
        self._bounds = bounds
        self.outputs = outputs
        self.replays = 0
        self._spoil()

    def replay(self, layout: RowLayout) -> None:
        """See Recording."""
        longest = max(len(table) for table in layout.tables)
        assert longest <= self._bounds.longest_table, f"a table of {longest} pages"
        assert self._bounds.bounded or not any(layout.visible_from), "a row sees less than all"
        self._rows.move(layout)
        self._tape.replay()
        self._spoil()
        self.replays += 1

    def _spoil(self) -> None:
        for tensor in self._inputs:
            poison(tensor)
