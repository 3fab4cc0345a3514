"""The ledger: who may use which page and slot. One way in, one way out.

    admit -> (reserve -> forward -> commit -> publish)* -> release

    page table of a lease                 P = 4, computed = 10, path of 2 nodes
    [ page 3 | page 8 | page 5 | page 6 ]
      tree's   tree's   private  private   capacity 16
    0        4        8   ^10          16
                      published ends     what lies past computed is never read as truth

Nothing here touches a tensor. What must happen to the pools is written down as `Work`, which
the runner carries out before the next forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush

from surefoot.ids import PageId, PointId, SlotId
from surefoot.state.lease import Clear, Lease, LedgerLimits, Restore, Save, Work, audit_owners
from surefoot.state.prefix import LedgerFault, Node, PrefixTree

__all__ = ["Clear", "Lease", "Ledger", "LedgerFault", "LedgerLimits", "Restore", "Save", "Work"]

_NEVER = 1 << 62


class Ledger:
    """Gives out pages, slots and resume points, and takes them back.

    Attributes:
        limits: what it was made with.
        tree: the prefix tree; change it through the ledger only.
    """

    def __init__(self, limits: LedgerLimits) -> None:
        self.limits = limits
        self.tree = PrefixTree(limits.page_tokens, limits.bounded)
        self._page_tokens = limits.page_tokens
        self._pointing = limits.bounded and limits.prefix_cache and limits.points > 0
        self._caching = limits.prefix_cache and (self._pointing or not limits.bounded)
        # Heaps: the lowest id goes first, so a lone request gets consecutive pages.
        self._free_pages = [PageId(page) for page in range(1, limits.pages + 1)]
        self._free_slots = [SlotId(slot) for slot in range(1, limits.slots + 1)]
        self._free_points = [PointId(point) for point in range(limits.points)]
        self._private = 0
        self._leases: set[Lease] = set()
        self._work = Work()

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return len(self._free_pages)

    @property
    def cached_pages(self) -> int:
        """Pages of the prefix cache that no lease holds; they give way when pages are needed."""
        return self.tree.cached

    @property
    def held_pages(self) -> int:
        """Pages that leases hold, shared ones counted once."""
        return self._private + self.tree.held

    @property
    def free_slots(self) -> int:
        """How many more leases can be admitted as far as slots go."""
        return len(self._free_slots)

    @property
    def usage(self) -> float:
        """Held pages as a fraction of all pages."""
        return self.held_pages / self.limits.pages

    def admit(self, tokens: Sequence[int], first: int, reuse: bool = True) -> Lease | None:
        """Open a lease with the longest cached prefix attached: all or nothing.

        Args:
            tokens: the known tokens of the request; at least the last one is left to compute.
            first: tokens beyond the cached prefix that must have room at once.
            reuse: whether cached pages may be attached.

        Returns:
            The lease, its cursor at the end of what was attached; None if a slot or pages are
            missing, and then nothing has changed. Cached pages are evicted if need be.
        """
        if not self._free_slots:
            return None
        limit = (len(tokens) - 1) // self._page_tokens
        path = self.tree.match(tokens, limit) if reuse and self._caching else []
        need = -(-first // self._page_tokens)
        spare = self.tree.cached - sum(not node.holders for node in path)
        if need > len(self._free_pages) + spare:
            return None
        for node in path:
            self.tree.hold(node)
        drafted = self.tree.drafted(path)
        lease = Lease(self._slot_for(path), path, len(tokens), self._page_tokens)
        if not drafted:
            lease.undraft()
        if not self._caching:
            lease.publish_at = _NEVER
        self._leases.add(lease)
        self._extend(lease, need)
        return lease

    def reserve(self, lease: Lease, n: int, evict: bool = True) -> bool:
        """Make room for positions [0, computed + n) of the lease.

        Args:
            lease: an open lease.
            n: tokens of the next row, drafted ones included.
            evict: whether cached pages may give way; drafts must not make them.

        Returns:
            Whether there is room now. No other lease is ever touched; False changes nothing.

        Raises:
            LedgerFault: the lease was released.
        """
        missing = lease.computed + n - lease.capacity
        if missing <= 0:
            return True
        self._check_open(lease)
        count = -(-missing // self._page_tokens)
        if count > len(self._free_pages) + (self.tree.cached if evict else 0):
            return False
        self._extend(lease, count)
        return True

    def chunk(self, lease: Lease, n: int) -> int:
        """Cut a prefill chunk of `n` tokens so that it ends at the next point boundary or before.

        A resume point can be taken only while the slot row stands at the boundary. Rows past the
        prompt's last boundary, and models without bounded caches, are never cut.
        """
        size = self._page_tokens
        if not self._pointing or lease.computed >= lease.last_point * size:
            return n
        page = self.limits.next_point(lease.computed // size)
        return min(n, min(page, lease.last_point) * size - lease.computed)

    def commit(self, lease: Lease, n: int) -> None:
        """Move the cursor over `n` tokens whose state is final.

        Raises:
            LedgerFault: they lie beyond what was reserved, or the lease was released.
        """
        start = lease.computed
        end = start + n
        if n < 0 or end > lease.capacity:
            raise LedgerFault(
                f"slot {lease.slot}: commit of {n} tokens at {start}, room for {lease.capacity}"
            )
        lease.row_start = start
        lease.computed = end

    def publish(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Hand full pages below the cursor to the tree; take a resume point where one is due.

        Call it after each commit: what a point must hold is overwritten by the rows that follow.

        Args:
            lease: an open lease.
            tokens: the known tokens of the request, at least `computed` many.

        Raises:
            LedgerFault: fewer tokens are known than computed, or the lease was released.
        """
        if lease.computed < lease.publish_at:
            return
        self._check_open(lease)
        if len(tokens) < lease.computed:
            raise LedgerFault(
                f"slot {lease.slot}: {lease.computed} tokens computed, {len(tokens)} known"
            )
        self._publish_pages(lease, tokens)
        if self._pointing:
            self._take_point(lease)

    def release(self, lease: Lease, tokens: Sequence[int], publish: bool = True) -> None:
        """Close the lease: publish what is committed, then give everything back.

        Args:
            lease: an open lease; it cannot be used again.
            tokens: the known tokens of the request, at least `computed` many.
            publish: False keeps pages that were not published yet from being cached, for a
                request whose last step failed.

        Raises:
            LedgerFault: the lease was released before.
        """
        self._check_open(lease)
        if publish:
            self.publish(lease, tokens)
        self._leases.remove(lease)
        if lease.rolling is not None:
            lease.rolling.rolling = False
        private = lease.private_pages()
        self._private -= len(private)
        for page in private:
            heappush(self._free_pages, page)
        for node in reversed(lease.path):
            self.tree.drop(node)
        heappush(self._free_slots, lease.slot)
        # Any further use now leaves the short way through and is refused.
        lease.pages, lease.path, lease.rolling = [], [], None
        lease.capacity, lease.publish_at = -1, -1

    def take_work(self) -> Work:
        """Return what must be done to the pools before the next forward, and forget it."""
        work = self._work
        self._work = Work()
        return work

    def audit(self) -> None:
        """Check that everything is somewhere, once: free + held + cached = total, one writer each.

        Takes time in proportion to all pages; for tests and idle moments.

        Raises:
            LedgerFault: something does not add up; the message names ids and counts.
        """
        self.tree.audit()
        for lease in self._leases:
            lease.audit(self.tree.root, self._page_tokens)
        nodes = list(self.tree.nodes())
        holders = Counter(node for lease in self._leases for node in lease.path)
        for node in nodes:
            if node.holders != holders[node]:
                raise LedgerFault(
                    f"page {node.page} counts {node.holders} holders, "
                    f"{holders[node]} leases hold it"
                )
        self._audit_pages(nodes)
        self._audit_rows(nodes)

    def _audit_pages(self, nodes: Sequence[Node]) -> None:
        private = [(f"slot {lease.slot}", lease.private_pages()) for lease in self._leases]
        shared = [node.page for node in nodes]
        owners = [("the free list", self._free_pages), ("the prefix tree", shared), *private]
        audit_owners("page", owners, range(1, self.limits.pages + 1))
        counted = sum(len(pages) for _, pages in private)
        if counted != self._private:
            raise LedgerFault(f"{counted} pages are private, the count says {self._private}")

    def _audit_rows(self, nodes: Sequence[Node]) -> None:
        leased = [lease.slot for lease in self._leases]
        saved = [node.point for node in nodes if node.point is not None]
        slots = [("the free slots", self._free_slots), ("the leases", leased)]
        audit_owners("slot", slots, range(1, self.limits.slots + 1))
        points = [("the free points", self._free_points), ("the prefix tree", saved)]
        audit_owners("point", points, range(self.limits.points))

    def _check_open(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise LedgerFault(f"slot {lease.slot}: the lease was released and cannot be used")

    def _extend(self, lease: Lease, count: int) -> None:
        """Append `count` pages; the caller has made sure that they exist."""
        free = self._free_pages
        while len(free) < count:
            self._evict_page()
        fresh = [heappop(free) for _ in range(count)]
        lease.pages += fresh
        lease.capacity += count * self._page_tokens
        self._private += count
        self._work.clear_pages += fresh

    def _evict_page(self) -> None:
        evicted = self.tree.evict_page()
        if evicted is None:
            raise LedgerFault(f"nothing to evict, but {self.tree.cached} pages count as cached")
        page, point = evicted
        heappush(self._free_pages, page)
        if point is not None:
            heappush(self._free_points, point)

    def _slot_for(self, path: Sequence[Node]) -> SlotId:
        """A slot row that holds what a cursor at the end of `path` needs: zeros, or the point."""
        slot = heappop(self._free_slots)
        if not (self.limits.bounded and path):
            self._work.moves.append(Clear(slot))
            return slot
        point = path[-1].point
        assert point is not None, "what a bounded tree matches ends at a point"
        self._work.moves.append(Restore(point, slot, len(path) * self._page_tokens))
        # Another request can use this point, so it stays where it is.
        path[-1].rolling = False
        return slot

    def _publish_pages(self, lease: Lease, tokens: Sequence[int]) -> None:
        size, path = self._page_tokens, lease.path
        parent = path[-1] if path else self.tree.root
        for index in range(len(path), lease.computed // size):
            start, end = index * size, (index + 1) * size
            drafted = lease.draft_from <= start and end <= lease.drafted
            key = tuple(tokens[start:end])
            node, created = self.tree.insert(parent, key, lease.pages[index], drafted)
            if created:
                self._private -= 1
            elif node.holders == 1:
                self._replace(node, lease.pages[index], drafted)
            path.append(node)
            parent = node
        lease.publish_at = (len(path) + 1) * size

    def _replace(self, node: Node, page: PageId, drafted: bool) -> None:
        """Let the tree have a lease's page instead of one that it computed anew and that is spare.

        Otherwise a request that cannot resume from a cached prefix would need room for it twice.
        """
        heappush(self._free_pages, node.page)
        node.page, node.drafted = page, drafted
        self._private -= 1

    def _take_point(self, lease: Lease) -> None:
        """Save the slot row at the page boundary just published, if it still has what that needs.

        It does when the cursor stands on the boundary, or when a row of one known token and drafts
        crossed it, the prompt's last token included: every bounded cache then holds the window.
        """
        pages = len(lease.path)
        boundary = pages * self._page_tokens
        exact = lease.computed == boundary
        if exact and self._is_prompt_point(lease, pages):
            self._take_fixed_point(lease)
        elif lease.computed >= lease.prompt and (
            exact or lease.prompt - 1 <= lease.row_start < boundary
        ):
            self._take_rolling_point(lease)

    def _is_prompt_point(self, lease: Lease, pages: int) -> bool:
        if pages >= lease.last_point:
            return pages == lease.last_point
        return self.limits.next_point(pages - 1) == pages

    def _take_fixed_point(self, lease: Lease) -> None:
        node = lease.path[-1]
        if node.point is not None:
            node.rolling = False
            self._renew(lease, node.point)
            return
        point = self._spare_point()
        if point is None:
            point = self._own_point(lease)
        if point is not None:
            self._save(lease, point, rolling=False)

    def _take_rolling_point(self, lease: Lease) -> None:
        point = lease.path[-1].point
        if point is not None:
            self._renew(lease, point)
            return
        old = lease.rolling
        point = self.tree.detach(old) if old is not None and old.rolling else self._spare_point()
        if point is not None:
            self._save(lease, point, rolling=True)
            lease.rolling = lease.path[-1]

    def _save(self, lease: Lease, point: PointId, rolling: bool) -> None:
        self.tree.attach(lease.path[-1], point, rolling, lease.drafts_along(self._page_tokens))
        self._record_point(lease, point)

    def _renew(self, lease: Lease, point: PointId) -> None:
        """Save the slot row over a point that lacks the drafter's state, if it has that."""
        node = lease.path[-1]
        if not node.point_drafted and lease.drafts_along(self._page_tokens):
            node.point_drafted = True
            self._record_point(lease, point)

    def _record_point(self, lease: Lease, point: PointId) -> None:
        """Have the slot row saved as it is at the page boundary just published."""
        end = len(lease.path) * self._page_tokens
        self._work.moves.append(Save(lease.slot, point, end))

    def _spare_point(self) -> PointId | None:
        """A free point, or the one that nobody used for longest."""
        return heappop(self._free_points) if self._free_points else self.tree.evict_point()

    def _own_point(self, lease: Lease) -> PointId | None:
        """The lease's own last point, which its next one replaces in a full pool.

        So the first points of a long prompt stay, which others may share, and the last one comes.
        """
        for node in reversed(lease.path[:-1]):
            if node.point is not None and node.holders == 1:
                return self.tree.detach(node)
        return None
