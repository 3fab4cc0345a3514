"""The index of a request's own n-grams, and what is drafted from it."""

from random import Random

import pytest

from surefoot.draft.drafter import DraftRow
from surefoot.draft.ngram import NgramDrafter, NgramIndex
from surefoot.ids import RequestId, SlotId
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.state.lease import Lease


def index_of(tokens: list[int], longest: int = 5, shortest: int = 2) -> NgramIndex:
    index = NgramIndex(longest, shortest)
    index.extend(tokens)
    return index


def draft(tokens: list[int], count: int, longest: int = 5, shortest: int = 2) -> list[int]:
    return index_of(tokens, longest, shortest).lookup(tokens, count)


def row(number: int, tokens: list[int], limit: int) -> DraftRow:
    request = Request(
        id=RequestId(number),
        tokens=tokens,
        prompt_length=1,
        params=SamplingParams(),
        seed=0,
        length_limit=999,
    )
    return DraftRow(request, Lease(SlotId(1), [], len(tokens), 4), limit)


def test_what_followed_the_same_tokens_is_proposed() -> None:
    assert draft([1, 2, 3, 4, 5, 9, 9, 1, 2], 3) == [3, 4, 5]


def test_unknown_suffixes_give_nothing() -> None:
    assert draft([1, 2, 3, 4], 3) == []
    assert draft([7], 3) == []
    assert draft([1, 2, 9, 2], 3) == []


def test_a_single_token_counts_if_it_may() -> None:
    assert draft([1, 2, 9, 2], 2, shortest=1) == [9, 2]


def test_the_longest_suffix_wins_over_a_later_short_one() -> None:
    tokens = [1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4]
    assert draft(tokens, 1) == [50]
    assert draft(tokens, 1, longest=2) == [60]


def test_of_equal_suffixes_the_last_wins() -> None:
    assert draft([1, 2, 30, 1, 2, 40, 1, 2], 1) == [40]


def test_a_loop_goes_on_from_the_draft_itself() -> None:
    assert draft([5, 6, 7, 5, 6, 7, 5, 6], 7) == [7, 5, 6, 7, 5, 6, 7]
    assert draft([3, 3, 3], 4) == [3, 3, 3, 3]


@pytest.mark.parametrize("seed", range(20))
def test_growing_token_by_token_gives_what_a_fresh_index_gives(seed: int) -> None:
    random = Random(seed)
    tokens, index = [random.randrange(3)], NgramIndex(4, 1)
    for _ in range(60):
        tokens += [random.randrange(3) for _ in range(random.randint(0, 3))]
        index.extend(tokens)
        assert index.lookup(tokens, 5) == draft(tokens, 5, longest=4, shortest=1)


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_is_what_stood_there_before(seed: int) -> None:
    random = Random(seed)
    tokens = [random.randrange(4) for _ in range(50)]
    found = draft(tokens, 1, longest=3, shortest=2)
    matches = [
        (size, tokens[end])
        for size in (2, 3)
        for end in range(size, len(tokens))
        if tokens[end - size : end] == tokens[-size:]
    ]
    assert found == ([max(matches, key=lambda m: m[0])[1]] if matches else []) or found[0] in {
        token for size, token in matches if size == max(m[0] for m in matches)
    }


def test_limits_are_kept_row_by_row() -> None:
    drafter = NgramDrafter(3, 1)
    loop = [1, 2] * 5
    assert drafter.propose([row(1, loop, 1), row(2, loop, 4)]) == [[1], [1, 2, 1, 2]]


def test_a_shorter_prompt_after_a_longer_one_is_drafted_as_by_a_fresh_drafter() -> None:
    """The index of the long request is dropped with it."""
    used, short = NgramDrafter(3, 1), [8, 9, 8, 9, 8]
    used.propose([row(1, list(range(200)), 4)])
    used.forget(RequestId(1))
    assert used._indexes == {}
    for number in (1, 2):
        assert used.propose([row(number, short, 4)]) == NgramDrafter(3, 1).propose(
            [row(number, short, 4)]
        )


def test_requests_have_indexes_of_their_own() -> None:
    drafter = NgramDrafter(3, 1)
    drafter.propose([row(1, [1, 2, 3, 1], 2)])
    assert drafter.propose([row(2, [5, 1], 2)]) == [[]]
