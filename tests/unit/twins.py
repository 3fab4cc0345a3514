"""One pass over two sets of equal caches: run eagerly, and recorded and replayed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from surefoot.backend.cpu.backend import CpuBackend
from surefoot.backend.cpu.recording import StepRecording
from surefoot.backend.operands import LayoutBounds, RowLayout
from surefoot.backend.protocol import UNCHOSEN, Recording
from surefoot.backend.row_operators import RowOperators
from surefoot.capture import EagerCall, ExactCall, Pass
from surefoot.state.plan import MemoryPlan, plan_memory
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec
from surefoot.step import NO_GUESSES, Row, Step

P, LONGEST, SLOTS, DEPTH = 16, 9, 4, 4
VOCAB = 64
Part = tuple[int, int, int]
"""A row: tokens that the host knows, how many of them are certain, and tokens that it guesses."""


class Counting(CpuBackend):
    """Counts what is recorded and replayed.

    Attributes:
        tried: steps that were to be recorded.
        made: recordings that came of it.
        replays: of all recordings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tried = self.made = self.replays = 0

    def record(
        self,
        layout: RowLayout,
        bounds: LayoutBounds,
        inputs: Sequence[Tensor],
        work: Callable[[RowOperators], Sequence[Tensor]],
    ) -> Recording | None:
        """See Backend."""
        self.tried += 1
        recording = super().record(layout, bounds, inputs, work)
        if recording is None:
            return None
        assert isinstance(recording, StepRecording)
        self.made += 1
        return Counted(recording, self)


class Counted:
    """A recording whose replays its backend counts."""

    def __init__(self, inner: StepRecording, backend: Counting) -> None:
        self.outputs, self._inner, self._backend = inner.outputs, inner, backend

    def replay(self, layout: RowLayout) -> None:
        """See Recording."""
        self._backend.replays += 1
        self._inner.replay(layout)


class Journey:
    """Requests that go on step by step, each in a slot and in pages of its own."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._tables: dict[int, list[int]] = {}
        self._final: dict[int, int] = {}  # positions below it are final
        self._ahead: dict[int, int] = {}  # so many tokens behind it were guessed
        for slot in range(1, SLOTS + 1):
            self._begin(slot)
            self._final[slot] = self._random.randrange(P * LONGEST // 2)

    def _begin(self, slot: int) -> None:
        """Another request takes the slot."""
        pages = list(range(1 + LONGEST * (slot - 1), 1 + LONGEST * slot))
        self._random.shuffle(pages)
        self._tables[slot], self._final[slot], self._ahead[slot] = pages, 0, 0

    def step(self, parts: Sequence[Part], wanted: int = 1) -> Step:
        """A step of such rows, in any slots and in any order."""
        parts = self._random.sample(parts, len(parts))
        slots = self._random.sample(range(1, SLOTS + 1), len(parts))
        rows = [self._row(slot, part, wanted) for slot, part in zip(slots, parts, strict=True)]
        count = sum(row.guessed for row in rows)
        guesses = [self._random.choice([UNCHOSEN, *range(VOCAB)]) for _ in range(count)]
        return Step.of(rows, P, torch.tensor(guesses) if count else NO_GUESSES)

    def _row(self, slot: int, part: Part, wanted: int) -> Row:
        known, certain, guessed = part
        ahead = 0 if known else self._ahead[slot]
        if self._final[slot] + ahead + known + guessed > P * LONGEST or ahead >= DEPTH:
            self._begin(slot)
            ahead = 0
        settled = self._final[slot]
        first, draws = settled + ahead, self._random
        stop = first + known + guessed
        self._final[slot] += certain
        self._ahead[slot] = stop - self._final[slot]
        return Row(
            tokens=[draws.randrange(VOCAB) for _ in range(known)],
            first=first,
            certain=certain,
            table=self._tables[slot][: draws.randint(-(-stop // P), LONGEST)],
            slot=slot,
            visible_from=draws.choice((0, draws.randint(0, settled))),
            wanted=wanted,
            settled=settled,
            guessed=guessed,
        )


def plan_of(specs: Sequence[CacheSpec]) -> MemoryPlan:
    return plan_memory(
        specs,
        page_tokens=P,
        draft_tokens=DEPTH,
        max_rows=SLOTS,
        max_model_len=P * LONGEST,
        budget_bytes=1 << 26,
        points=0,
        prefix_cache=False,
    )


def tensors_of(pools: Pools) -> list[Tensor]:
    return [*pools._paged.values(), *pools._rows.values()]


def used_pools(specs: Sequence[CacheSpec]) -> Pools:
    """Caches in which other requests have left something."""
    pools, draws = Pools(specs, plan_of(specs), torch.device("cpu")), torch.Generator()
    draws.manual_seed(5)
    for tensor in tensors_of(pools):
        tensor.copy_(torch.randn(tensor.shape, generator=draws) / 4)
    return pools


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same to the bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class Twins:
    """The same steps twice.

    Attributes:
        backend: of both.
        call: records and replays.
    """

    def __init__(
        self,
        make: Callable[[Pools], Pass],
        specs: Sequence[CacheSpec],
        backend: Counting,
        most: int = 8,
        grain: int = 1,
    ) -> None:
        """`make` gives the pass over some caches; the call pads with `grain`."""
        self.backend = backend
        self._pools = used_pools(specs), used_pools(specs)
        self._eager = EagerCall(make(self._pools[0]), backend)
        self.call = ExactCall(make(self._pools[1]), backend, most, LONGEST, bounded=True)
        self.call.grain = grain

    @torch.inference_mode()
    def differences(self, step: Step, *inputs: Tensor) -> list[str]:
        """Run a step both ways, and say what came out otherwise."""
        given = [tensor.clone() for tensor in inputs]
        want = self._eager(step, *inputs)
        got = self.call(step, *given)
        pairs = {
            "hidden": (got.hidden, want.hidden),
            "logits": (got.logits, want.logits),
            **{f"input {i}": pair for i, pair in enumerate(zip(given, inputs, strict=True))},
        }
        # Padding may write to the sinks, which come first: [layers, pages or slots, ...].
        first = 0 if self.call.grain == 1 else 1
        of_both = ([part[:, first:] for part in tensors_of(pools)] for pools in self._pools)
        caches = zip(*of_both, strict=True)
        pairs |= {f"cache {i}": pair for i, pair in enumerate(caches)}
        return [name for name, pair in pairs.items() if not same_bits(*pair)]
