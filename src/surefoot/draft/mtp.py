"""Drafting with the model's own draft head (multi-token prediction).

    position       0    1    2    3    4    5    6        P = 4, computed = 5
    token          a    b    c    d    e    f             f is the bonus, known but not computed
    target state   h0   h1   h2   h3   h4
    head entry     -    b,h0 c,h1 d,h2 e,h3 f,h4 g,m5     f,h4 and g,m5 are written while drafting

Entry i belongs to token i and the target's hidden state of token i - 1, so entries start at 1, and
what the head computes there guesses token i + 1. Behind the bonus the head reads what it gave out
itself (m5); once tokens are committed their entries are written anew, from the target's states.

That waits until the next draft, or until the page is full. What waits lies in a ring of the last
states of each slot, at least P + 1 of them. An answer of P tokens for which no draft was asked is
left alone: where drafting does not pay, following costs nothing, and the next draft starts anew.

A request that resumes from cached pages needs the state of the token before. It lies beside the
pages: the hidden state of each page's last token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.backend.protocol import Backend
from surefoot.capture import Capture, Computed, RowKind
from surefoot.draft.drafter import CommittedRow, DraftRow
from surefoot.draft.guesses import Guessed, Guesses
from surefoot.ids import RequestId
from surefoot.model.model import Description, DraftHead
from surefoot.sample.choose import try_choose
from surefoot.sample.context import Contexts
from surefoot.state.ledger import Lease, Work
from surefoot.state.plan import MemoryPlan
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec, Paged, Part, Ring
from surefoot.step import Batch, Row, Step

_BOUNDARY, _RECENT, _STATE = "draft.boundary", "draft.recent", "hidden"


def mtp_caches(description: Description, dtype: str, page_tokens: int) -> tuple[CacheSpec, ...]:
    """What drafting with a model's head keeps: the head's caches, boundary and recent states.

    Args:
        description: of a model with a draft head.
        dtype: element type of the hidden states, e.g. "float32".
        page_tokens: P.
    """
    state = Part(_STATE, (math.prod(description.hidden_shape),), dtype)
    boundary = Paged(_BOUNDARY, 1, (state,), ratio=page_tokens)
    return (
        *description.draft_caches,
        boundary,
        Ring(_RECENT, 1, (state,), page_tokens, held=None),
    )


class MtpDrafter:
    """Runs the head over what is new and the bonus token, then over its own guesses."""

    name = "mtp"

    def __init__(
        self,
        head: DraftHead,
        description: Description,
        pools: Pools,
        backend: Backend,
        plan: MemoryPlan,
        capture: Capture,
    ) -> None:
        """Draft with `head`, the head of the model that `description` tells of.

        `pools` were made by `plan` and hold what `mtp_caches` names.
        """
        drafting = RowKind(1, 0, bounded=True)
        self._draft = capture.call(self._draft_pass, backend, drafting)
        self._deepen = self._draft
        if head.deepens:
            self._deepen = capture.call(self._deeper_pass, backend, drafting)
        self._catch_up = capture.call(
            self._catch_up_pass, backend, RowKind(0, 1, bounded=True), plan.page_tokens
        )
        self._head, self._pools, self._backend = head, pools, backend
        self._page_tokens = plan.page_tokens
        self._contexts = Contexts(description.vocab_size, backend.device)
        shape = description.hidden_shape
        self._boundary = pools.paged(_BOUNDARY, _STATE)[0].view(-1, *shape)
        # Ring of the target's last states: that of position p in row slot * columns + p % columns.
        self._columns = plan.capacities[_RECENT]
        self._recent = pools.rows(_RECENT, _STATE)[0].view(-1, *shape)
        # The ring has the states below this position; a call that failed leaves a gap.
        self._kept: dict[RequestId, int] = {}
        # How long each request was when a draft was last asked for, or when it was first met.
        self._asked: dict[RequestId, int] = {}

    def prepare(self, work: Work) -> None:
        """See Drafter."""
        self._pools.apply(work)

    def forget(self, request: RequestId) -> None:
        """See Drafter."""
        self._contexts.forget(request)
        self._kept.pop(request, None)
        self._asked.pop(request, None)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int]]:
        """See Drafter: pass i extends every draft that wants more than i tokens."""
        self._resume([row for row in rows if row.lease.computed == row.lease.cached])
        self._asked.update((row.request.id, len(row.request.tokens)) for row in rows)
        guesses = Guesses(self._backend)
        drafts = [Guessed(guesses, []) for _ in rows]
        able = [i for i, row in enumerate(rows) if self._can_draft(row)]
        if not able:
            return drafts
        hidden, ends = self._first_pass([rows[i] for i in able], [drafts[i] for i in able])
        for depth in range(1, max(rows[i].limit for i in able)):
            kept = [place for place, i in enumerate(able) if rows[i].limit > depth]
            able = [able[place] for place in kept]
            hidden = self._picked(hidden, [ends[place] for place in kept])
            hidden = self._next_pass([rows[i] for i in able], [drafts[i] for i in able], hidden)
            ends = list(range(len(able)))
        return drafts

    def _can_draft(self, row: DraftRow) -> bool:
        """Whether the bonus token can have an entry: the state of the token before is known."""
        lease = row.lease
        known = self._kept.get(row.request.id) == lease.computed
        return known and lease.computed >= max(1, lease.draft_from)

    def _first_pass(
        self, rows: Sequence[DraftRow], drafts: Sequence[Guessed]
    ) -> tuple[Tensor, list[int]]:
        """Compute the entries that are missing up to the bonus token's, and guess what follows.

        Returns:
            The head's states of all entries, and where those of the rows' last ones are.
        """
        steps: list[Row] = []
        sources: list[int] = []
        for row in rows:
            lease = row.lease
            begin = _next_entry(lease)
            steps.append(_row(lease, row.request.tokens[begin:], begin, wanted=1))
            sources += self._columns_of(lease, range(begin - 1, lease.computed))
        entered = self._head.enter(self._picked(self._recent, sources))
        computed = self._draft(Step.of(steps, self._page_tokens), entered)
        for row in rows:
            row.lease.drafted = row.lease.computed + 1
        self._choose(rows, drafts, computed.logits)
        ends = itertools.accumulate(step.count for step in steps)
        return computed.hidden, [end - 1 for end in ends]

    def _next_pass(
        self, rows: Sequence[DraftRow], drafts: Sequence[Guessed], hidden: Tensor
    ) -> Tensor:
        """Feed the last guesses and the head's own states [rows, ...], and guess again."""
        steps = [
            _row(row.lease, [], row.lease.computed + len(draft), wanted=1, guessed=1)
            for row, draft in zip(rows, drafts, strict=True)
        ]
        last = drafts[0].guesses.at([draft.places[-1] for draft in drafts])
        computed = self._deepen(Step.of(steps, self._page_tokens, last), hidden)
        self._choose(rows, drafts, computed.logits)
        return computed.hidden

    def _choose(self, rows: Sequence[DraftRow], drafts: Sequence[Guessed], logits: Tensor) -> None:
        """Append one token to each draft."""
        pairs = zip(rows, drafts, strict=True)
        contexts = [self._contexts.after(row.request, draft) for row, draft in pairs]
        places = drafts[0].guesses.add(try_choose(logits, contexts, self._backend))
        for draft, place in zip(drafts, places, strict=True):
            draft.places.append(place)

    def _draft_pass(self, batch: Batch, inputs: Sequence[Tensor]) -> Computed:
        """Entries in full and logits at the wanted tokens, for states [T, ...] before each."""
        return self._guessed(batch, self._head.forward(batch, inputs[0], self._pools))

    def _deeper_pass(self, batch: Batch, inputs: Sequence[Tensor]) -> Computed:
        """The same for the passes behind the first."""
        return self._guessed(batch, self._head.deepen(batch, inputs[0], self._pools))

    def _guessed(self, batch: Batch, hidden: Tensor) -> Computed:
        return Computed(hidden, self._head.logits(batch.wanted_of(hidden, self._backend)))

    def _catch_up_pass(self, batch: Batch, inputs: Sequence[Tensor]) -> Computed:
        """Entries of known tokens and nothing else."""
        self._head.catch_up(batch, inputs[0], self._pools)
        return Computed(inputs[0], inputs[0])

    @torch.inference_mode()
    def observe(self, rows: Sequence[CommittedRow], hidden: Tensor) -> None:
        """See Drafter: keep the states of what was committed, and complete full pages."""
        rows = [row for row in rows if row.keep_up and row.count > 0 and self._follows(row)]
        if not rows:
            return
        self._resume([row for row in rows if row.first == row.lease.cached])
        for row in rows:
            if self._kept.get(row.request.id) != row.first:
                # The states in between are gone, so the head starts anew from here.
                row.lease.draft_from = row.lease.drafted = row.first + 1
        states = hidden.to(self._recent.dtype)
        size = self._page_tokens
        late = [row for row in rows if row.lease.drafted < row.lease.computed // size * size]
        if late:
            self._complete(late, states)
        self._keep(rows, states)
        self._kept.update((row.request.id, row.lease.computed) for row in rows)

    def _follows(self, row: CommittedRow) -> bool:
        """Whether the row is no further than P tokens behind the last draft that was asked for."""
        asked = self._asked.setdefault(row.request.id, len(row.request.tokens))
        return row.first < asked + self._page_tokens

    def _complete(self, rows: Sequence[CommittedRow], states: Tensor) -> None:
        """Write the entries up to the cursor; `states` are the target's of the step."""
        steps: list[Row] = []
        sources: list[int] = []
        kept = len(self._recent)
        for row in rows:
            lease, begin = row.lease, _next_entry(row.lease)
            steps.append(_row(lease, row.request.tokens[begin : lease.computed], begin, wanted=0))
            sources += self._columns_of(lease, range(begin - 1, row.first))
            before = kept + row.offset - row.first
            sources += range(before + max(begin - 1, row.first), before + lease.computed - 1)
        old = [place for place, source in enumerate(sources) if source < kept]
        entered = self._picked(states, [max(0, source - kept) for source in sources])
        if old:
            kept_states = self._picked(self._recent, [sources[place] for place in old])
            entered = entered.index_copy(0, self._indices(old), kept_states)
        self._catch_up(Step.of(steps, self._page_tokens), self._head.enter(entered))
        for row in rows:
            row.lease.drafted = row.lease.computed

    def _keep(self, rows: Sequence[CommittedRow], states: Tensor) -> None:
        """Keep the last states of each row, and that of the last token of each page.

        States of rejected drafts go along, which spares picking the others out: those positions are
        computed anew, and the ring has room for them beside what may still be read.
        """
        size = self._page_tokens
        pages: list[int] = []
        ends: list[int] = []
        columns: list[int] = []
        recent: list[int] = []
        for row in rows:
            lease, before = row.lease, row.offset - row.first
            for page in range(row.first // size, lease.computed // size):
                pages.append(lease.pages[page])
                ends.append(before + (page + 1) * size - 1)
            stop = row.first + row.computed
            last = range(max(row.first, stop - self._columns), stop)
            columns += self._columns_of(lease, last)
            recent += range(before + last.start, before + last.stop)
        if pages:
            self._boundary.index_copy_(0, self._indices(pages), self._picked(states, ends))
        self._recent.index_copy_(0, self._indices(columns), self._picked(states, recent))

    def _resume(self, rows: Sequence[DraftRow | CommittedRow]) -> None:
        """Take up requests whose cached prefix was attached and that have computed nothing yet."""
        columns: list[int] = []
        pages: list[int] = []
        for row in rows:
            lease = row.lease
            self._kept[row.request.id] = lease.cached
            if 0 < lease.draft_from == lease.cached:
                # No state of the token before came with the pages.
                lease.draft_from = lease.cached + 1
            elif lease.cached and lease.draft_from < lease.cached:
                columns += self._columns_of(lease, range(lease.cached - 1, lease.cached))
                pages.append(lease.pages[lease.cached // self._page_tokens - 1])
        if pages:
            states = self._picked(self._boundary, pages)
            self._recent.index_copy_(0, self._indices(columns), states)

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._recent.device)

    def _picked(self, states: Tensor, places: list[int]) -> Tensor:
        """Some of the states [n, hidden], without a copy if they are all in order."""
        if len(places) == len(states) and places == list(range(len(states))):
            return states
        return self._backend.pick_rows(states, self._indices(places))

    def _columns_of(self, lease: Lease, positions: range) -> list[int]:
        start, columns = lease.slot * self._columns, self._columns
        return [start + position % columns for position in positions]


def _next_entry(lease: Lease) -> int:
    """Position of the first entry that is missing."""
    return max(1, lease.drafted, lease.draft_from)


def _row(lease: Lease, tokens: Sequence[int], first: int, *, wanted: int, guessed: int = 0) -> Row:
    return Row(
        tokens=tokens,
        first=first,
        certain=max(0, min(len(tokens), lease.computed + 1 - first)),
        table=lease.pages,
        slot=lease.slot,
        visible_from=max(1, lease.draft_from),
        wanted=wanted,
        settled=min(first, lease.computed + 1),
        guessed=guessed,
    )
