from surefoot.checking.drafters import ReplayDrafter
from surefoot.draft.drafter import DraftRow
from surefoot.ids import RequestId, SlotId
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.state.lease import Lease

VOCAB = 50
PLAIN = list(range(40))


def row(known: int, limit: int) -> DraftRow:
    request = Request(RequestId(5), PLAIN[:known], 2, SamplingParams(), 0, 100)
    return DraftRow(request, Lease(SlotId(1), [], known, 4), limit)


def drafter(name: str, seed: int = 0) -> ReplayDrafter:
    made = ReplayDrafter(name, VOCAB, seed)
    made.know(RequestId(5), PLAIN)
    return made


def test_replay_spoils_about_three_tokens_in_ten() -> None:
    replay = drafter("replay")
    drafts = [replay.propose([row(10, 20)])[0] for _ in range(100)]
    right = sum(token == PLAIN[10 + i] for draft in drafts for i, token in enumerate(draft))
    assert 0.65 < right / 2000 < 0.75


def test_wrong_is_never_right() -> None:
    wrong = drafter("wrong")
    for known in range(2, 40):
        draft = wrong.propose([row(known, 8)])[0]
        coming = (PLAIN + PLAIN[-1:] * 8)[known : known + 8]
        assert len(draft) == 8
        assert all(one != other for one, other in zip(draft, coming, strict=True))


def test_every_draft_is_full_and_legal() -> None:
    replay = drafter("replay")
    for known in range(2, 41):
        draft = replay.propose([row(known, 5)])[0]
        assert len(draft) == 5
        assert all(0 <= token < VOCAB for token in draft)


def test_the_seed_decides() -> None:
    assert drafter("replay", 1).propose([row(2, 30)]) == drafter("replay", 1).propose([row(2, 30)])
    assert drafter("replay", 1).propose([row(2, 30)]) != drafter("replay", 2).propose([row(2, 30)])


def test_a_preempted_request_is_still_known() -> None:
    replay = drafter("replay")
    replay.forget(RequestId(5))
    assert len(replay.propose([row(10, 3)])[0]) == 3
