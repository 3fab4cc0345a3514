"""The prefix tree beside a plain dictionary, with eviction order found by looking at everything."""

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from surefoot.ids import PageId, PointId
from surefoot.state.prefix import Node, PrefixTree

P = 2
TOKENS = st.lists(st.integers(0, 1), min_size=P, max_size=10)


@dataclass
class Entry:
    """What the tree should know of one page."""

    page: int
    holders: int = 0
    used: int = 0
    point: int | None = None


class PrefixMachine(RuleBasedStateMachine):
    """Runs of tokens are inserted, held, let go, given points and evicted."""

    @initialize(bounded=st.booleans())
    def begin(self, bounded: bool) -> None:
        self.tree = PrefixTree(P, bounded)
        self.entries: dict[tuple[int, ...], Entry] = {}
        self.held: list[list[Node]] = []
        self.clock = 0
        self.next_id = 1

    def fresh_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def now(self) -> int:
        self.clock += 1
        return self.clock

    @rule(tokens=TOKENS)
    def insert(self, tokens: list[int]) -> None:
        """A request publishes its pages and holds them."""
        parent, path = self.tree.root, []
        for end in range(P, len(tokens) + 1, P):
            prefix, page = tuple(tokens[:end]), PageId(self.fresh_id())
            known = prefix in self.entries
            node, created = self.tree.insert(parent, prefix[-P:], page, drafted=False)
            assert created == (not known)
            if created:
                self.entries[prefix] = Entry(page)
            self.entries[prefix].holders += 1
            path.append(node)
            parent = node
        self.held.append(path)

    @rule(tokens=TOKENS, limit=st.integers(0, 5))
    def attach(self, tokens: list[int], limit: int) -> None:
        """A request is admitted with what is cached."""
        expected = self.longest(tokens, limit)
        path = self.tree.match(tokens, limit)
        assert [node.page for node in path] == [
            self.entries[tuple(tokens[:end])].page for end in range(P, expected + 1, P)
        ]
        for index, node in enumerate(path):
            self.hold(node, tuple(tokens[: (index + 1) * P]))
        self.held.append(path)

    def longest(self, tokens: list[int], limit: int) -> int:
        ends = [P * pages for pages in range(1, limit + 1) if P * pages <= len(tokens)]
        found = [end for end in ends if tuple(tokens[:end]) in self.entries]
        if self.tree.bounded:
            found = [end for end in found if self.entries[tuple(tokens[:end])].point is not None]
        return max(found, default=0)

    def hold(self, node: Node, prefix: tuple[int, ...]) -> None:
        self.tree.hold(node)
        self.entries[prefix].holders += 1

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 9))
    def let_go(self, index: int) -> None:
        path = self.held.pop(index % len(self.held))
        keys = [node.key for node in path]
        while path:
            prefix = tuple(token for key in keys[: len(path)] for token in key)
            self.tree.drop(path.pop())
            self.entries[prefix].holders -= 1
            self.entries[prefix].used = self.now()

    @precondition(lambda self: self.entries)
    @rule(index=st.integers(0, 99))
    def turn_point(self, index: int) -> None:
        """Give a held page a point, or take it away again; requests do this with their own."""
        held = sorted(prefix for prefix, entry in self.entries.items() if entry.holders)
        if not held:
            return
        prefix = held[index % len(held)]
        node, entry = self.node(prefix), self.entries[prefix]
        if entry.point is None:
            entry.point = self.fresh_id()
            self.tree.attach(node, PointId(entry.point), rolling=False)
        else:
            assert self.tree.detach(node) == entry.point
            entry.point = None

    def node(self, prefix: tuple[int, ...]) -> Node:
        node = self.tree.root
        for start in range(0, len(prefix), P):
            node = node.children[prefix[start : start + P]]
        return node

    @rule()
    def evict_page(self) -> None:
        parents = {prefix[:-P] for prefix in self.entries}
        leaves = [
            prefix
            for prefix, entry in self.entries.items()
            if not entry.holders and prefix not in parents
        ]
        evicted = self.tree.evict_page()
        if not leaves:
            assert evicted is None
            return
        entry = self.entries.pop(min(leaves, key=lambda prefix: self.entries[prefix].used))
        assert evicted == (entry.page, entry.point)

    @rule()
    def evict_point(self) -> None:
        entries = [e for e in self.entries.values() if e.point is not None and not e.holders]
        evicted = self.tree.evict_point()
        if not entries:
            assert evicted is None
            return
        entry = min(entries, key=lambda entry: entry.used)
        assert evicted == entry.point
        entry.point = None

    @invariant()
    def counts_agree(self) -> None:
        self.tree.audit()
        entries = self.entries.values()
        assert self.tree.held == sum(entry.holders > 0 for entry in entries)
        assert self.tree.cached == sum(entry.holders == 0 for entry in entries)
        assert self.tree.points == sum(entry.point is not None for entry in entries)

    def teardown(self) -> None:
        while self.held:
            self.let_go(0)
        while self.entries:
            self.evict_page()
        self.counts_agree()
        assert self.tree.evict_page() is None


TestPrefixMachine = PrefixMachine.TestCase
