"""Random use of the ledger on the pools of DeepSeek V4, audited after every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from surefoot.ids import PageId
from surefoot.state.ledger import Lease, Ledger, LedgerLimits
from surefoot.state.plan import MemoryPlan
from surefoot.state.spec import CacheSpec
from surefoot.testing.tiny_latents import TinyLatentSizes, make_latent_config
from tests.simulation.marked_pools import JUNK, MarkedPools, marks_of
from tests.unit.state.latents import caches_of
from tests.unit.state.plans import plan_of

DEPTH, ROWS, LONGEST, PAGES = 5, 4, 9, 26
_STEMS = 3


@dataclass(frozen=True)
class Setting:
    """What is run: sizes of the model, tokens per page, resume points, and what is faulty.

    Attributes:
        size: of the model.
        page: P.
        points: how many.
        ledger: the books.
        change: what is made of the caches before pools, not the plan, are made for them.
    """

    size: TinyLatentSizes
    page: int
    points: int
    ledger: type[Ledger] = Ledger
    change: Callable[[CacheSpec], CacheSpec] = lambda spec: spec


@dataclass(eq=False)
class Task:
    """A request: its tokens, the length at which it ends, whether it is drafted for."""

    tokens: list[int]
    limit: int
    drafting: bool
    marks: list[int] = field(default_factory=list)

    def known(self) -> list[int]:
        """Marks of all tokens."""
        self.marks = marks_of(self.tokens, self.marks)
        return self.marks

    def grow(self, count: int) -> None:
        """Append what the model says."""
        for _ in range(count):
            self.tokens.append(self.known()[-1] % 3)


def scarce_plan(specs: tuple[CacheSpec, ...], page: int, points: int) -> MemoryPlan:
    """PAGES pages, ROWS slots and some points, as the engine's planning makes them of bytes."""

    def plan(budget: int) -> MemoryPlan:
        return plan_of(
            *specs,
            page_tokens=page,
            draft_tokens=DEPTH,
            max_rows=ROWS,
            max_model_len=LONGEST * page,
            budget_bytes=budget,
            points=points,
        )

    roomy = plan(1 << 30)
    made = plan(roomy.total_bytes - (roomy.pages - PAGES) * roomy.page_bytes)
    assert (made.pages, made.slots, made.points) == (PAGES, ROWS, points)
    return made


class LedgerRun:
    """Requests come, run, are drafted for, fail, are pre-empted, resumed and aborted.

    Attributes:
        calls: of the ledger, by name; each was followed by an audit.
        seen: what happened besides.
    """

    def __init__(self, setting: Setting, seed: int) -> None:
        specs = caches_of(make_latent_config(setting.size), "float32", setting.page)
        self.plan = scarce_plan(specs, setting.page, setting.points)
        plan = self.plan
        self.ledger = setting.ledger(
            LedgerLimits(plan.pages, plan.slots, plan.points, setting.page, plan.bounded, 2)
        )
        changed = [setting.change(spec) for spec in specs]
        self.world = MarkedPools(changed, plan, setting.size)
        self._page, self._random = setting.page, Random(seed)
        length = LONGEST * setting.page
        self._stems = [self._text(length) for _ in range(_STEMS)]
        self._running: dict[Task, Lease] = {}
        self._waiting: list[Task] = []
        self.calls: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()

    def run(self, calls: int) -> None:
        """Make so many calls, then end everything.

        Raises:
            AssertionError: books or pools are not what they ought to be.
        """
        acts = {self._admit: 4, self._compute: 12, self._look_ahead: 1, self._leave: 2}
        choices, weights = list(acts), list(acts.values())
        while self.calls.total() < calls:
            self._random.choices(choices, weights)[0]()
        while self._running:
            self._abort(next(iter(self._running)))
        self._end()

    def _text(self, length: int) -> list[int]:
        return [self._random.randrange(50) for _ in range(length)]

    def _called(self, name: str) -> None:
        """Count a call and see that nothing was lost by it, in any pool."""
        self.calls[name] += 1
        ledger, plan = self.ledger, self.plan
        ledger.audit()
        pages = ledger.free_pages + ledger.cached_pages + ledger.held_pages
        assert pages == plan.pages, f"{pages} pages"
        slots = ledger.free_slots + len(self._running)
        assert slots == plan.slots, f"{slots} slots"
        points = len(ledger._free_points) + ledger.tree.points
        assert points == plan.points, f"{points} points"

    def _admit(self) -> None:
        random = self._random
        resumed = bool(self._waiting) and random.random() < 0.7
        task = self._waiting[0] if resumed else self._arrival()
        lease = self.ledger.admit(task.tokens, 1)
        if lease is not None:
            self._running[task] = lease
            self.seen["resumed" if resumed else "arrived"] += 1
            self.seen["cached"] += lease.cached > 0
            self.seen["cached after pre-emption"] += resumed and lease.cached > 0
            del self._waiting[: int(resumed)]
        self._called("admit")

    def _arrival(self) -> Task:
        random, most = self._random, LONGEST * self._page
        start = random.choice(self._stems)[: random.randrange(most // 2)]
        tokens = [*start, *self._text(random.randint(1, 3))]
        limit = min(most, len(tokens) + random.randint(1, 60))
        return Task(tokens, limit, drafting=random.random() < 0.8)

    def _compute(self) -> None:
        """One row of some request: reserve, forward, commit, publish; it may be its last one."""
        if not self._running:
            return
        task = self._random.choice(list(self._running))
        lease = self._running[task]
        known = len(task.tokens) - lease.computed
        done = self._prefill(task, lease, known) if known > 1 else self._verify(task, lease)
        if not done:
            return
        if task.drafting:
            self.world.write(lease, lease.drafted, self._marks(task, lease), drafter=True)
            lease.drafted = lease.computed
        if len(task.tokens) >= task.limit:
            self._release(task, publish=True)
            self.seen["finished"] += 1
        else:
            self.ledger.publish(lease, task.tokens)
            self._called("publish")

    @staticmethod
    def _marks(task: Task, lease: Lease) -> list[int]:
        return task.known()[lease.drafted : lease.computed]

    def _prefill(self, task: Task, lease: Lease, known: int) -> bool:
        most = self._random.choice([1, 7, self._page, 3 * self._page])
        n = self.ledger.chunk(lease, min(known, most))
        if not self._reserve(task, n):
            return False
        first = lease.computed
        self._forward(task, lease, task.known()[first : first + n])
        self.ledger.commit(lease, n)
        self._called("commit")
        if lease.computed == len(task.tokens):
            task.grow(1)
        return True

    def _verify(self, task: Task, lease: Lease) -> bool:
        """The bonus and some drafts, of which some are right."""
        room = task.limit - len(task.tokens)
        depth = min(self._random.randint(0, DEPTH), room)
        if not self.ledger.reserve(lease, 1 + depth, evict=False):
            depth = 0
        self._called("reserve")
        if not depth and not self._reserve(task, 1):
            return False
        right = self._random.randint(0, depth)
        self.seen["partial"] += 0 < right < depth
        first = lease.computed
        if task.drafting:
            self.world.apply(self.ledger.take_work(), self.ledger)
            self.world.write(lease, first, [JUNK] * depth, drafter=True)
        bonus = task.known()[first:]
        task.grow(right)
        guessed = task.known()[first + 1 :] + [JUNK] * (depth - right)
        self._forward(task, lease, bonus + guessed)
        self.ledger.commit(lease, 1 + right)
        self._called("commit")
        if len(task.tokens) < task.limit:
            task.grow(1)
        return True

    def _reserve(self, task: Task, n: int) -> bool:
        """Room for a row; the youngest are pre-empted for it, in the end the request itself."""
        while True:
            granted = self.ledger.reserve(self._running[task], n)
            self._called("reserve")
            if granted:
                return True
            youngest = next(reversed(self._running))
            self._preempt(youngest)
            if youngest is task:
                return False

    def _forward(self, task: Task, lease: Lease, marks: Sequence[int]) -> None:
        self.world.apply(self.ledger.take_work(), self.ledger)
        self.world.check(lease, task.known())
        self.world.write(lease, lease.computed, marks, drafter=False)

    def _look_ahead(self) -> None:
        """Room that no row will use, as much as there is."""
        if self._running:
            lease = self._random.choice(list(self._running.values()))
            room = LONGEST * self._page - lease.computed
            self.ledger.reserve(lease, min(room, self._random.randint(1, self._page)), evict=False)
            self._called("reserve")

    def _leave(self) -> None:
        if self._running:
            task = self._random.choice(list(self._running))
            self._random.choice([self._abort, self._preempt, self._fail])(task)

    def _abort(self, task: Task) -> None:
        self._release(task, publish=self._random.random() < 0.5)
        self.seen["aborted"] += 1

    def _preempt(self, task: Task) -> None:
        self._release(task, publish=True)
        self._waiting.insert(0, task)
        self.seen["pre-empted"] += 1

    def _fail(self, task: Task) -> None:
        """A forward broke off half-way, and the request starts anew."""
        lease = self._running[task]
        self._forward(task, lease, [JUNK] * min(3, lease.capacity - lease.computed))
        self._release(task, publish=False)
        self._waiting.insert(0, task)
        self.seen["failed"] += 1

    def _release(self, task: Task, publish: bool) -> None:
        self.ledger.release(self._running.pop(task), task.tokens, publish)
        self._called("release")

    def _end(self) -> None:
        """Nothing is held, and all that is cached gives way to one request that needs it."""
        ledger, plan = self.ledger, self.plan
        assert ledger.held_pages == 0
        lease = ledger.admit([99], plan.pages * self._page)
        assert lease is not None, "pages are missing in the end"
        assert sorted(lease.pages) == [PageId(page) for page in range(1, plan.pages + 1)]
        ledger.release(lease, [99], publish=False)
        self._called("release")
        assert ledger.free_pages == plan.pages
        assert sorted(ledger._free_slots) == list(range(1, plan.slots + 1))
        assert sorted(ledger._free_points) == list(range(plan.points))
