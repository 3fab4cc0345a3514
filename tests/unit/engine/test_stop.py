"""Where a text ends: at the earliest event, the same at every depth."""

import pytest

from surefoot.params import SamplingParams
from surefoot.request import FinishReason
from tests.unit.engine.rig import END_TOKEN, Rig, letters

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2, 3, 7])


@DEPTHS
@pytest.mark.parametrize("place", range(6))
def test_an_end_token_inside_an_accepted_run_ends_the_text_there(depth: int, place: int) -> None:
    rig = Rig(depth=depth)
    answer = [*range(place), END_TOKEN, 9, 9, 9]
    request = rig.add(answer, SamplingParams(max_tokens=20))
    rig.drain()
    assert list(request.output) == [*range(place), END_TOKEN]
    assert rig.reasons(request) == [FinishReason.STOP]
    assert request.finish_reason is FinishReason.STOP


def test_only_tokens_before_the_end_count_as_computed_and_accepted() -> None:
    rig = Rig(depth=7, page_tokens=1, chunk=5)
    request = rig.add([1, 2, 3, END_TOKEN, 9, 9, 9, 9], SamplingParams(max_tokens=20))
    rig.drain()
    # One token comes with the prompt; of seven drafts the three up to the end were kept.
    assert (request.speculation.drafted, request.speculation.accepted) == (7, 3)
    # Nobody computes past prompt + output - 1, whatever was drafted.
    assert rig.ledger.cached_pages == len(request.tokens) - 1


@DEPTHS
def test_a_stop_token_of_the_request_ends_it_like_the_models_own(depth: int) -> None:
    rig = Rig(depth=depth)
    params = SamplingParams(max_tokens=9, stop_token_ids=(42,))
    request = rig.add([1, 2, 42, 3, 4], params)
    rig.drain()
    assert list(request.output) == [1, 2, 42]
    assert rig.reasons(request) == [FinishReason.STOP]


@DEPTHS
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_and_inside_a_run(depth: int, include: bool) -> None:
    rig = Rig(depth=depth)
    params = SamplingParams(max_tokens=40, stop=("END",), include_stop_str_in_output=include)
    request = rig.add(letters("some text ENEND and more"), params, text=True)
    rig.drain()
    assert rig.text(request) == "some text EN" + ("END" if include else "")
    assert bytes(request.output) == b"some text ENEND"
    assert rig.reasons(request) == [FinishReason.STOP]


@DEPTHS
def test_what_looked_like_a_stop_string_is_shown_in_the_end(depth: int) -> None:
    rig = Rig(depth=depth)
    params = SamplingParams(max_tokens=9, stop=("end of text",))
    request = rig.add(letters("the end o"), params, text=True)
    rig.drain()
    assert rig.text(request) == "the end o"
    assert rig.reasons(request) == [FinishReason.LENGTH]


@DEPTHS
def test_a_stop_string_counts_only_after_min_tokens(depth: int) -> None:
    rig = Rig(depth=depth)
    params = SamplingParams(max_tokens=30, min_tokens=5, stop=("ab",))
    request = rig.add(letters("ababxabab"), params, text=True)
    rig.drain()
    assert rig.text(request) == "ababx"
    assert bytes(request.output) == b"ababxab"


@DEPTHS
def test_the_length_limit_cuts_a_run(depth: int) -> None:
    rig = Rig(depth=depth)
    request = rig.add([1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_tokens=5))
    rig.drain()
    assert list(request.output) == [1, 2, 3, 4, 5]
    assert rig.reasons(request) == [FinishReason.LENGTH]


@DEPTHS
def test_a_stop_token_beats_the_limit_at_the_same_token(depth: int) -> None:
    rig = Rig(depth=depth)
    request = rig.add([1, 2, END_TOKEN], SamplingParams(max_tokens=3))
    rig.drain()
    assert rig.reasons(request) == [FinishReason.STOP]


@DEPTHS
def test_a_stop_string_beats_the_limit_at_the_same_token(depth: int) -> None:
    rig = Rig(depth=depth)
    request = rig.add(letters("abc"), SamplingParams(max_tokens=3, stop=("bc",)), text=True)
    rig.drain()
    assert rig.reasons(request) == [FinishReason.STOP]
    assert rig.text(request) == "a"


@DEPTHS
def test_characters_of_several_tokens_come_whole(depth: int) -> None:
    rig = Rig(depth=depth)
    answer = "a é 日本 \N{SMILING FACE WITH SUNGLASSES} b"
    request = rig.add(letters(answer), text=True)
    rig.drain()
    assert rig.text(request) == answer
    assert all("\N{REPLACEMENT CHARACTER}" not in emission.text for emission in rig.emissions)


@pytest.mark.parametrize("length", range(1, 31))
def test_short_answers_are_complete_with_and_without_drafts(length: int) -> None:
    answer = "the quick brown fox, then jumps"[:length]
    for depth in (0, 1, 4, 8):
        rig = Rig(depth=depth)
        params = SamplingParams(max_tokens=40, stop=("fox, then jumps over the dog",))
        request = rig.add([*letters(answer), END_TOKEN], params, text=True)
        rig.drain()
        assert rig.text(request) == answer
        assert rig.reasons(request) == [FinishReason.STOP]
