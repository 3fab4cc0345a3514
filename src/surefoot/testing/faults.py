"""Faults to plant: the classic ways in which speculation changes the output.

Each is a subclass or a function that takes the place of the right one while `planted` is open.
A check that does not fail under the fault it is meant for checks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor

from surefoot.backend.operands import Fold
from surefoot.capture import Computed
from surefoot.draft.drafter import CommittedRow, DraftRow
from surefoot.draft.mtp import MtpDrafter
from surefoot.engine.output import Taken, TextStream, take_run
from surefoot.engine.rows import PlannedRow
from surefoot.engine.runner import ModelForward
from surefoot.engine.scheduler import Scheduler
from surefoot.request import FinishReason, Request
from surefoot.sample.context import Contexts
from surefoot.sample.processors import HistoryCounts, RowContext
from surefoot.state.ledger import Lease, Ledger
from surefoot.state.plan import MemoryPlan
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec, Recurrent, Ring
from surefoot.step import Row, Step


class ShortHistory(Contexts):
    """The last token before the row is missing from its history."""

    def after(self, request: Request, drafts: Sequence[int]) -> RowContext:
        """See Contexts; a token is doubled at the front so that the length is right."""
        context = super().after(request, drafts)
        history = context.history
        return replace(context, history=[*history[:1], *history[:-1]]) if history else context


class _StaleCounts(HistoryCounts):
    """Counts that never take drafts into account."""

    def after(self, history: Sequence[int]) -> HistoryCounts:
        """See HistoryCounts."""
        return self


class StalePenalties(Contexts):
    """Penalties are worked out once for all rows of a step."""

    def after(self, request: Request, drafts: Sequence[int]) -> RowContext:
        """See Contexts."""
        context = super().after(request, drafts)
        if context.counts is None:
            return context
        counts = _StaleCounts(self._vocab_size, request.prompt_length, self._device)
        counts.advance(request.tokens)
        return replace(context, counts=counts)


class StepNoise(Contexts):
    """Noise depends on how often tokens were chosen, not on the position."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        """See Contexts."""
        super().__init__(vocab_size, device)
        self._steps = 0

    def run(self, request: Request, drafts: Sequence[int]) -> list[RowContext]:
        """See Contexts."""
        self._steps += 1
        contexts = super().run(request, drafts)
        return [replace(context, seed=context.seed ^ self._steps) for context in contexts]


class OffByOneScheduler(Scheduler):
    """Moves the cursor one too far, over a token that was never computed."""

    def commit(self, row: PlannedRow, count: int) -> None:
        """See Scheduler."""
        beyond = not row.final and row.first + count + 1 <= row.lease.capacity
        super().commit(row, count + beyond)


class EarlyPublisher(Ledger):
    """Publishes pages that the cursor has not passed yet."""

    def publish(self, lease: Lease, tokens: Sequence[int]) -> None:
        """See Ledger."""
        computed, lease.computed = lease.computed, min(lease.capacity, len(tokens))
        super().publish(lease, tokens)
        lease.computed = computed


class BlindEarlyPublisher(EarlyPublisher):
    """The same, with an audit that sees nothing: the tokens have to give it away."""

    def audit(self) -> None:
        """See Ledger."""


class PaddedForward(ModelForward):
    """No fault: each step has two more rows and seven more tokens, which touch the sink only."""

    def __call__(self, step: Step) -> Computed:
        """See Forward."""
        tokens = step.token_count
        padded = self.spoil(step.pad(len(step.rows) + 2, tokens + 7))
        computed = super().__call__(padded)
        return computed._replace(hidden=computed.hidden[:tokens])

    def spoil(self, step: Step) -> Step:
        """What a fault makes of the padded step."""
        return step


class PaddingOnLivePage(PaddedForward):
    """Padding rows write to the first row's page and slot instead of the sink."""

    def spoil(self, step: Step) -> Step:
        """See PaddedForward."""
        live = step.rows[0]
        rows = [self._alias(row, live) for row in step.rows[step.live :]]
        return replace(step, rows=(*step.rows[: step.live], *rows))

    @staticmethod
    def _alias(row: Row, live: Row) -> Row:
        return replace(row, table=[live.table[0]] * len(row.table), slot=live.slot)


class FoldForgotten(ModelForward):
    """Checkpoints stay where the forward pass left them."""

    def fold(self, folds: Sequence[Fold]) -> None:
        """See Forward."""


class FoldTwice(ModelForward):
    """Every block that drafts completed goes into the checkpoint twice."""

    def fold(self, folds: Sequence[Fold]) -> None:
        """See Forward."""
        super().fold(folds)
        super().fold(folds)


class _HalfPoints(Pools):
    """Resume points that lack some of the caches."""

    lacking: tuple[type[CacheSpec], ...] = ()

    def __init__(self, specs: Sequence[CacheSpec], plan: MemoryPlan, device: torch.device) -> None:
        """See Pools."""
        super().__init__(specs, plan, device)
        lost = {spec.name for spec in specs if isinstance(spec, self.lacking)}
        self._saved = {key: held for key, held in self._saved.items() if key[0] not in lost}


class PointsWithoutRings(_HalfPoints):
    """Resume points hold the recurrent state but no convolution inputs."""

    lacking = (Ring,)


class PointsWithoutCheckpoints(_HalfPoints):
    """Resume points hold the convolution inputs but no recurrent state."""

    lacking = (Recurrent,)


class NoBoundaryState(MtpDrafter):
    """The state of a page's last token is not kept with the page."""

    def _keep(self, rows: Sequence[CommittedRow], flat: Tensor) -> None:
        boundary, self._boundary = self._boundary, self._boundary.clone()
        super()._keep(rows, flat)
        self._boundary = boundary


class SeesEverything(MtpDrafter):
    """Attention of the draft head looks at entries that were never written."""

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int]]:
        """See Drafter."""
        starts = [row.lease.draft_from for row in rows]
        for row, start in zip(rows, starts, strict=True):
            if start <= row.lease.computed:
                row.lease.draft_from = 0
        drafts = super().propose(rows)
        for row, start in zip(rows, starts, strict=True):
            row.lease.draft_from = start
        return drafts


def keep_wrong_draft(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """`accepted`, but the first draft that differs is kept as well."""
    right = 0
    while right < len(drafts) and drafts[right] == chosen[right]:
        right += 1
    return min(right + 1, len(drafts))


def length_before_stop(request: Request, run: Sequence[int], stream: TextStream) -> Taken:
    """`take_run`, but the limit is applied to the whole run before its end tokens are looked at."""
    room = request.length_limit - len(request.tokens)
    if len(run) < room:
        return take_run(request, run, stream)
    kept = list(run[:room])
    request.tokens.extend(kept)
    return Taken(kept, stream.finish(), FinishReason.LENGTH)


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        place: dotted name of what is replaced.
        by: the faulty class or function.
    """

    place: str
    by: object


FAULTS: Mapping[str, Fault] = {
    "history one short": Fault("surefoot.engine.runner.Contexts", ShortHistory),
    "penalty counted once per step": Fault("surefoot.engine.runner.Contexts", StalePenalties),
    "noise keyed by step": Fault("surefoot.engine.runner.Contexts", StepNoise),
    "commit off by one": Fault("surefoot.engine.assemble.Scheduler", OffByOneScheduler),
    "page published past the cursor": Fault("surefoot.engine.assemble.Ledger", EarlyPublisher),
    "padding on a live page": Fault("surefoot.engine.assemble.ModelForward", PaddingOnLivePage),
    "wrong draft kept": Fault("surefoot.engine.loop.accepted", keep_wrong_draft),
    "fold forgotten": Fault("surefoot.engine.assemble.ModelForward", FoldForgotten),
    "fold done twice": Fault("surefoot.engine.assemble.ModelForward", FoldTwice),
    "points without rings": Fault("surefoot.engine.assemble.Pools", PointsWithoutRings),
    "points without checkpoints": Fault("surefoot.engine.assemble.Pools", PointsWithoutCheckpoints),
    "boundary state not kept": Fault("surefoot.engine.assemble.MtpDrafter", NoBoundaryState),
    "draft_from ignored": Fault("surefoot.engine.assemble.MtpDrafter", SeesEverything),
    "length before stop": Fault("surefoot.engine.loop.take_run", length_before_stop),
}


def planted(name: str) -> AbstractContextManager[object]:
    """Engines made, and run, while this is open have the fault.

    Raises:
        KeyError: no fault has this name.
    """
    fault = FAULTS[name]
    return patch(fault.place, fault.by)


def padded() -> AbstractContextManager[object]:
    """Engines made while this is open pad every step, without any fault."""
    return patch("surefoot.engine.assemble.ModelForward", PaddedForward)
