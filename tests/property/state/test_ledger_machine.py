"""The ledger under random use, with the content of its pools checked at every step."""

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from surefoot.state.ledger import Ledger, LedgerFault, LedgerLimits
from tests.property.state.model_pools import DRAFT, JUNK, P, Running, World, digests, next_token


@dataclass
class Row:
    """What happens in one step: chunk or draft length, accepted drafts, what follows."""

    n: int
    accepted: int
    publish: bool
    drafting: bool


MOSTLY = st.sampled_from([True, True, True, False])
SIZES = st.sampled_from([1, 2, 3, 4, 4, 4, 7, 12])
ROWS = st.builds(Row, SIZES, st.integers(0, DRAFT), st.booleans(), MOSTLY)
STEMS = [[(index * step // 3) % 2 for index in range(24)] for step in (1, 2, 4)]


class LedgerMachine(RuleBasedStateMachine):
    """Requests come, run, are drafted for, fail, are pre-empted, end and come back longer."""

    ledger_class: type[Ledger] = Ledger
    world_class: type[World] = World
    always_points = False

    @initialize(
        pages=st.sampled_from([4, 7, 11, 16, 30]),
        slots=st.sampled_from([1, 2, 3]),
        points=st.sampled_from([0, 1, 2, 4, 7]),
        bounded=st.sampled_from([True, True, False]),
        every=st.sampled_from([1, 2, 4]),
        cache=st.sampled_from([True, True, True, False]),
    )
    def begin(
        self, pages: int, slots: int, points: int, bounded: bool, every: int, cache: bool
    ) -> None:
        if self.always_points:
            bounded, cache, points = True, True, points + 2
        limits = LedgerLimits(pages, slots, points, P, bounded, every, cache)
        self.ledger = self.ledger_class(limits)
        self.world = self.world_class(self.ledger)
        self.running: list[Running] = []
        self.ended: list[list[int]] = []

    def snapshot(self) -> object:
        """All that a refusal must leave alone."""
        ledger, leases = self.ledger, [running.lease for running in self.running]
        return (
            ledger.free_pages,
            ledger.free_slots,
            [(node.page, node.holders, node.last_used, node.point) for node in ledger.tree.nodes()],
            [(list(lease.pages), lease.capacity, lease.computed) for lease in leases],
            len(ledger._work.clear_pages),
            len(ledger._work.moves),
        )

    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(0, 24),
        more=st.lists(st.integers(0, 1), min_size=1, max_size=3),
        first=st.integers(1, 9),
    )
    def admit(self, stem: list[int], length: int, more: list[int], first: int) -> None:
        self.admit_tokens([*stem[:length], *more], first)

    @precondition(lambda self: self.ended)
    @rule(index=st.integers(0, 5), more=st.lists(st.integers(0, 1), max_size=6))
    def admit_again(self, index: int, more: list[int]) -> None:
        """A pre-empted request, or the next turn of a conversation."""
        tokens = self.ended[-1 - index % len(self.ended)]
        self.admit_tokens([*tokens, *more][:40], 1)

    def admit_tokens(self, tokens: list[int], first: int) -> None:
        before, ledger = self.snapshot(), self.ledger
        limit = (len(tokens) - 1) // P
        path = ledger.tree.match(tokens, limit)
        unheld = [node for node in ledger.tree.nodes() if not node.holders and node not in path]
        room = ledger.free_pages + len(unheld)
        possible = ledger.free_slots > 0 and -(-first // P) <= room
        lease = ledger.admit(tokens, first)
        assert (lease is not None) == possible
        if lease is None:
            assert self.snapshot() == before
            return
        assert lease.computed == lease.cached == len(path) * P <= len(tokens) - 1
        assert lease.capacity >= lease.computed + first
        self.world.poison(lease, len(path))
        self.running.append(Running(list(tokens), lease))

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 2), rows=st.lists(ROWS, min_size=3, max_size=16))
    def run(self, index: int, rows: list[Row]) -> None:
        self.run_rows(self.running[index % len(self.running)], rows)

    @precondition(lambda self: self.running)
    @rule(
        index=st.integers(0, 2),
        rows=st.lists(ROWS, max_size=4),
        more=st.lists(st.integers(0, 1), max_size=2),
    )
    def preempt(self, index: int, rows: list[Row], more: list[int]) -> None:
        """Released and admitted again, perhaps with the first tokens of the next turn."""
        running = self.running[index % len(self.running)]
        if self.run_rows(running, rows):
            self.end(running, publish=True)
        self.admit_tokens([*running.tokens, *more][:40], 1)

    def run_rows(self, running: Running, rows: list[Row]) -> bool:
        """Returns whether the request is still running, which it is unless pages ran out."""
        for row in rows:
            if not self.step(running, row):
                self.end(running, publish=True)
                return False
            self.ledger.audit()
            self.world.check_tree()
        return True

    def step(self, running: Running, row: Row) -> bool:
        lease, known = running.lease, len(running.tokens)
        # The last token of a prompt may be computed like any other, with drafts behind it.
        if known - lease.computed > 1 or (lease.computed < lease.prompt and row.n == 1):
            done = self.prefill(running, min(row.n, known - lease.computed))
        else:
            done = self.verify(running, min(row.n - 1, DRAFT), row.accepted)
        if not done:
            return False
        if row.drafting:
            self.draft(running)
        if row.publish:
            self.ledger.publish(lease, running.tokens)
        return True

    def draft(self, running: Running) -> None:
        """The drafter catches up; after a pause it starts anew at the cursor."""
        lease = running.lease
        if lease.drafted < lease.row_start:
            lease.draft_from = lease.drafted = lease.row_start
        self.world.catch_up(running)

    def reserve(self, running: Running, n: int, evict: bool) -> bool:
        before, lease = self.snapshot(), running.lease
        had = len(lease.pages)
        room = self.ledger.free_pages + (self.ledger.cached_pages if evict else 0)
        granted = self.ledger.reserve(lease, n, evict)
        assert granted == (-(-(lease.computed + n) // P) - had <= room)
        if granted:
            assert lease.capacity >= lease.computed + n
            self.world.poison(lease, had)
        else:
            assert self.snapshot() == before
        return granted

    def prefill(self, running: Running, n: int) -> bool:
        lease = running.lease
        n = self.ledger.chunk(lease, n)
        assert n >= 1
        if not self.reserve(running, n, evict=True):
            return False
        self.world.forward(
            running, digests(running.tokens)[lease.computed + 1 : lease.computed + n + 1]
        )
        self.world.commit(running, n)
        if lease.computed == len(running.tokens):
            running.tokens.append(next_token(running.tokens))
        return True

    def verify(self, running: Running, depth: int, accepted: int) -> bool:
        """A row of the bonus and `depth` drafts, of which the first `accepted` are right."""
        lease = running.lease
        if not self.reserve(running, 1 + depth, evict=False):
            depth = 0
            if not self.reserve(running, 1, evict=True):
                return False
        accepted = min(accepted, depth)
        longer = list(running.tokens)
        for _ in range(accepted + 1):
            longer.append(next_token(longer))
        right = digests(longer)[lease.computed + 1 : lease.computed + 2 + accepted]
        self.world.forward(running, right + [JUNK] * (depth - accepted))
        running.tokens = longer
        self.world.commit(running, 1 + accepted)
        return True

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 2), publish=MOSTLY, broken=st.integers(0, 6))
    def release(self, index: int, publish: bool, broken: int) -> None:
        """The request ends; in one case of seven its forward breaks off half-way."""
        running = self.running[index % len(self.running)]
        fails = broken == 6 and self.reserve(running, 6, evict=True)
        if fails:
            self.world.forward(running, [JUNK] * 5)
        self.end(running, publish and not fails)

    def end(self, running: Running, publish: bool) -> None:
        self.running.remove(running)
        self.ended = [*self.ended[-5:], running.tokens]
        lease = running.lease
        self.ledger.release(lease, running.tokens, publish)
        with pytest.raises(LedgerFault):
            self.ledger.release(lease, running.tokens)

    @invariant()
    def adds_up(self) -> None:
        self.ledger.audit()
        if not self.running:
            assert self.ledger.held_pages == 0
            assert self.ledger.free_slots == self.ledger.limits.slots

    @invariant()
    def tree_and_pools_agree(self) -> None:
        self.world.check_tree()

    @invariant()
    def pages_are_numbered_like_positions(self) -> None:
        for running in self.running:
            lease = running.lease
            assert len(set(lease.pages)) == len(lease.pages) == lease.capacity // P
            keys = [token for node in lease.path for token in node.key]
            assert keys == running.tokens[: len(keys)]

    def teardown(self) -> None:
        for running in list(self.running):
            self.end(running, publish=True)
        self.ledger.audit()
        assert self.ledger.held_pages == 0


TestLedgerMachine = LedgerMachine.TestCase
