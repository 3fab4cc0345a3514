"""A drafter that fails or talks rubbish costs speed only."""

from collections.abc import Collection, Sequence

import pytest
import torch
from torch import Tensor

from surefoot.draft.drafter import CommittedRow, DraftRow
from surefoot.draft.guard import MAX_FAILURES, GuardedDrafter
from surefoot.ids import PointId, RequestId, SlotId
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.state.lease import Lease, Move
from surefoot.state.ledger import Clear, Restore, Save, Work
from surefoot.testing.drafters import Rubbish, StatelessDrafter

VOCAB = 10


class Says(StatelessDrafter):
    """Proposes what it was given."""

    name = "says"

    def __init__(self, *drafts: object) -> None:
        self.drafts = list(drafts)
        self.calls = 0

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        self.calls += 1
        return self.drafts  # type: ignore[return-value]


class Fails(StatelessDrafter):
    """Every call raises."""

    name = "fails"

    def __init__(self) -> None:
        self.calls = 0

    def fail(self) -> None:
        self.calls += 1
        raise ValueError("out of ideas")

    def prepare(self, work: Work) -> None:
        self.fail()

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        self.fail()
        return []

    def observe(self, rows: Sequence[CommittedRow], hidden: Tensor) -> None:
        self.fail()

    def forget(self, request: RequestId) -> None:
        self.fail()


def row(limit: int = 4) -> DraftRow:
    request = Request(
        id=RequestId(1),
        tokens=[1, 2],
        prompt_length=1,
        params=SamplingParams(),
        seed=0,
        length_limit=99,
    )
    return DraftRow(request, Lease(SlotId(1), [], 2, 4), limit)


def guarded(*drafts: object) -> GuardedDrafter:
    return GuardedDrafter(Says(*drafts), VOCAB)


def test_a_legal_draft_goes_through() -> None:
    guard = guarded([1, 9, 0])
    assert guard.propose([row()]) == [[1, 9, 0]]
    assert (guard.failures, guard.name) == (0, "says")


@pytest.mark.parametrize(
    ("draft", "usable"),
    [
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4]),
        ([1, 10, 2], [1]),
        ([-1, 2], []),
        ([1, 2, None], [1, 2]),
        ([1, True], [1]),
        ([1, 2.0], [1]),
        (["a"], []),
        ([2**70], []),
        (None, []),
        ((1, 2), []),
        ("12", []),
        (7, []),
    ],
)
def test_the_usable_beginning_of_a_draft_is_kept(draft: object, usable: list[int]) -> None:
    assert guarded(draft).propose([row()]) == [usable]


def test_too_long_is_no_failure_but_illegal_is() -> None:
    longer, illegal = guarded([1] * 9), guarded([99])
    longer.propose([row()])
    illegal.propose([row()])
    assert (longer.failures, illegal.failures) == (0, 1)


@pytest.mark.parametrize("drafts", [[], [[1], [1]], [[1], [1], [1]]])
def test_a_wrong_number_of_drafts_gives_none(drafts: list[object]) -> None:
    guard = guarded(*drafts)
    rows = [row()] if len(drafts) != 1 else [row(), row()]
    assert guard.propose(rows) == [[] for _ in rows]
    assert guard.failures == 1


def test_every_act_may_fail() -> None:
    guard = GuardedDrafter(Fails(), VOCAB)
    assert guard.propose([row(), row()]) == [[], []]
    committed = CommittedRow(row().request, row().lease, 0, 1, 0, 1, True)
    guard.observe([committed], torch.empty(0))
    guard.forget(RequestId(1))
    guard.prepare(Work())
    assert guard.failures == 4


def test_it_is_not_asked_any_more_after_some_failures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="surefoot")
    drafter = Fails()
    guard = GuardedDrafter(drafter, VOCAB)
    for _ in range(MAX_FAILURES + 5):
        assert guard.propose([row()]) == [[]]
    assert guard.disabled
    assert drafter.calls == MAX_FAILURES
    assert caplog.text.count("switched off") == 1


class FailsAt(StatelessDrafter):
    """The calls of one kind with these numbers raise; everything is written down."""

    def __init__(self, act: str, at: Collection[int]) -> None:
        self._act, self._at = act, at
        self.calls: list[str] = []
        self.moves: list[Move] = []

    def _called(self, act: str) -> None:
        number = self.calls.count(act)
        self.calls.append(act)
        if act == self._act and number in self._at:
            raise ValueError("planted")

    def prepare(self, work: Work) -> None:
        self._called("prepare")
        self.moves += work.moves

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        self._called("propose")
        return [[1] for _ in rows]

    def observe(self, rows: Sequence[CommittedRow], hidden: Tensor) -> None:
        self._called("observe")


def steps(guard: GuardedDrafter, count: int) -> None:
    """So many steps of an engine with one request."""
    for _ in range(count):
        guard.prepare(Work())
        guard.propose([row()])
        guard.observe([CommittedRow(row().request, row().lease, 0, 1, 0, 1, True)], torch.empty(0))


def test_failures_of_long_ago_are_forgiven() -> None:
    guard = GuardedDrafter(FailsAt("propose", range(0, 2000, 50)), VOCAB)
    steps(guard, 2000)
    assert (guard.failures, guard.disabled) == (40, False)


@pytest.mark.parametrize("act", ["prepare", "propose", "observe"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_drafter_that_keeps_failing_in_one_act_is_switched_off(act: str, every: int) -> None:
    guard = GuardedDrafter(FailsAt(act, range(0, 2000, every)), VOCAB)
    steps(guard, 200)
    assert guard.disabled


def test_work_that_failed_is_done_before_the_drafter_is_asked_again() -> None:
    """A slot that was not restored, or cleared twice, holds another request's state."""
    drafter = FailsAt("prepare", {2, 3})
    guard = GuardedDrafter(drafter, VOCAB)
    first: list[Move] = [Save(SlotId(1), PointId(0), 4), Clear(SlotId(1))]
    guard.prepare(Work([], first))
    lease = Lease(SlotId(1), [], 2, 4)
    lease.computed = 5
    asked = DraftRow(row().request, lease, 4)
    assert guard.propose([asked]) == [[]]
    assert (lease.draft_from, lease.drafted) == (5, 5)
    lease.computed = 7
    guard.observe([CommittedRow(asked.request, lease, 5, 2, 0, 2, True)], torch.empty(0))
    assert (lease.draft_from, lease.drafted) == (7, 7)
    second: list[Move] = [Restore(PointId(0), SlotId(2), 4)]
    guard.prepare(Work([], second))
    assert "propose" not in drafter.calls
    guard.prepare(Work())
    assert drafter.moves == first + second
    assert guard.propose([asked]) == [[1]]
    assert (lease.draft_from, guard.failures) == (7, 2)


@pytest.mark.parametrize("act", ["propose", "observe"])
def test_rows_of_a_failed_call_start_anew(act: str) -> None:
    guard = GuardedDrafter(FailsAt(act, {0}), VOCAB)
    lease = Lease(SlotId(1), [], 2, 4)
    lease.computed, lease.drafted = 9, 8
    guard.propose([DraftRow(row().request, lease, 4)])
    guard.observe([CommittedRow(row().request, lease, 8, 1, 0, 1, True)], torch.empty(0))
    assert (lease.draft_from, lease.drafted) == (9, 9)


def test_a_call_that_failed_among_guesses_costs_no_state() -> None:
    class FailsLate(FailsAt):
        """The bonus token was taken in before."""

        def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
            for each in rows:
                each.lease.drafted = each.lease.computed + 1
            return super().propose(rows)

    guard = GuardedDrafter(FailsLate("propose", {0}), VOCAB)
    lease = Lease(SlotId(1), [], 2, 4)
    lease.computed = 9
    assert guard.propose([DraftRow(row().request, lease, 4)]) == [[]]
    assert (lease.draft_from, lease.drafted) == (0, 10)


def test_it_is_not_asked_when_there_is_nobody_to_draft_for() -> None:
    drafter = Says([1])
    guard = GuardedDrafter(drafter, VOCAB)
    assert guard.propose([]) == []
    guard.observe([], torch.empty(0))
    assert (drafter.calls, guard.failures) == (0, 0)


def test_rubbish_never_gets_through() -> None:
    for seed in range(30):
        guard = GuardedDrafter(Rubbish(VOCAB, seed), VOCAB)
        for _ in range(12):
            for draft in guard.propose([row(3), row(3)]):
                assert len(draft) <= 3
                assert all(type(token) is int and 0 <= token < VOCAB for token in draft)
