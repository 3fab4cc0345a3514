"""Row operators of one step by compiled kernels, for float32; other types take the tiled form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from surefoot.backend.blockwise.attention import BlockwiseRows, Widths
from surefoot.backend.cpu.kernels import attention, delta, rowwise, writes
from surefoot.backend.cpu.kernels import chosen as looked_at
from surefoot.backend.cpu.kernels import latents as kernels
from surefoot.backend.cpu.threads import threads_for
from surefoot.backend.operands import (
    Compression,
    DeltaCaches,
    DeltaInputs,
    Entries,
    Fold,
    LatentPages,
    Latents,
    Placing,
    RowLayout,
    check_chosen,
)

Integers = npt.NDArray[np.int64]
_NO_ENTRIES = np.empty((0, 1, 1), np.float32)
_ALL = np.empty((0, 0), np.int64)
_SEEN = 128  # positions that a token sees, about


class CompiledRows:
    """Cache writes and row operators of one step; see RowOperators."""

    def __init__(self, layout: RowLayout, widths: Widths) -> None:
        """Prepare the step `layout`; `widths` are for tiles of other types than float32."""
        self._layout = layout
        self._widths = widths
        self._checkpoints: dict[int, Integers] = {}
        check_rows(layout)

    def paged_write(self, pool: Tensor, entries: Tensor) -> None:
        """See RowOperators."""
        self._check(entries)
        if not are_float32(pool, entries):
            return self._tiled.paged_write(pool, entries)
        target, source = pool.numpy(), entries.numpy()
        if target.ndim == 3:
            target, source = target[:, None], source[:, None]
        return writes.paged_write(target, source, self._by_table, self._pages)

    def paged_attention(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float) -> Tensor:
        """See RowOperators."""
        self._check(q)
        if not are_float32(q, k_pool):
            return self._tiled.paged_attention(q, k_pool, v_pool, scale)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        attention.paged_attention(
            q.contiguous().numpy(),
            k_pool.numpy(),
            v_pool.numpy(),
            np.float32(scale),
            self._by_table,
            self._pages,
            out.numpy(),
            self._threads(out, k_pool),
        )
        return out

    def attend_pages(
        self,
        q_and_k: Tensor,
        v: Tensor,
        placing: Placing,
        pools: tuple[Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        """See RowOperators."""
        self._check(q_and_k)
        if not are_float32(q_and_k, v, pools[0]):
            return self._tiled.attend_pages(q_and_k, v, placing, pools, scale)
        tokens, heads, size = q_and_k.shape
        assert placing.cos.shape == (tokens, 1, size), "angles are for other heads"
        out = torch.empty(tokens, heads - v.shape[1], size)
        attention.attend_pages(
            q_and_k.numpy(),
            v.numpy(),
            np.empty((heads, 0), np.float32) if placing.norms is None else placing.norms.numpy(),
            np.float32(placing.eps),
            placing.cos.numpy()[:, 0],
            placing.sin.numpy()[:, 0],
            pools[0].numpy(),
            pools[1].numpy(),
            np.float32(scale),
            self._by_table,
            self._pages,
            out.numpy(),
            self._threads(out, pools[0]),
        )
        return out

    def ring_write(self, ring: Tensor, entries: Tensor) -> None:
        """See RowOperators."""
        self._check(entries)
        if not are_float32(ring, entries):
            return self._tiled.ring_write(ring, entries)
        target = ring.flatten(2).numpy()
        source = entries.numpy().reshape(entries.shape[0], target.shape[2])
        return writes.ring_write(target, source, self._by_slot)

    def window_attention(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        rings: tuple[Tensor, Tensor],
        window: int,
        scale: float,
    ) -> Tensor:
        """See RowOperators."""
        self._check(q)
        if not are_float32(q, rings[0]):
            return self._tiled.window_attention(q, kv, rings, window, scale)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        attention.window_attention(
            q.contiguous().numpy(),
            kv[0].contiguous().numpy(),
            kv[1].contiguous().numpy(),
            rings[0].numpy(),
            rings[1].numpy(),
            window,
            np.float32(scale),
            self._by_slot,
            out.numpy(),
        )
        return out

    def causal_conv(self, x: Tensor, ring: Tensor, weight: Tensor) -> Tensor:
        """See RowOperators; quickest with a weight whose taps lie one after another."""
        self._check(x)
        if not are_float32(x, ring, weight):
            return self._tiled.causal_conv(x, ring, weight)
        out = torch.empty(x.shape)
        taps = weight.t().contiguous().numpy()
        rowwise.causal_conv(rows_packed(x).numpy(), ring.numpy(), taps, self._by_slot, out.numpy())
        return out

    def delta_rule(self, inputs: DeltaInputs, caches: DeltaCaches) -> Tensor:
        """See RowOperators."""
        self._check(inputs.q)
        block = caches.block
        if block not in self._checkpoints:
            self._checkpoints[block] = self._laid_out(partial(by_checkpoint, block=block))
        return run_delta(inputs, caches, self._checkpoints[block])

    def compress(self, raw: Tensor, ring: Tensor, pool: Tensor, form: Compression) -> None:
        """See RowOperators."""
        self._check(raw)
        if not are_float32(raw, ring, pool, form.norm):
            return self._tiled.compress(raw, ring, pool, form)
        return kernels.compress(
            raw.numpy(),
            ring.numpy(),
            pool.numpy(),
            form.ratio,
            1 + form.overlapped,
            form.norm.numpy(),
            np.float32(form.eps),
            form.cos.numpy()[:, 0],
            form.sin.numpy()[:, 0],
            self._by_slot,
            self._by_table,
            self._pages,
        )

    def choose_entries(
        self, q: Tensor, weights: Tensor, pool: Tensor, ratio: int, count: int
    ) -> Tensor:
        """See RowOperators."""
        self._check(q)
        if not are_float32(q, weights, pool):
            return self._tiled.choose_entries(q, weights, pool, ratio, count)
        chosen = torch.empty(q.shape[0], count, dtype=torch.long)
        kernels.choose_entries(
            q.contiguous().numpy(),
            weights.contiguous().numpy(),
            pool.numpy(),
            ratio,
            self._by_table,
            self._pages,
            chosen.numpy(),
        )
        return chosen

    def attend_latents(
        self, q: Tensor, latents: Latents, entries: Entries | None, sinks: Tensor, scale: float
    ) -> Tensor:
        """See RowOperators."""
        self._check(q)
        if not are_float32(q, latents.own, latents.ring):
            return self._tiled.attend_latents(q, latents, entries, sinks, scale)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        chosen = None if entries is None else entries.chosen
        kernels.attend_latents(
            q.contiguous().numpy(),
            latents.own.contiguous().numpy(),
            latents.ring.numpy(),
            latents.window,
            _NO_ENTRIES if entries is None else entries.pool.numpy(),
            0 if entries is None else entries.ratio,
            _ALL if chosen is None else chosen.numpy(),
            sinks.numpy(),
            np.float32(scale),
            self._by_slot,
            self._by_table,
            self._pages,
            out.numpy(),
        )
        return out

    def attend_chosen(
        self, q: Tensor, turned: Tensor, keys: LatentPages, chosen: Tensor | None, scale: float
    ) -> Tensor:
        """See RowOperators."""
        self._check(q)
        check_chosen(q, chosen)
        if not are_float32(q, turned, keys.values, keys.turned):
            return self._tiled.attend_chosen(q, turned, keys, chosen, scale)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        looked_at.attend_chosen(
            q.contiguous().numpy(),
            turned.contiguous().numpy(),
            keys.values.numpy(),
            keys.turned.numpy(),
            _ALL if chosen is None else chosen.numpy(),
            chosen is None,
            np.float32(scale),
            self._by_table,
            self._pages,
            out.numpy(),
        )
        return out

    @cached_property
    def _by_table(self) -> Integers:
        return self._laid_out(by_table)

    @cached_property
    def _pages(self) -> Integers:
        return self._laid_out(all_pages)

    @cached_property
    def _by_slot(self) -> Integers:
        return self._laid_out(by_slot)

    def _threads(self, out: Tensor, k_pool: Tensor) -> int:
        """For attention whose results are `out`: rows and key heads are apart."""
        return threads_for(len(self._layout.slots) * k_pool.shape[1], out.numel() * _SEEN)

    def _laid_out(self, make: Callable[[RowLayout], Integers]) -> Integers:
        """The layout as kernels read it."""
        return make(self._layout)

    @cached_property
    def _tiled(self) -> BlockwiseRows:
        return BlockwiseRows(self._layout, self._widths, torch.device("cpu"))

    def _check(self, per_token: Tensor) -> None:
        count, planned = per_token.shape[0], self._layout.starts[-1]
        assert count == planned, f"{count} tokens came, the layout was made for {planned}"


def check_rows(layout: RowLayout) -> None:
    """Assert that every row sees its own first token."""
    for row, (_, length, first) in enumerate(_spans(layout)):
        least = layout.visible_from[row]
        assert length == 0 or first >= least, f"row {row} starts at {first}, below {least}"


def _spans(layout: RowLayout) -> list[tuple[int, int, int]]:
    """Of each row: its first token in the step, how many there are, and the first's position."""
    pairs = zip(pairwise(layout.starts), layout.first, strict=True)
    return [(start, stop - start, first) for (start, stop), first in pairs]


def by_table(layout: RowLayout) -> Integers:
    """Rows [R, 5] as paged kernels read them."""
    rows: list[int] = []
    begin = 0
    for row, (span, table) in enumerate(zip(_spans(layout), layout.tables, strict=True)):
        _, length, first = span
        room = len(table) * layout.page_tokens
        assert length == 0 or first + length <= room, f"row {row} outgrows its page table"
        rows += (*span, layout.visible_from[row], begin)
        begin += len(table)
    return np.array(rows, dtype=np.int64).reshape(-1, 5)


def all_pages(layout: RowLayout) -> Integers:
    """The page tables one after the other."""
    return np.array([*chain.from_iterable(layout.tables)], dtype=np.int64)


def by_slot(layout: RowLayout) -> Integers:
    """Rows [R, 5] as kernels on rings read them."""
    rows = [
        (*span, least, slot)
        for span, least, slot in zip(_spans(layout), layout.visible_from, layout.slots, strict=True)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 5)


def by_checkpoint(layout: RowLayout, block: int) -> Integers:
    """Rows [R, 6] as the kernel of the gated delta rule reads them."""
    rows = [
        (*span, settled // block * block, settles // block * block, slot)
        for span, settled, settles, slot in zip(
            _spans(layout), layout.settled, layout.settles, layout.slots, strict=True
        )
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


def are_float32(*tensors: Tensor) -> bool:
    """Whether kernels can take these."""
    dtypes = [tensor.dtype for tensor in tensors]
    return dtypes.count(torch.float32) == len(dtypes)


def rows_packed(x: Tensor) -> Tensor:
    """The same tensor [..., n] if the numbers of its last axis lie side by side, or a copy."""
    return x if x.shape[-1] < 2 or x.stride(-1) == 1 else x.contiguous()


def run_delta(inputs: DeltaInputs, caches: DeltaCaches, rows: Integers) -> Tensor:
    """Call the kernel of the gated delta rule on rows [R, 6] as it reads them."""
    assert caches.state.shape[3] == inputs.v.shape[2], "states and values differ in width"
    out = torch.empty(inputs.v.shape)
    delta.delta_rule(
        inputs.q.numpy(),
        inputs.k.numpy(),
        inputs.v.numpy(),
        inputs.decay.numpy(),
        inputs.beta.numpy(),
        caches.state.numpy(),
        caches.k.numpy(),
        caches.value.numpy(),
        caches.decay.numpy(),
        caches.beta.numpy(),
        caches.block,
        rows,
        out.numpy(),
        _delta_threads(caches, len(rows)),
    )
    return out


def fold_delta(caches: DeltaCaches, folds: Sequence[Fold]) -> None:
    """See Backend: the same kernel on rows without tokens."""
    block = caches.block
    rows = [(0, 0, fold.base + block, fold.base, fold.base + block, fold.slot) for fold in folds]
    k, value = caches.k.numpy(), caches.value.numpy()
    none = np.empty((0, *k.shape[2:]), np.float32)
    no_values = np.empty((0, *value.shape[2:]), np.float32)
    no_gates = no_values[:, :, 0]
    delta.delta_rule(
        none,
        none,
        no_values,
        no_gates,
        no_gates,
        caches.state.numpy(),
        k,
        value,
        caches.decay.numpy(),
        caches.beta.numpy(),
        block,
        np.array(rows, dtype=np.int64).reshape(-1, 6),
        no_values,
        _delta_threads(caches, len(rows)),
    )


def _delta_threads(caches: DeltaCaches, rows: int) -> int:
    """Rows and value heads are apart; a state is read and written at least once."""
    return threads_for(rows * caches.state.shape[1], 2 * rows * caches.state[0].numel())
