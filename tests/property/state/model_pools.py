"""Pools whose every entry names the prefix it stands for, and forward passes over them.

An entry of position p holds a digest of tokens[: p + 1]. So whatever a lease may read can be
compared with what it ought to read: the pages of a match, the ring after a resume, the
checkpoint, the drafter's entries. Rejected drafts leave junk behind, as they do in an engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from surefoot.state.ledger import Clear, Lease, Ledger, Restore, Save, Work
from surefoot.state.prefix import Node

P = 4
BLOCK = 4
WINDOW = 5
DRAFT = 3
COLUMNS = WINDOW + DRAFT + 1
ZERO, JUNK, POISON = 0, -1, -2
START = 7


def digests(tokens: Sequence[int]) -> list[int]:
    """Digest of tokens[:i] for each i from 0 to the length."""
    found = [START]
    for token in tokens:
        found.append(hash((found[-1], token)) & 0xFFFFFFFF)
    return found


def next_token(tokens: Sequence[int]) -> int:
    """What the model says after `tokens`."""
    return digests(tokens)[-1] % 2


@dataclass
class SlotRow:
    """A ring, and a checkpoint as (position, digest of what lies before it)."""

    ring: list[int] = field(default_factory=lambda: [ZERO] * COLUMNS)
    checkpoint: tuple[int, int] = (0, ZERO)

    def copy(self) -> "SlotRow":
        return SlotRow(list(self.ring), self.checkpoint)

    def saved(self, end: int) -> "Point":
        """What a resume point behind position `end` holds."""
        window = [self.ring[position % COLUMNS] for position in range(end - WINDOW, end)]
        return Point(window, self.checkpoint)


@dataclass(frozen=True)
class Point:
    """The entries of a window, and the checkpoint."""

    window: list[int] = field(default_factory=lambda: [POISON] * WINDOW)
    checkpoint: tuple[int, int] = (POISON, POISON)

    def restored(self, end: int) -> SlotRow:
        """A slot row with this behind position `end` and zeros elsewhere."""
        row = SlotRow(checkpoint=self.checkpoint)
        for offset, entry in enumerate(self.window):
            row.ring[(end - WINDOW + offset) % COLUMNS] = entry
        return row


@dataclass(eq=False)
class Running:
    tokens: list[int]
    lease: Lease
    started: bool = False


def check_slot_row(row: SlotRow, cursor: int, expected: list[int]) -> None:
    """The row holds what a request whose cursor is there may read."""
    for position in range(max(0, cursor - WINDOW), cursor):
        assert row.ring[position % COLUMNS] == expected[position + 1], f"ring at {position}"
    base = cursor // BLOCK * BLOCK
    assert row.checkpoint == (base, expected[base] if base else ZERO), "checkpoint"


def draft_row(cursor: int, expected: list[int]) -> tuple[int, int]:
    """What the drafter's checkpoint is where its cursor is there."""
    base = cursor // BLOCK * BLOCK
    return base, expected[base] if base else ZERO


def prefixes(node: Node, prefix: list[int]) -> Iterator[tuple[Node, list[int]]]:
    """All nodes below `node` with the tokens that lead to them and through them."""
    for child in node.children.values():
        tokens = [*prefix, *child.key]
        yield child, tokens
        yield from prefixes(child, tokens)


class World:
    """Pools and forward passes; whatever a row reads is checked before it is computed."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        limits = ledger.limits
        self.pages = [[POISON] * P for _ in range(limits.pages + 1)]
        self.draft_pages = [[POISON] * P for _ in range(limits.pages + 1)]
        self.rows = [SlotRow() for _ in range(limits.slots + 1)]
        self.points = [Point()] * limits.points
        # The drafter's checkpoints, as (position, digest of what lies before it).
        self.draft_rows = [(0, ZERO)] * len(self.rows)
        self.draft_points = [(POISON, POISON)] * limits.points

    def carry_out(self, work: Work) -> None:
        for page in work.clear_pages:
            self.pages[page] = [ZERO] * P
            self.draft_pages[page] = [ZERO] * P
        for move in work.moves:
            match move:
                case Clear(slot):
                    self.rows[slot], self.draft_rows[slot] = SlotRow(), (0, ZERO)
                case Save(slot, point, end):
                    self.points[point] = self.rows[slot].saved(end)
                    self.draft_points[point] = self.draft_rows[slot]
                case Restore(point, slot, end):
                    self.rows[slot] = self.points[point].restored(end)
                    self.draft_rows[slot] = self.draft_points[point]

    def poison(self, lease: Lease, since: int) -> None:
        """Spoil the pages that were handed out after the first `since` ones."""
        for page in lease.pages[since:]:
            self.pages[page] = [POISON] * P
            self.draft_pages[page] = [POISON] * P

    def check(self, running: Running) -> None:
        """Everything the next row of the request may read is what it ought to be."""
        lease, expected = running.lease, digests(running.tokens)
        for position in range(lease.computed):
            entry = self.pages[lease.pages[position // P]][position % P]
            assert entry == expected[position + 1], f"page entry of position {position}"
        for position in range(lease.draft_from, lease.drafted):
            entry = self.draft_pages[lease.pages[position // P]][position % P]
            assert entry == expected[position + 1], f"drafter entry of position {position}"
        for page in lease.pages:
            assert POISON not in self.pages[page], f"page {page} was not cleared"
        if self.ledger.limits.bounded:
            self.check_row(running, expected)

    def check_row(self, running: Running, expected: list[int]) -> None:
        row = self.rows[running.lease.slot]
        if running.lease.computed:
            check_slot_row(row, running.lease.computed, expected)
        else:
            assert row == SlotRow(), "the slot row of a new request is not clear"
        if running.lease.draft_from == 0:
            own = self.draft_rows[running.lease.slot]
            assert own == draft_row(running.lease.drafted, expected), "drafter row"

    def check_tree(self) -> None:
        """Everything a later request may be given is what its path in the tree says."""
        work = self.ledger._work
        now, self.rows = self.rows, [row.copy() for row in self.rows]
        points, self.points = self.points, list(self.points)
        rows_drafted, self.draft_rows = self.draft_rows, list(self.draft_rows)
        points_drafted, self.draft_points = self.draft_points, list(self.draft_points)
        self.carry_out(Work([], work.moves))
        for node, prefix in prefixes(self.ledger.tree.root, []):
            expected = digests(prefix)
            assert node.page not in work.clear_pages, f"page {node.page} will be cleared"
            assert self.pages[node.page] == expected[-P:], f"page entry of page {node.page}"
            if node.point is not None:
                restored = self.points[node.point].restored(len(prefix))
                check_slot_row(restored, len(prefix), expected)
                own = self.draft_points[node.point]
                right = own == draft_row(len(prefix), expected)
                assert right or not node.point_drafted, "drafter row of a point"
        self.rows, self.points = now, points
        self.draft_rows, self.draft_points = rows_drafted, points_drafted

    def forward(self, running: Running, entries: list[int]) -> None:
        """Write the row's entries from the cursor on."""
        self.carry_out(self.ledger.take_work())
        self.check(running)
        lease, row = running.lease, self.rows[running.lease.slot]
        for offset, entry in enumerate(entries):
            position = lease.computed + offset
            self.pages[lease.pages[position // P]][position % P] = entry
            if offset >= len(entries) - COLUMNS:
                row.ring[position % COLUMNS] = entry

    def commit(self, running: Running, n: int) -> None:
        lease = running.lease
        self.ledger.commit(lease, n)
        base = lease.computed // BLOCK * BLOCK
        if base:
            prefix = digests(running.tokens[:base])[-1]
            self.rows[lease.slot].checkpoint = (base, prefix)

    def catch_up(self, running: Running) -> None:
        """Bring the drafter's entries to the cursor."""
        lease, expected = running.lease, digests(running.tokens)
        for position in range(lease.drafted, lease.computed):
            self.draft_pages[lease.pages[position // P]][position % P] = expected[position + 1]
        lease.drafted = lease.computed
        whole = draft_row(lease.drafted, expected)
        self.draft_rows[lease.slot] = (whole[0], JUNK) if lease.draft_from else whole
