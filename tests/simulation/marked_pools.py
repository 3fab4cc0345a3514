"""The pools of DeepSeek V4, in which every entry names the prefix that it stands for.

The entry of position p is filled with a number made of tokens[: p + 1]. So whatever the next row of
a request may read can be compared with what it ought to read; a rejected draft leaves junk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.ids import SINK_PAGE, SINK_SLOT, PageId
from surefoot.state.ledger import Lease, Ledger, Work
from surefoot.state.plan import MemoryPlan
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec, Paged, Ring
from surefoot.testing.tiny_latents import TinyLatentSizes

JUNK = -1
_DRAFTER = ("draft.", "mtp.")


def marks_of(tokens: Sequence[int], known: Sequence[int] = ()) -> list[int]:
    """A number for each tokens[: i + 1] that float32 can hold; `known` are the first ones."""
    marks = list(known)
    for token in tokens[len(marks) :]:
        before = marks[-1] if marks else 1
        marks.append(1 + (before * 31_337 + token * 977 + 5) % 16_777_213)
    return marks


class MarkedPools:
    """Pools made by a plan, written and looked at as an engine would."""

    def __init__(self, specs: Sequence[CacheSpec], plan: MemoryPlan, size: TinyLatentSizes) -> None:
        self.pools = Pools(specs, plan, torch.device("cpu"))
        self._specs, self._page = specs, plan.page_tokens
        self._window, self._ratios = size.window, {"sparse": 4, "heavy": size.heavy_ratio}

    def apply(self, work: Work, ledger: Ledger) -> None:
        """Carry out what was recorded, and spoil all that nobody owns."""
        self.pools.apply(work)
        pages, slots = [SINK_PAGE, *ledger._free_pages], [SINK_SLOT, *ledger._free_slots]
        self.pools.poison(pages, slots, ledger._free_points, torch.nan)

    def write(self, lease: Lease, first: int, marks: Sequence[int], drafter: bool) -> None:
        """What the model, or its drafter, writes of positions from `first` on."""
        values, end = torch.tensor(marks).float(), first + len(marks)
        for spec, pool in self._tensors(drafter):
            if isinstance(spec, Paged):
                positions, pages, offsets = self._places(lease, range(first, end), spec.ratio)
                pool[:, pages, offsets] = values[[p - first for p in positions]][None, :, None]
            else:
                kept = range(max(first, end - pool.shape[2]), end)
                columns = [position % pool.shape[2] for position in kept]
                pool[:, lease.slot, columns] = values[kept.start - first :][None, :, None]

    def check(self, lease: Lease, marks: Sequence[int]) -> None:
        """What the next row of a request may read is what it ought to be.

        Raises:
            AssertionError: it is not; the message names the cache.
        """
        truth = torch.tensor(marks).float()
        for spec, pool in self._tensors(drafter=False):
            self._check(spec, pool, lease, truth, range(lease.computed))
        for spec, pool in self._tensors(drafter=True):
            self._check(spec, pool, lease, truth, range(lease.draft_from, lease.drafted))

    def _check(
        self, spec: CacheSpec, pool: Tensor, lease: Lease, truth: Tensor, known: range
    ) -> None:
        if isinstance(spec, Paged):
            positions, pages, offsets = self._places(lease, known, spec.ratio)
            assert bool(pool[:, lease.pages].isfinite().all()), f"{spec.name}: not cleared"
            same = pool[:, pages, offsets] == truth[positions][None, :, None]
            assert bool(same.all()), f"{spec.name}: {positions}"
        elif isinstance(spec, Ring):
            self._check_ring(spec, pool[:, lease.slot], truth, known)

    def _check_ring(self, spec: Ring, ring: Tensor, truth: Tensor, known: range) -> None:
        """By the list of what is needed behind a number of tokens, written down again here."""
        end, size = known.stop, ring.shape[-1]
        kind, _, raw = spec.name.partition(".")
        if spec.name == "draft.recent":
            return
        assert bool(ring.isfinite().all()) or spec.held is None, f"{spec.name}: not cleared"
        if raw != "raw":
            self._compare(spec.name, ring, truth, range(end - self._window + 1, end), known)
            return
        ratio = self._ratios[kind]
        closed = end // ratio * ratio
        self._compare(spec.name, ring, truth, range(closed, end), known)
        if kind == "sparse":
            # Values, then scores; of each the first half belongs to the window that follows.
            quarters = ring.unflatten(-1, (2, 2, size // 4))
            before = range(closed - ratio, closed)
            self._compare(spec.name, quarters[:, :, :, 0].flatten(2), truth, before, known)

    def _compare(self, name: str, ring: Tensor, truth: Tensor, wanted: range, known: range) -> None:
        positions = range(max(known.start, wanted.start), wanted.stop)
        got = ring[:, [position % ring.shape[1] for position in positions]]
        want = truth[positions.start : positions.stop] if positions else truth[:0]
        assert bool((got == want[None, :, None]).all()), f"{name}: {positions}"

    def _tensors(self, drafter: bool) -> list[tuple[CacheSpec, Tensor]]:
        """[layers, pages, entries, size] or [layers, slots, columns, size] of each part."""
        found: list[tuple[CacheSpec, Tensor]] = []
        for spec in self._specs:
            assert isinstance(spec, Paged | Ring), "this model has no other kind"
            read = self.pools.paged if isinstance(spec, Paged) else self.pools.rows
            if spec.name.startswith(_DRAFTER) is drafter:
                found += [(spec, read(spec.name, part.name)) for part in spec.parts]
        return found

    def _places(
        self, lease: Lease, known: range, ratio: int
    ) -> tuple[list[int], list[PageId], list[int]]:
        """The positions among `known` at which entries are written, their pages and offsets."""
        first = known.start + (-known.start - 1) % ratio
        positions = list(range(first, known.stop, ratio))
        pages = [lease.pages[position // self._page] for position in positions]
        return positions, pages, [position % self._page // ratio for position in positions]
