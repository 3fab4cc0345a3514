r"""The prefix tree: which pages hold which committed tokens, and which of them give way first.

One node per page. A path from the root spells a run of tokens, P at a time, so two requests that
start alike share nodes and thereby pages:

    root -- (5, 9, 2, 7) -- (1, 1, 4, 0)        P = 4
                        \-- (1, 1, 4, 3) -- (8, 8, 8, 8)

A node held by a lease cannot be evicted, and a held node has a held parent; so whatever is not
held can be evicted, leaf by leaf, and `cached` counts all of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, heapreplace

from surefoot.ids import SINK_PAGE, PageId, PointId


class LedgerFault(AssertionError):
    """The books contradict themselves: a bug of ours, never something a user did."""


class Node:
    """One page of committed tokens in the tree.

    Attributes:
        key: the page's P token ids.
        page: where their cache entries lie.
        parent: the page before it; None for the root only.
        children: the pages that followed it, by key.
        holders: how many leases hold it.
        point: the resume point at the end of this page, if there is one.
        rolling: the point moves on with the request that took it.
        point_drafted: the point is right in the drafter's caches too.
        drafted: the page carries the drafter's state too.
        last_used: the tree's clock when it was last let go.
    """

    __slots__ = (
        "children",
        "drafted",
        "holders",
        "key",
        "last_used",
        "page",
        "parent",
        "point",
        "point_drafted",
        "rolling",
    )

    def __init__(
        self, parent: Node | None, key: tuple[int, ...], page: PageId, drafted: bool
    ) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.holders = 0
        self.point: PointId | None = None
        self.rolling = False
        self.point_drafted = False
        self.drafted = drafted
        self.last_used = 0


class _Leaves:
    """Leaves that nobody holds, least recently used first.

    A node is queued once. Holding and dropping a queued node costs nothing here: its place is
    put right when it is met. A clock reading is given out once, so entries never tie.
    """

    __slots__ = ("_heap", "_queued")

    def __init__(self) -> None:
        self._heap: list[tuple[int, Node]] = []
        self._queued: set[Node] = set()

    def push(self, node: Node) -> None:
        """Queue a node that may be evicted from now on."""
        if node not in self._queued:
            self._queued.add(node)
            heappush(self._heap, (node.last_used, node))

    def pop(self) -> Node | None:
        """Take out the leaf to evict; None if all pages are held."""
        heap = self._heap
        while heap:
            stamp, node = heap[0]
            spare = _is_spare_leaf(node)
            if spare and stamp != node.last_used:
                heapreplace(heap, (node.last_used, node))
                continue
            heappop(heap)
            self._queued.discard(node)
            if spare:
                return node
        return None


def _is_spare_leaf(node: Node) -> bool:
    return not node.holders and not node.children


class PrefixTree:
    """Radix tree over page-sized runs of committed tokens.

    Attributes:
        root: stands for the empty prefix; it has no page and is never evicted.
        bounded: resume points hold some cache, so a prefix is usable only up to a point.
        cached: pages that no lease holds.
        held: pages that some lease holds.
        points: resume points attached to nodes.
    """

    __slots__ = (
        "_clock",
        "_leaves",
        "_page_tokens",
        "_spare_points",
        "bounded",
        "cached",
        "held",
        "points",
        "root",
    )

    def __init__(self, page_tokens: int, bounded: bool) -> None:
        self.bounded = bounded
        self.root = Node(None, (), SINK_PAGE, drafted=False)
        self.root.holders = 1
        self.cached = 0
        self.held = 0
        self.points = 0
        self._page_tokens = page_tokens
        self._clock = 0
        self._leaves = _Leaves()
        # Nodes with a point that nobody holds. They enter when they are let go, which is also
        # when their last use is noted, so they stand in order of last use.
        self._spare_points: OrderedDict[Node, None] = OrderedDict()

    def match(self, tokens: Sequence[int], limit_pages: int) -> list[Node]:
        """Find the longest usable prefix of `tokens` that is cached; changes nothing.

        Args:
            tokens: the tokens of a request, from position 0.
            limit_pages: most pages to match.

        Returns:
            The nodes from the first page on. For a bounded tree the last one has a point.
        """
        size = self._page_tokens
        path: list[Node] = []
        node = self.root
        for start in range(0, limit_pages * size, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            path.append(child)
            node = child
        while self.bounded and path and path[-1].point is None:
            path.pop()
        return path

    def drafted(self, path: Sequence[Node]) -> bool:
        """Whether a match brings the drafter's state: all its pages do, and its point."""
        pointed = not self.bounded or not path or path[-1].point_drafted
        return pointed and all(node.drafted for node in path)

    def insert(
        self, parent: Node, key: tuple[int, ...], page: PageId, drafted: bool
    ) -> tuple[Node, bool]:
        """Find the child `key` of `parent`, or make it with `page`, and hold it.

        Returns:
            The node, and whether it is new. If not, `page` remains the caller's.
        """
        node = parent.children.get(key)
        if node is not None:
            self.hold(node)
            return node, False
        node = Node(parent, key, page, drafted)
        node.holders = 1
        parent.children[key] = node
        self.held += 1
        return node, True

    def hold(self, node: Node) -> None:
        """Keep the node from being evicted; its parent must be held already."""
        if not node.holders:
            self.cached -= 1
            self.held += 1
            self._spare_points.pop(node, None)
        node.holders += 1

    def drop(self, node: Node) -> None:
        """Undo one `hold`; the deepest node of a path goes first.

        Raises:
            LedgerFault: the node is not held.
        """
        if not node.holders:
            raise LedgerFault(f"page {node.page} was dropped but has no holder")
        node.holders -= 1
        self._clock += 1
        node.last_used = self._clock
        if node.holders:
            return
        self.held -= 1
        self.cached += 1
        if not node.children:
            self._leaves.push(node)
        if node.point is not None:
            self._spare_points[node] = None

    def attach(self, node: Node, point: PointId, rolling: bool, drafted: bool = False) -> None:
        """Give a node that is held a resume point, with the drafter's state or without.

        Raises:
            LedgerFault: it has one already.
        """
        if node.point is not None:
            raise LedgerFault(f"page {node.page} has point {node.point}, got another, {point}")
        node.point = point
        node.rolling = rolling
        node.point_drafted = drafted
        self.points += 1

    def detach(self, node: Node) -> PointId:
        """Take the node's resume point away and return it.

        Raises:
            LedgerFault: it has none.
        """
        point = node.point
        if point is None:
            raise LedgerFault(f"page {node.page} has no point to take away")
        node.point = None
        node.rolling = node.point_drafted = False
        self.points -= 1
        self._spare_points.pop(node, None)
        return point

    def evict_page(self) -> tuple[PageId, PointId | None] | None:
        """Forget the least recently used leaf that nobody holds, and its point with it.

        Returns:
            The page and the point, both free now; None if every page is held.
        """
        node = self._leaves.pop()
        if node is None:
            return None
        point = self.detach(node) if node.point is not None else None
        self.cached -= 1
        parent = node.parent
        if parent is not None:
            del parent.children[node.key]
            if _is_spare_leaf(parent):
                self._leaves.push(parent)
        return node.page, point

    def evict_point(self) -> PointId | None:
        """Take the point away from the least recently used node that has one and is not held.

        Returns:
            The point, free now; None if there is no such node. The pages stay.
        """
        if not self._spare_points:
            return None
        return self.detach(next(iter(self._spare_points)))

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first; for audits and reports, not for the loop."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    def audit(self) -> None:
        """Check links, holders and counts of the whole tree.

        Raises:
            LedgerFault: something does not add up; the message names pages and counts.
        """
        held = cached = points = 0
        for node in self.nodes():
            self._audit_node(node)
            held += node.holders > 0
            cached += node.holders == 0
            points += node.point is not None
        for name, counted, kept in (
            ("held", held, self.held),
            ("cached", cached, self.cached),
            ("points", points, self.points),
        ):
            if counted != kept:
                raise LedgerFault(f"the tree has {counted} {name}, its count says {kept}")

    def _audit_node(self, node: Node) -> None:
        parent = node.parent
        if parent is None or parent.children.get(node.key) is not node:
            raise LedgerFault(f"page {node.page} is not the child its parent knows by its key")
        if len(node.key) != self._page_tokens:
            raise LedgerFault(
                f"page {node.page} has a key of {len(node.key)} tokens, not {self._page_tokens}"
            )
        if node.holders < 0 or (node.holders and not parent.holders):
            raise LedgerFault(
                f"page {node.page} has {node.holders} holders, "
                f"its parent page {parent.page} has {parent.holders}"
            )
