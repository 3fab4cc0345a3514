"""What the ledger gives out: its limits, a request's lease, and the work left for the pools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from surefoot.ids import PageId, PointId, SlotId
from surefoot.state.prefix import LedgerFault, Node


@dataclass(frozen=True)
class LedgerLimits:
    """How much there is to give out.

    Attributes:
        pages: usable pages; their ids are 1 .. pages, the sink is not counted.
        slots: usable slots; their ids are 1 .. slots, the sink is not counted.
        points: resume points; their ids are 0 .. points - 1.
        page_tokens: tokens per page, P.
        bounded: resume points hold some cache, a Ring or Recurrent, so requests resume there only.
        point_every: prefill takes points at pages 1, 2, 4, ... up to this, then at its multiples.
        prefix_cache: whether pages of one request may serve another.
    """

    pages: int
    slots: int
    points: int
    page_tokens: int
    bounded: bool
    point_every: int = 16
    prefix_cache: bool = True

    def next_point(self, page: int) -> int:
        """The first boundary after `page` pages at which prefill takes a point, in pages."""
        every = self.point_every
        if page < every:
            return min(1 << page.bit_length(), every)
        return (page // every + 1) * every


@dataclass(frozen=True)
class Clear:
    """A slot row becomes zeros."""

    slot: SlotId


@dataclass(frozen=True)
class Save:
    """A resume point gets what a slot row holds behind the positions below `end`, whole pages."""

    slot: SlotId
    point: PointId
    end: int


@dataclass(frozen=True)
class Restore:
    """A slot row becomes what was saved behind the positions below `end`, and zeros elsewhere."""

    point: PointId
    slot: SlotId
    end: int


Move = Clear | Save | Restore


@dataclass
class Work:
    """What must be done to the pools before the next forward.

    Attributes:
        clear_pages: pages to fill with zeros, in any order; one may be named twice.
        moves: to be carried out in this order. The order matters: a row may be saved to a point,
            cleared for the next request and restored from another point within one list.
    """

    clear_pages: list[PageId] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)


class Lease:
    """What one running request has: its page table, its slot and its cursor.

    The ledger alone changes it, except for the drafter's two numbers.

    Attributes:
        pages: the page table; position p lies in pages[p // P].
        slot: row in every bounded pool.
        computed: the cursor; positions below it are final.
        cached: tokens that were attached at admission instead of computed.
        capacity: positions below it have a page.
        drafted: the drafter's cursor; positions from draft_from up to it carry drafter state.
        draft_from: the drafter's attention masks everything below.
        path: the nodes held, one for each published page.
        prompt: tokens known at admission; rows that start at or past it are decode rows.
    """

    __slots__ = (
        "cached",
        "capacity",
        "computed",
        "draft_from",
        "drafted",
        "last_point",
        "pages",
        "path",
        "prompt",
        "publish_at",
        "rolling",
        "row_start",
        "slot",
    )

    def __init__(self, slot: SlotId, path: list[Node], prompt: int, page_tokens: int) -> None:
        cached = len(path) * page_tokens
        self.pages = [node.page for node in path]
        self.slot = slot
        self.computed = cached
        self.cached = cached
        self.capacity = cached
        self.drafted = cached
        self.draft_from = 0
        self.path = path
        self.prompt = prompt
        # Set by the ledger: pages to the prompt's last boundary, the cursor at which the next
        # page is full, the cursor before the last commit, the node of the rolling point.
        self.last_point = (prompt - 1) // page_tokens
        self.publish_at = cached + page_tokens
        self.row_start = cached
        self.rolling: Node | None = None

    def drafts_along(self, page_tokens: int) -> bool:
        """Whether the slot row holds what the drafter knows of all pages published so far."""
        return self.draft_from == 0 and self.drafted >= len(self.path) * page_tokens

    def undraft(self) -> None:
        """Forget what the drafter has: it starts anew at the cursor."""
        self.draft_from = self.drafted = max(self.draft_from, self.computed)

    def private_pages(self) -> list[PageId]:
        """The pages that this lease alone may read or write: never published, or published twice.

        A page of tokens that the tree already knew under another id stays private.
        """
        pairs = zip(self.pages, self.path, strict=False)
        doubles = [page for page, node in pairs if page != node.page]
        return doubles + self.pages[len(self.path) :]

    def audit(self, root: Node, page_tokens: int) -> None:
        """Check cursor, page table and path against each other.

        Raises:
            LedgerFault: they disagree.
        """
        capacity = len(self.pages) * page_tokens
        if self.capacity != capacity or self.computed > capacity:
            raise LedgerFault(
                f"slot {self.slot}: computed {self.computed} of {self.capacity}, "
                f"but {len(self.pages)} pages of {page_tokens} tokens"
            )
        if len(self.path) * page_tokens > self.computed:
            raise LedgerFault(
                f"slot {self.slot}: {len(self.path)} pages of {page_tokens} tokens published, "
                f"but computed {self.computed}"
            )
        parent = root
        for node in self.path:
            if node.parent is not parent:
                raise LedgerFault(f"slot {self.slot}: page {node.page} does not follow its path")
            parent = node


def audit_owners(kind: str, owners: Iterable[tuple[str, Sequence[int]]], ids: range) -> None:
    """Check that each id has exactly one owner.

    Raises:
        LedgerFault: one has none or two; the message names it.
    """
    seen: dict[int, str] = {}
    for owner, owned in owners:
        for number in owned:
            if number in seen:
                raise LedgerFault(f"{kind} {number} has two owners: {seen[number]} and {owner}")
            seen[number] = owner
    lost, foreign = sorted(set(ids) - seen.keys()), sorted(seen.keys() - set(ids))
    if lost or foreign:
        raise LedgerFault(f"of {len(ids)} {kind}s {lost} have no owner; {foreign} do not exist")
