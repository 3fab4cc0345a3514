"""Runs the model over the planned rows and chooses tokens: where bookkeeping meets tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from surefoot.backend.operands import Fold
from surefoot.backend.protocol import Backend
from surefoot.capture import Capture, Computed, RowKind
from surefoot.draft.guesses import Guessed, Guesses
from surefoot.engine.rows import PlannedRow, RowResult
from surefoot.ids import RequestId
from surefoot.model.model import Model
from surefoot.sample.choose import try_choose
from surefoot.sample.context import Contexts
from surefoot.sample.logprobs import top_logprobs
from surefoot.state.ledger import Work
from surefoot.state.pool import Pools
from surefoot.step import NO_GUESSES, Batch, Row, Step, fold_due


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a forward pass brought.

    Attributes:
        rows: one result for each planned row, in order.
        hidden: [T, hidden] hidden states of the step, for drafters.
    """

    rows: list[RowResult]
    hidden: Tensor


class Runner(Protocol):
    """Computes planned rows. The seam between the loop and a model, real or pretended."""

    def prepare(self, work: Work) -> None:
        """Clear, save and restore slot rows as the ledger recorded."""
        ...

    def run(self, rows: Sequence[PlannedRow]) -> StepResult:
        """One forward pass and the choice of tokens."""
        ...

    def settle(self, rows: Sequence[PlannedRow]) -> None:
        """Bring the caches up to what was committed of the rows that were run last."""
        ...

    def forget(self, request: RequestId) -> None:
        """Drop what is kept for a request that left the engine or was pre-empted."""
        ...


class Forward(Protocol):
    """Executes a step's forward pass."""

    def __call__(self, step: Step) -> Computed:
        """Hidden states and logits."""
        ...

    def fold(self, folds: Sequence[Fold]) -> None:
        """Move checkpoints of recurrent layers on by one block."""
        ...


class ModelForward:
    """Runs a model over its caches, eagerly or by replaying what was captured."""

    def __init__(self, model: Model, pools: Pools, backend: Backend, capture: Capture) -> None:
        """Run `model`, whose caches are `pools`."""
        self._model, self._pools, self._backend = model, pools, backend
        self._call = capture.call(self._pass, backend, RowKind(capture.widest, 1, bounded=False))

    def __call__(self, step: Step) -> Computed:
        """See Forward."""
        return self._call(step)

    def _pass(self, batch: Batch, _: Sequence[Tensor]) -> Computed:
        hidden = self._model.forward(batch, self._pools)
        return Computed(hidden, self._model.logits(batch.wanted_of(hidden, self._backend)))

    def fold(self, folds: Sequence[Fold]) -> None:
        """See Forward."""
        self._model.fold(folds, self._pools)


class ModelRunner:
    """Builds the step, runs it, and chooses with each row's own history."""

    def __init__(
        self,
        forward: Forward,
        pools: Pools,
        backend: Backend,
        vocab_size: int,
        page_tokens: int,
        block: int,
    ) -> None:
        """Run `forward`, whose caches are `pools`, for a vocabulary of `vocab_size`.

        Recurrent checkpoints stand at multiples of `block`; 0 if there are none.
        """
        self._forward = forward
        self._pools = pools
        self._backend = backend
        self._page_tokens = page_tokens
        self._block = block
        self._contexts = Contexts(vocab_size, pools.device)

    def prepare(self, work: Work) -> None:
        """See Runner."""
        self._pools.apply(work)

    def forget(self, request: RequestId) -> None:
        """See Runner."""
        self._contexts.forget(request)

    @torch.inference_mode()
    def settle(self, rows: Sequence[PlannedRow]) -> None:
        """See Runner: certain tokens were settled by the forward pass, accepted drafts are now."""
        if not self._block:
            return
        due = [
            fold_due(row.lease.slot, row.first + row.count, row.lease.computed, self._block)
            for row in rows
        ]
        folds = [fold for fold in due if fold is not None]
        if folds:
            self._forward.fold(folds)

    @torch.inference_mode()
    def run(self, rows: Sequence[PlannedRow]) -> StepResult:
        """See Runner."""
        drafts, guesses = _guesses_of(rows)
        step = Step.of([_step_row(row) for row in rows], self._page_tokens, drafts)
        hidden, logits = self._forward(step)
        picks = [_chosen_rows(row) for row in rows]
        ends = _running_ends([row.wanted for row in step.rows])
        at = [end - count + i for end, count in zip(ends, picks, strict=True) for i in range(count)]
        contexts = [
            context
            for row in rows
            if row.final
            for context in self._contexts.run(row.request, row.drafts)
        ]
        some = logits if len(at) == len(logits) else logits[at]
        chosen = self._read(try_choose(some, contexts, self._backend), guesses)
        results = [RowResult([next(chosen) for _ in range(count)]) for count in picks]
        for row, result, end, count in zip(rows, results, ends, picks, strict=True):
            _add_logprobs(row, result, logits[end - count : end])
            _add_prompt_logprobs(row, result, logits[end - row.count - len(row.drafts) : end])
        return StepResult(results, hidden)

    def _read(self, chosen: Tensor, guesses: Sequence[Guesses]) -> Iterator[int]:
        """What was chosen; the host learns of the guesses in the same reading, the only one."""
        unread = [guess.unread for guess in guesses]
        numbers = iter(self._backend.read(torch.cat([*unread, chosen]) if unread else chosen))
        for guess, part in zip(guesses, unread, strict=True):
            guess.settle(itertools.islice(numbers, len(part)))
        return numbers


def _guesses_of(rows: Sequence[PlannedRow]) -> tuple[Tensor, list[Guesses]]:
    """Drafts that the host does not know, row by row, and what they are part of."""
    drafts = [row.drafts for row in rows if isinstance(row.drafts, Guessed)]
    together = [
        (guesses, [place for draft in some for place in draft.places])
        for guesses, some in itertools.groupby(drafts, key=lambda draft: draft.guesses)
    ]
    parts = [guesses.at(places) for guesses, places in together if places]
    every = [guesses for guesses, _ in together]
    if len(parts) == 1:
        return parts[0], every
    return torch.cat(parts) if parts else NO_GUESSES, every


def _step_row(row: PlannedRow) -> Row:
    known = row.request.tokens[row.first : row.first + row.count]
    guessed = len(row.drafts) if isinstance(row.drafts, Guessed) else 0
    scored = (
        row.request.params.prompt_logprobs is not None and row.first < row.request.prompt_length
    )
    return Row(
        tokens=known if guessed else [*known, *row.drafts],
        first=row.first,
        certain=row.count,
        table=row.lease.pages,
        slot=row.lease.slot,
        visible_from=0,
        wanted=row.count + len(row.drafts) if scored else _chosen_rows(row),
        settled=row.first,
        guessed=guessed,
    )


def _chosen_rows(row: PlannedRow) -> int:
    """How many tokens are chosen for a row."""
    return 1 + len(row.drafts) if row.final else 0


def _running_ends(counts: Sequence[int]) -> list[int]:
    ends, total = [], 0
    for count in counts:
        total += count
        ends.append(total)
    return ends


def _add_logprobs(row: PlannedRow, result: RowResult, logits: Tensor) -> None:
    count = row.request.params.logprobs
    if count is not None and result.chosen:
        result.logprobs = top_logprobs(logits, [max(token, 0) for token in result.chosen], count)


def _add_prompt_logprobs(row: PlannedRow, result: RowResult, logits: Tensor) -> None:
    """Score the prompt tokens that follow this chunk's tokens, unless that was done before."""
    request, count = row.request, row.request.params.prompt_logprobs
    if count is None:
        return
    done = 1 + len(request.prompt_logprobs)
    following = range(
        max(row.first + 1, done), min(row.first + row.count + 1, request.prompt_length)
    )
    if not following:
        return
    begin = following.start - 1 - row.first
    tokens = request.tokens[following.start : following.stop]
    result.prompt_logprobs = top_logprobs(logits[begin : begin + len(tokens)], tokens, count)
