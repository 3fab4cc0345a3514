"""Drafters that accept, reject and misbehave on purpose. Most know the answer from an oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import cast

from torch import Tensor

from surefoot.draft.drafter import CommittedRow, Drafter, DraftRow
from surefoot.draft.ngram import NgramDrafter
from surefoot.ids import RequestId
from surefoot.request import Request
from surefoot.state.ledger import Lease, LedgerLimits, Work
from surefoot.testing.fakes import EMPTY, HashModel

Oracle = Callable[[Request, int], list[int]]
"""(request, count) to the next `count` tokens that it will emit; fewer if it knows no more."""


class StatelessDrafter:
    """What all drafters without caches share."""

    name = "stateless"

    def prepare(self, work: Work) -> None:
        """See Drafter: nothing to do."""

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See Drafter: one row at a time."""
        return [self.guess(row) for row in rows]

    def guess(self, row: DraftRow) -> list[int]:
        """The draft for one row."""
        return []

    def observe(self, rows: Sequence[CommittedRow], hidden: Tensor) -> None:
        """See Drafter: nothing to do."""

    def forget(self, request: RequestId) -> None:
        """See Drafter: nothing to do."""


class AlwaysRight(StatelessDrafter):
    """Proposes what will be chosen, as many as are wanted."""

    name = "right"

    def __init__(self, oracle: Oracle) -> None:
        """Ask `oracle`."""
        self.oracle = oracle

    def guess(self, row: DraftRow) -> list[int]:
        """See StatelessDrafter."""
        return self.oracle(row.request, row.limit)


class AlwaysWrong(StatelessDrafter):
    """Proposes tokens that will not be chosen, as many as are wanted."""

    name = "wrong"

    def __init__(self, oracle: Oracle, vocab: int) -> None:
        """Avoid what `oracle` says, with tokens below `vocab`."""
        self.oracle, self.vocab = oracle, vocab

    def guess(self, row: DraftRow) -> list[int]:
        """See StatelessDrafter."""
        return [(token + 1) % self.vocab for token in self.oracle(row.request, row.limit)]


class RandomLength(StatelessDrafter):
    """Drafts of random length whose tokens are right up to a random place."""

    name = "random"

    def __init__(self, oracle: Oracle, vocab: int, seed: int) -> None:
        """Draw lengths from `seed`; the tokens follow `oracle` and stay below `vocab`."""
        self.oracle, self.vocab, self._random = oracle, vocab, Random(seed)

    def guess(self, row: DraftRow) -> list[int]:
        """See StatelessDrafter."""
        right = self.oracle(row.request, self._random.randint(0, row.limit))
        place = self._random.randint(0, len(right))
        return right[:place] + [(token + 1) % self.vocab for token in right[place:]]


class Alternating(StatelessDrafter):
    """Nothing in one step, all that is wanted in the next."""

    name = "alternating"

    def __init__(self, oracle: Oracle) -> None:
        """Ask `oracle` every second time."""
        self.oracle, self._full = oracle, False

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See Drafter."""
        self._full = not self._full
        return [self.oracle(row.request, row.limit) if self._full else [] for row in rows]


class Raising(AlwaysRight):
    """Right, but every `every`-th call raises."""

    name = "raising"

    def __init__(self, oracle: Oracle, every: int) -> None:
        """Raise at call `every`, 2 * `every`, ..."""
        super().__init__(oracle)
        self._every, self._calls = every, 0

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See Drafter.

        Raises:
            RuntimeError: every so often.
        """
        self._calls += 1
        if self._calls % self._every == 0:
            raise RuntimeError(f"call {self._calls} of this drafter fails")
        return super().propose(rows)


class Rubbish(StatelessDrafter):
    """Things that are no drafts: too long, too few, ids that do not exist, other types."""

    name = "rubbish"

    def __init__(self, vocab: int, seed: int) -> None:
        """Draw from `seed`; legal ids lie below `vocab`."""
        self._random = Random(seed)
        self._kinds: list[object] = [
            [vocab],
            [-1, 0],
            [0] * 99,
            [0, None],
            [1.0],
            [True],
            ["a"],
            None,
            (0, 1),
            "ab",
            [2**70],
        ]

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See Drafter, and do not do it."""
        count = len(rows) + self._random.choice([0, 0, 0, 1, -1])
        drafts = [self._random.choice(self._kinds) for _ in range(count)]
        return cast(list[list[int]], drafts)


class PagedGuesser(StatelessDrafter):
    """Keeps caches of its own and guesses from them: right where they are, else nonsense.

    It stands for a draft model. Its entries lie under the target's page table, `lease.drafted` is
    its cursor, and it looks at nothing below `lease.draft_from`.

    Attributes:
        complaints: entries that were not what the cursor promised; tests look here.
    """

    name = "paged"

    def __init__(self, model: HashModel, limits: LedgerLimits, seed: int) -> None:
        """Draft for `model`; `limits` are those of the ledger."""
        self._model, self._size, self._random = model, limits.page_tokens, Random(seed)
        self._pages = [[EMPTY] * limits.page_tokens for _ in range(limits.pages + 1)]
        self.complaints: list[str] = []

    def prepare(self, work: Work) -> None:
        """See Drafter."""
        for page in work.clear_pages:
            self._pages[page] = [EMPTY] * self._size

    def guess(self, row: DraftRow) -> list[int]:
        """See StatelessDrafter: one token in five is made wrong."""
        known = len(row.request.tokens)
        self._check(row.request, row.lease)
        self._write(row.lease, row.request.tokens, row.lease.drafted)
        draft = [
            token if self._random.random() < 0.8 else (token + 1) % self._model.vocab
            for token in self._model.guess(row.request, row.limit)
        ]
        self._write(row.lease, [*row.request.tokens, *draft[:-1]], known)
        row.lease.drafted = known + len(draft) - 1
        return draft

    def observe(self, rows: Sequence[CommittedRow], hidden: Tensor) -> None:
        """See Drafter: complete the pages that are about to be published."""
        for row in rows:
            lease = row.lease
            lease.drafted = min(lease.drafted, lease.computed)
            if row.keep_up and lease.drafted < lease.computed // self._size * self._size:
                self._write(lease, row.request.tokens[: lease.computed], lease.drafted)
                lease.drafted = lease.computed

    def _write(self, lease: Lease, tokens: Sequence[int], start: int) -> None:
        for position in range(start, len(tokens)):
            page, place = divmod(position, self._size)
            entry = self._model.entry(position, tokens[position])
            self._pages[lease.pages[page]][place] = entry

    def _check(self, request: Request, lease: Lease) -> None:
        for position in range(lease.draft_from, lease.drafted):
            page, place = divmod(position, self._size)
            entry = self._pages[lease.pages[page]][place]
            if entry != self._model.entry(position, request.tokens[position]):
                self.complaints.append(
                    f"request {request.id}: the drafter's entry of position {position} is wrong"
                )


def make_test_drafter(name: str, oracle: Oracle, vocab: int, seed: int) -> Drafter:
    """The drafter called `name`, most of them fed by `oracle`; "raising" fails every third call.

    Raises:
        KeyError: there is no such drafter.
    """
    makers: dict[str, Callable[[], Drafter]] = {
        "ngram": lambda: NgramDrafter(3, 1),
        "right": lambda: AlwaysRight(oracle),
        "wrong": lambda: AlwaysWrong(oracle, vocab),
        "random": lambda: RandomLength(oracle, vocab, seed),
        "alternating": lambda: Alternating(oracle),
        "raising": lambda: Raising(oracle, 3),
        "rubbish": lambda: Rubbish(vocab, seed),
    }
    return makers[name]()
