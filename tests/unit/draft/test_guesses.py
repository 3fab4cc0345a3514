"""Guesses by number, whatever was joined or read before."""

from __future__ import annotations

import pytest
import torch

from surefoot.backend.reference import ReferenceBackend
from surefoot.draft.guesses import Guessed, Guesses

PASSES = [[7, 8, 9], [4, 5], [6]]
EVERY = [7, 8, 9, 4, 5, 6]


def guesses_of(passes: list[list[int]]) -> Guesses:
    guesses = Guesses(ReferenceBackend())
    for chosen in passes:
        guesses.add(torch.tensor(chosen))
    return guesses


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    "places", [[0], [5], [3, 4], [4, 3], [0, 3, 5], [2, 1, 0], [0, 1, 2, 3, 4, 5], [0, 1, 2], []]
)
def test_tokens_come_by_number(places: list[int], count: int, joined: bool) -> None:
    guesses = guesses_of(PASSES[:count])
    there = sum(len(chosen) for chosen in PASSES[:count])
    wanted = [place for place in places if place < there]
    if joined:
        assert guesses.unread.tolist() == EVERY[:there]
    found = guesses.at(wanted)
    assert found.tolist() == [EVERY[place] for place in wanted]
    assert found.dtype == torch.int64


def test_what_was_read_is_not_read_again() -> None:
    guesses = guesses_of(PASSES[:1])
    assert guesses.read() == EVERY[:3]
    places = guesses.add(torch.tensor([4, 5]))
    assert places == range(3, 5)
    assert guesses.unread.tolist() == [4, 5]
    assert guesses.at([3, 4]).tolist() == [4, 5]
    assert Guessed(guesses, [0, 4])[1] == 5
    assert guesses.unread.tolist() == []


def test_no_guesses_are_an_empty_tensor() -> None:
    guesses = guesses_of([])
    assert guesses.read() == []
    assert guesses.unread.shape == guesses.at([]).shape == (0,)
    assert guesses.unread.dtype == torch.int64
