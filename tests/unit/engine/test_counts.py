"""What a request says of its drafts equals a count by hand from the rows that were run."""

import pytest

from surefoot.engine.models import LoadedModel
from surefoot.params import SamplingParams
from surefoot.request import Request, SpeculationCounts
from surefoot.testing.drafters import Alternating, AlwaysRight, AlwaysWrong, RandomLength
from tests.unit.engine.engines import complete, engine_of
from tests.unit.engine.rig import END_TOKEN, Rig

ANSWER = [(5 * i) % 64 for i in range(30)]


def oracle(request: Request, count: int) -> list[int]:
    return ANSWER[request.output_length : request.output_length + count]


def by_hand(rig: Rig, request: Request) -> SpeculationCounts:
    """Follow the rows: a draft is accepted as long as it is what was emitted there."""
    counts = SpeculationCounts()
    for rows in rig.script.steps:
        for row in rows:
            begin = row.first + row.count
            right = 0
            emitted = request.tokens[begin:]
            while right < min(len(row.drafts), len(emitted)):
                if row.drafts[right] != emitted[right]:
                    break
                right += 1
            if row.request is request and row.drafts:
                counts.drafts += 1
                counts.drafted += len(row.drafts)
                counts.accepted += right
                counts.accepted_at += [0] * (right - len(counts.accepted_at))
                for place in range(right):
                    counts.accepted_at[place] += 1
    return counts


@pytest.mark.parametrize(
    "drafter",
    [
        AlwaysRight(oracle),
        AlwaysWrong(oracle, 64),
        Alternating(oracle),
        RandomLength(oracle, 64, seed=1),
        RandomLength(oracle, 64, seed=2),
    ],
    ids=lambda drafter: drafter.name,
)
@pytest.mark.parametrize("end", [None, 7, 20])
def test_counts_equal_a_count_by_hand(drafter: AlwaysRight, end: int | None) -> None:
    rig = Rig(depth=4, drafter=drafter)
    answer = list(ANSWER)
    if end is not None:
        answer[end] = END_TOKEN
    request = rig.add(answer)
    rig.drain()
    assert request.speculation == by_hand(rig, request)


def test_right_drafts_give_a_length_of_depth_plus_one() -> None:
    rig = Rig(depth=4, drafter=AlwaysRight(oracle))
    request = rig.add(ANSWER[:26])
    rig.drain()
    assert request.speculation.accept_length == 5.0
    assert request.speculation.accepted_at == [5, 5, 5, 5]


def test_wrong_drafts_give_a_length_of_one() -> None:
    rig = Rig(depth=4, drafter=AlwaysWrong(oracle, 64))
    request = rig.add(ANSWER)
    rig.drain()
    assert request.speculation.accept_length == 1.0
    assert request.speculation.accepted_at == []
    assert request.speculation.drafted > 50


def test_counts_come_from_what_is_left_of_a_run_after_a_stop() -> None:
    """A run that is cut by an end token counts the drafts that were kept, not those that fitted."""
    rig = Rig(
        depth=8, drafter=AlwaysRight(lambda request, count: [1, 2, END_TOKEN, 3, 4, 5, 6, 7, 8])
    )
    request = rig.add([9, 1, 2, END_TOKEN, 3, 4, 5, 6, 7, 8, 9, 9], SamplingParams(max_tokens=12))
    rig.drain()
    assert list(request.output) == [9, 1, 2, END_TOKEN]
    assert request.speculation.accepted == 3
    assert request.speculation.accepted <= request.output_length


def test_emitted_tokens_are_verify_rows_times_accept_length(tiny: LoadedModel) -> None:
    engine = engine_of(tiny, depth=3)
    prompt = [1, 2, 3, 4] * 6
    [request] = complete(engine, [prompt], SamplingParams(max_tokens=40, temperature=0))
    counts = request.speculation
    assert 0 < counts.accepted <= counts.drafted <= 3 * counts.drafts
    assert counts.accepted + counts.drafts <= request.output_length
