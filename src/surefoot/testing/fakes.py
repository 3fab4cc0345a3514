"""Stand-ins for the clock, the model and its failures: an engine without weights, fast and exact.

The pretended model's next token is a hash of everything before it, read back through pages, ring
rows and a checkpoint just as a model would read them. Whoever mixes up a page, a row, a cursor or
a checkpoint changes the tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

import torch

from surefoot.backend.operands import Fold
from surefoot.backend.protocol import UNCHOSEN
from surefoot.draft.drafter import CommittedRow, Drafter, DraftRow
from surefoot.engine.rows import PlannedRow, RowResult
from surefoot.engine.runner import Runner, StepResult
from surefoot.ids import PointId, RequestId, SlotId
from surefoot.request import FinishReason, Request
from surefoot.state.ledger import Clear, LedgerLimits, Restore, Save, Work
from surefoot.step import fold_due

EMPTY = 0
"""What a cleared cache entry holds; no token's entry equals it."""


class FakeClock:
    """Seconds that pass only when told to, or by a fixed amount at each reading."""

    def __init__(self, tick: float = 0.0) -> None:
        """Start at 0; each reading moves the clock on by `tick` seconds."""
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        """Read the clock."""
        self.now += self.tick
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@dataclass(frozen=True)
class HashModel:
    """A pure function from a request's prefix to its next token.

    Attributes:
        vocab: number of token ids.
        window: how many last positions it sees through a ring as well; 0 for none.
        broken_one_in: about one prefix of this many has no next token; 0 for none.
        block: it also keeps a recurrent state with a checkpoint at multiples of this; 0 for none.
    """

    vocab: int
    window: int = 0
    broken_one_in: int = 0
    block: int = 0

    def entry(self, position: int, token: int) -> int:
        """What the caches hold for a token."""
        return 1 + (hash((position, token)) & 0xFFFFFFFF)

    def replay(self, state: int, entries: Sequence[int]) -> tuple[int, int]:
        """The recurrent state after entries that follow a block boundary.

        Args:
            state: the checkpoint at that boundary.
            entries: of the positions from there on.

        Returns:
            The checkpoint at the last boundary up to their end, and the state at their end.
        """
        if not self.block:
            return EMPTY, EMPTY
        whole = len(entries) // self.block * self.block
        for start in range(0, whole, self.block):
            state = hash((state, tuple(entries[start : start + self.block])))
        return state, hash((state, tuple(entries[whole:])))

    def choose(
        self, request: Request, entries: Sequence[int], recent: Sequence[int], state: int
    ) -> int:
        """The token after a prefix, given the entries that were read back for it.

        Args:
            request: whose seed, end tokens and min_tokens count.
            entries: one for each position of the prefix.
            recent: those of the last `window` positions, as the ring had them.
            state: the recurrent state after the prefix.
        """
        number = hash((request.seed, tuple(entries), tuple(recent), state)) & 0x7FFFFFFF
        if self.broken_one_in and number % self.broken_one_in == 0:
            return UNCHOSEN
        token = number // 7 % self.vocab
        young = len(entries) - request.prompt_length < request.params.min_tokens
        while young and token in request.end_tokens:
            token = (token + 1) % self.vocab
        return token

    def follow(self, request: Request, tokens: Sequence[int]) -> int:
        """The token after `tokens` of the request."""
        entries = [self.entry(position, token) for position, token in enumerate(tokens)]
        recent = entries[max(0, len(entries) - self.window) :]
        return self.choose(request, entries, recent, self.replay(EMPTY, entries)[1])

    def guess(self, request: Request, count: int) -> list[int]:
        """The next `count` tokens: an oracle for test drafters."""
        tokens = list(request.tokens)
        for _ in range(count):
            tokens.append(max(self.follow(request, tokens), 0))
        return tokens[len(request.tokens) :]

    def answer(self, request: Request) -> tuple[list[int], FinishReason]:
        """All that the request must emit, and why it ends, from its prompt alone."""
        tokens = list(request.tokens[: request.prompt_length])
        while True:
            token = self.follow(request, tokens)
            if token == UNCHOSEN:
                return tokens[request.prompt_length :], FinishReason.ERROR
            tokens.append(token)
            if token in request.end_tokens:
                return tokens[request.prompt_length :], FinishReason.STOP
            if len(tokens) >= request.length_limit:
                return tokens[request.prompt_length :], FinishReason.LENGTH


class HashRunner:
    """Runs a HashModel over pages and ring rows that are plain lists.

    Attributes:
        complaints: writes that no runner should be asked for; tests look here.
    """

    def __init__(self, model: HashModel, limits: LedgerLimits, draft_tokens: int) -> None:
        """Make room for what `limits` names; drafts of up to `draft_tokens` fit the rings."""
        assert not model.block or draft_tokens < model.block, "a draft may complete one block"
        self.model = model
        self.complaints: list[str] = []
        self._page_tokens = limits.page_tokens
        self._columns = model.window + draft_tokens + 1
        rows = 1 + limits.slots
        self._pages = [[EMPTY] * limits.page_tokens for _ in range(limits.pages + 1)]
        self._rings = [[EMPTY] * self._columns for _ in range(rows)]
        self._inputs = [[EMPTY] * (model.block + draft_tokens) for _ in range(rows)]
        self._checkpoints = [EMPTY] * rows
        # Of each resume point: the entries of the window before it, and the checkpoint there.
        self._points: dict[PointId, tuple[list[int], int]] = {}

    def prepare(self, work: Work) -> None:
        """See Runner."""
        for page in work.clear_pages:
            self._pages[page] = [EMPTY] * self._page_tokens
        for move in work.moves:
            match move:
                case Clear(slot):
                    self._clear(slot)
                case Save(slot, point, end):
                    self._save(slot, point, end)
                case Restore(point, slot, end):
                    self._clear(slot)
                    window, self._checkpoints[slot] = self._points[point]
                    _write_ring(self._rings[slot], end - self.model.window, window)

    def _save(self, slot: SlotId, point: PointId, end: int) -> None:
        window = range(end - self.model.window, end)
        self._points[point] = _read_ring(self._rings[slot], window), self._checkpoints[slot]

    def _clear(self, slot: SlotId) -> None:
        for rings in (self._rings, self._inputs):
            rings[slot] = [EMPTY] * len(rings[slot])
        self._checkpoints[slot] = EMPTY

    def run(self, rows: Sequence[PlannedRow]) -> StepResult:
        """See Runner: all rows write their pages before any of them reads."""
        self._check_writers(rows)
        entries = [self._write(row) for row in rows]
        results = [self._choose(row, own) for row, own in zip(rows, entries, strict=True)]
        for row, own in zip(rows, entries, strict=True):
            self._advance(row, own)
            _write_ring(self._rings[row.lease.slot], row.first, own)
            _write_ring(self._inputs[row.lease.slot], row.first, own)
        return StepResult(results, torch.empty(0))

    def settle(self, rows: Sequence[PlannedRow]) -> None:
        """See Runner: a block that accepted drafts completed is folded."""
        block = self.model.block
        for row in rows if block else ():
            fold = fold_due(row.lease.slot, row.first + row.count, row.lease.computed, block)
            if fold is not None:
                self._fold(fold)

    def _fold(self, fold: Fold) -> None:
        """Move a checkpoint on by one block, from the inputs in the ring."""
        positions = range(fold.base, fold.base + self.model.block)
        inputs = _read_ring(self._inputs[fold.slot], positions)
        state, _ = self.model.replay(self._checkpoints[fold.slot], inputs)
        self._checkpoints[fold.slot] = state

    def forget(self, request: RequestId) -> None:
        """Nothing is kept by request."""

    def _check_writers(self, rows: Sequence[PlannedRow]) -> None:
        writers: dict[int, RequestId] = {}
        for row in rows:
            last = row.first + row.count + len(row.drafts) - 1
            for index in range(row.first // self._page_tokens, last // self._page_tokens + 1):
                page, path = row.lease.pages[index], row.lease.path
                shared = index < len(path) and path[index].page == page
                other = writers.setdefault(page, row.request.id)
                if page == 0 or shared or other != row.request.id:
                    self.complaints.append(f"request {row.request.id} may not write page {page}")

    def _write(self, row: PlannedRow) -> list[int]:
        tokens = [*row.request.tokens[row.first : row.first + row.count], *row.drafts]
        own = [self.model.entry(row.first + i, token) for i, token in enumerate(tokens)]
        for offset, entry in enumerate(own):
            page, place = divmod(row.first + offset, self._page_tokens)
            self._pages[row.lease.pages[page]][place] = entry
        return own

    def _choose(self, row: PlannedRow, own: Sequence[int]) -> RowResult:
        if not row.final:
            return RowResult([])
        seen = list(chain.from_iterable(self._pages[page] for page in row.lease.pages))
        ends = range(row.first + row.count, row.first + len(own) + 1)
        request = row.request
        return RowResult(
            [
                self.model.choose(
                    request,
                    seen[:end],
                    self._recent(row, own, end),
                    self._replayed(row, own, end)[1],
                )
                for end in ends
            ]
        )

    def _recent(self, row: PlannedRow, own: Sequence[int], end: int) -> list[int]:
        """Entries of the last positions before `end`: the ring's, then the row's own."""
        start = max(0, end - self.model.window)
        before = _read_ring(self._rings[row.lease.slot], range(start, min(row.first, end)))
        return before + list(own[max(0, start - row.first) : end - row.first])

    def _replayed(self, row: PlannedRow, own: Sequence[int], end: int) -> tuple[int, int]:
        """The checkpoint and the state before position `end`, from the row's checkpoint on."""
        block, slot = self.model.block, row.lease.slot
        if not block:
            return EMPTY, EMPTY
        before = _read_ring(self._inputs[slot], range(row.first // block * block, row.first))
        entries = [*before, *own[: end - row.first]]
        return self.model.replay(self._checkpoints[slot], entries)

    def _advance(self, row: PlannedRow, own: Sequence[int]) -> None:
        """Bring the checkpoint up to the known tokens."""
        checkpoint, _ = self._replayed(row, own, row.first + row.count)
        self._checkpoints[row.lease.slot] = checkpoint


def _read_ring(ring: Sequence[int], positions: range) -> list[int]:
    return [ring[position % len(ring)] for position in positions]


def _write_ring(ring: list[int], first: int, entries: Sequence[int]) -> None:
    """Write the last entries of a row that starts at `first`, as many as there are columns."""
    end = first + len(entries)
    for position in range(max(first, end - len(ring)), end):
        ring[position % len(ring)] = entries[position - first]


class InjectedFailure(RuntimeError):
    """What a call raises that was told to fail."""


class Failures:
    """Says which calls fail: those with the given numbers, counted from 0, or some by chance.

    Attributes:
        calls: how many calls were made so far.
        raised: how many of them failed.
    """

    def __init__(self, at: Collection[int] = (), rate: float = 0.0, seed: int = 0) -> None:
        """Fail the calls numbered `at`, and any other with probability `rate`."""
        self._at = frozenset(at)
        self._rate = rate
        self._random = Random(seed)
        self.calls = 0
        self.raised = 0

    def strike(self, what: str) -> None:
        """Count one call; raise if it is one that fails."""
        number = self.calls
        self.calls += 1
        if number in self._at or (self._rate and self._random.random() < self._rate):
            self.raised += 1
            raise InjectedFailure(f"{what}, call {number}")


class FailingRunner:
    """A runner that may fail before it has prepared anything, with all caches written, or after."""

    def __init__(self, runner: Runner, failures: Failures) -> None:
        """Wrap `runner`."""
        self._runner, self._failures = runner, failures

    def prepare(self, work: Work) -> None:
        """See Runner."""
        self._failures.strike("prepare")
        self._runner.prepare(work)

    def run(self, rows: Sequence[PlannedRow]) -> StepResult:
        """See Runner."""
        result = self._runner.run(rows)
        self._failures.strike("run")
        return result

    def settle(self, rows: Sequence[PlannedRow]) -> None:
        """See Runner."""
        self._failures.strike("settle")
        self._runner.settle(rows)

    def forget(self, request: RequestId) -> None:
        """See Runner."""
        self._runner.forget(request)


class FailingDrafter:
    """A drafter any of whose calls may fail."""

    def __init__(self, drafter: Drafter, failures: Failures) -> None:
        """Wrap `drafter`."""
        self._drafter, self._failures = drafter, failures

    @property
    def name(self) -> str:
        """The drafter's own name."""
        return self._drafter.name

    def prepare(self, work: Work) -> None:
        """See Drafter."""
        self._failures.strike("drafter prepare")
        self._drafter.prepare(work)

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int]]:
        """See Drafter."""
        self._failures.strike("propose")
        return self._drafter.propose(rows)

    def observe(self, rows: Sequence[CommittedRow], hidden: torch.Tensor) -> None:
        """See Drafter."""
        self._failures.strike("observe")
        self._drafter.observe(rows, hidden)

    def forget(self, request: RequestId) -> None:
        """See Drafter."""
        self._failures.strike("forget")
        self._drafter.forget(request)
