from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.text.stop import StopMatcher

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop string to be complete ends, and which it is; by looking everywhere."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


def expected_text(text: str, stops: list[str], include: bool) -> str:
    found = first_stop(text, stops)
    if found is None:
        return text
    end, stop = found
    return text[: end if include else end - len(stop)]


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[left:right] for left, right in pairwise(edges)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 50), max_size=6), st.booleans())
def test_the_outcome_does_not_depend_on_the_cut(
    text: str, stops: list[str], places: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include)
    shown, hit = "", False
    for part in cut(text, places):
        emitted, hit = matcher.push(part)
        shown += emitted
    shown += matcher.flush()
    found = first_stop(text, stops)
    assert hit == (found is not None)
    assert shown == expected_text(text, stops, include)
    assert matcher.matched == (found[1] if found else None)
    assert matcher.consumed == (found[0] if found else len(text))


@given(LETTERS, STOPS)
def test_only_a_possible_beginning_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for end, character in enumerate(text, 1):
        emitted, hit = matcher.push(character)
        shown += emitted
        if hit:
            return
        possible = [
            length
            for stop in stops
            for length in range(len(stop))
            if text[:end].endswith(stop[:length])
        ]
        assert len(shown) == end - max(possible, default=0)


def test_with_include_nothing_is_held_back() -> None:
    matcher = StopMatcher(["END"], include=True)
    assert matcher.push("the E") == ("the E", False)
    assert matcher.push("N") == ("N", False)
    assert matcher.push("D tail") == ("D", True)


def test_the_stop_that_is_complete_first_wins_over_one_that_begins_first() -> None:
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("xabcd") == ("xa", True)
    assert matcher.matched == "bc"


def test_of_stops_that_end_together_the_longest_is_cut() -> None:
    matcher = StopMatcher(["b", "ab"])
    assert matcher.push("xaby") == ("x", True)
    assert matcher.matched == "ab"


def test_a_beginning_that_fails_leaves_a_shorter_one_in_play() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("aa") == ("", False)
    assert matcher.push("a") == ("a", False)
    assert matcher.push("b") == ("", True)


@pytest.mark.parametrize("tail", ["", "more"])
def test_consumed_tells_which_token_completed_the_stop(tail: str) -> None:
    matcher = StopMatcher(["\n\n"])
    matcher.push("one\n")
    before = matcher.consumed
    emitted, hit = matcher.push("\n" + tail)
    assert (emitted, hit) == ("", True)
    assert matcher.consumed - before == 1


def test_nothing_is_taken_after_a_stop() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""
    assert matcher.consumed == 2


def test_without_stops_text_passes_through() -> None:
    matcher = StopMatcher(())
    assert matcher.push("anything") == ("anything", False)
    assert matcher.flush() == ""


def test_flush_gives_back_what_was_held() -> None:
    matcher = StopMatcher(["Observation:"])
    assert matcher.push("Obs") == ("", False)
    assert matcher.flush() == "Obs"
    assert matcher.flush() == ""
