"""Drafting with a second, smaller model that shares the vocabulary.

Its caches lie in pools of their own under the same page table and slot, so everything the ledger
does for the target it does for the drafter. `lease.drafted` is the drafter's cursor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from surefoot.backend.protocol import Backend
from surefoot.capture import Capture, Computed, RowKind
from surefoot.draft.drafter import CommittedRow, DraftRow
from surefoot.draft.guesses import Guessed, Guesses
from surefoot.ids import RequestId
from surefoot.model.model import Model
from surefoot.sample.choose import try_choose
from surefoot.sample.context import Contexts
from surefoot.state.ledger import Clear, Lease, Work
from surefoot.state.pool import Pools
from surefoot.state.spec import recurrent_block
from surefoot.step import NO_GUESSES, Batch, Row, Step, fold_due


class ModelDrafter:
    """Runs the draft model over what is new, then token by token."""

    name = "draft-model"

    def __init__(
        self, model: Model, pools: Pools, backend: Backend, page_tokens: int, capture: Capture
    ) -> None:
        """Draft with `model`, whose caches lie in `pools`."""
        self._forward = capture.call(self._pass, backend, RowKind(1, 0, bounded=True))
        self._model = model
        self._pools = pools
        self._backend = backend
        self._page_tokens = page_tokens
        self._contexts = Contexts(model.description.vocab_size, backend.device)
        self._block = recurrent_block(model.description.caches)

    def prepare(self, work: Work) -> None:
        """See Drafter."""
        self._pools.apply(work)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int]]:
        """See Drafter: pass i extends every draft that wants more than i tokens."""
        guesses = Guesses(self._backend)
        drafts = [Guessed(guesses, []) for _ in rows]
        self._start(row.lease for row in rows)
        for depth in range(max((row.limit for row in rows), default=0)):
            active = [i for i, row in enumerate(rows) if row.limit > depth]
            self._extend([rows[i] for i in active], [drafts[i] for i in active])
        return drafts

    def _extend(self, rows: Sequence[DraftRow], drafts: Sequence[Guessed]) -> None:
        """Append one token to each draft."""
        steps, contexts, last = [], [], []
        for row, draft in zip(rows, drafts, strict=True):
            tokens, start = row.request.tokens, row.lease.drafted
            missing = len(tokens) + len(draft) - start
            known = tokens[start:]
            steps.append(_row(row.lease, known, start, 1, missing - len(known)))
            last += draft.places[len(draft) - (missing - len(known)) :]
            contexts.append(self._contexts.after(row.request, draft))
        guesses = drafts[0].guesses
        given = guesses.at(last) if last else NO_GUESSES
        computed = self._forward(Step.of(steps, self._page_tokens, given))
        for row, draft in zip(rows, drafts, strict=True):
            row.lease.drafted = len(row.request.tokens) + len(draft)
        places = guesses.add(try_choose(computed.logits, contexts, self._backend))
        for draft, place in zip(drafts, places, strict=True):
            draft.places.append(place)

    def _pass(self, batch: Batch, _: Sequence[Tensor]) -> Computed:
        hidden = self._model.forward(batch, self._pools)
        return Computed(hidden, self._model.logits(batch.wanted_of(hidden, self._backend)))

    @torch.inference_mode()
    def observe(self, rows: Sequence[CommittedRow], hidden: Tensor) -> None:
        """See Drafter: complete the pages that are about to be published.

        Drafting left entries past the cursor; those of accepted tokens are right, the rest is
        overwritten. What a page in progress still lacks is computed with the next draft.
        """
        late, folds = [], []
        for row in rows:
            lease = row.lease
            # A draft was made for this row if the drafter is ahead of it; only the bonus token
            # was certain then.
            ahead = lease.drafted > row.first
            lease.drafted = min(lease.drafted, lease.computed)
            if ahead and self._block:
                folds.append(fold_due(lease.slot, row.first + 1, lease.drafted, self._block))
            if (
                row.keep_up
                and lease.drafted < lease.computed // self._page_tokens * self._page_tokens
            ):
                late.append(row)
        due = [fold for fold in folds if fold is not None]
        if due:
            self._model.fold(due, self._pools)
        if late:
            self._complete(late)

    def _complete(self, late: Sequence[CommittedRow]) -> None:
        """Compute what the drafter lacks of these rows."""
        self._start(row.lease for row in late)
        steps = [
            _row(
                row.lease,
                row.request.tokens[row.lease.drafted : row.lease.computed],
                row.lease.drafted,
                0,
            )
            for row in late
        ]
        self._forward(Step.of(steps, self._page_tokens))
        for row in late:
            row.lease.drafted = row.lease.computed

    def _start(self, leases: Iterable[Lease]) -> None:
        """Clear the slots of requests of which the drafter knows nothing yet, or no more.

        They came with the resume point of a request that was not drafted for, or a call failed
        half-way. Attention does not look below `draft_from`, but a recurrent state would.
        """
        for lease in leases:
            if self._block and lease.drafted == lease.draft_from > 0:
                self._pools.apply(Work([], [Clear(lease.slot)]))

    def forget(self, request: RequestId) -> None:
        """See Drafter; the caches need nothing, they are addressed by position."""
        self._contexts.forget(request)


def _row(lease: Lease, tokens: Sequence[int], first: int, wanted: int, guessed: int = 0) -> Row:
    return Row(
        tokens=tokens,
        first=first,
        certain=max(0, min(len(tokens), lease.computed + 1 - first)),
        table=lease.pages,
        slot=lease.slot,
        visible_from=lease.draft_from,
        wanted=wanted,
        settled=min(first, lease.computed + 1),
        guessed=guessed,
    )
