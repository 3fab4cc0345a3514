"""A drafter that fails or talks rubbish costs speed only."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from surefoot.draft.drafter import CommittedRow, DraftRow
from surefoot.draft.guard import MAX_FAILURES, GuardedDrafter
from surefoot.ids import RequestId, SlotId
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.state.lease import Lease
from surefoot.state.ledger import Work
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
    guard.prepare(Work())
    assert guard.propose([row(), row()]) == [[], []]
    committed = CommittedRow(row().request, row().lease, 0, 1, 0, True)
    guard.observe([committed], torch.empty(0))
    guard.forget(RequestId(1))
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
