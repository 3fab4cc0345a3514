"""Trials of drafting against not drafting, on a pretended machine."""

from collections.abc import Callable

from surefoot.draft.duel import Duel, Duels

TRIAL, FIRST, MOST = 12, 64, 1024
Takes = Callable[[bool], float]


def played(duel: Duel, steps: int, gain: float, takes: Takes) -> list[bool]:
    """Which way each step went: drafts bring two tokens for one, in the seconds that it takes."""
    ways = []
    for _ in range(steps):
        drafts = duel.wants(gain)
        duel.add(drafts, 2.0 if drafts else 1.0, takes(drafts))
        ways.append(drafts)
    return ways


def stretches(ways: list[bool]) -> list[tuple[bool, int]]:
    """How long each way was gone."""
    found: list[tuple[bool, int]] = []
    for way in ways:
        if found and found[-1][0] == way:
            found[-1] = way, found[-1][1] + 1
        else:
            found.append((way, 1))
    return found


def test_plain_steps_are_tried_and_drafts_that_pay_go_on_for_ever_longer() -> None:
    ways = stretches(played(Duel(), 3000, 1.2, lambda drafts: 1.6 if drafts else 1.0))
    assert [length for drafts, length in ways if not drafts] == [TRIAL] * 4
    assert [length for drafts, length in ways if drafts][:4] == [TRIAL, 4 * FIRST, MOST, MOST]


def test_drafts_that_lose_are_given_up_and_tried_ever_less_often() -> None:
    ways = stretches(played(Duel(), 3000, 1.2, lambda drafts: 2.2 if drafts else 1.0))
    assert [length for drafts, length in ways if drafts] == [TRIAL] * 5
    plain = [length for drafts, length in ways if not drafts]
    assert plain[:3] == [TRIAL + FIRST, 4 * FIRST, MOST]


def test_a_gain_beyond_doubt_is_not_interrupted() -> None:
    assert all(played(Duel(), 2000, 1.5, lambda drafts: 2.2 if drafts else 1.0))


def test_drafts_are_tried_at_once_when_they_promise_much_more() -> None:
    duel = Duel()
    played(duel, 400, 1.1, lambda drafts: 2.2 if drafts else 1.0)
    assert not duel.wants(1.3)
    ways = played(duel, 200, 1.4, lambda drafts: 1.2 if drafts else 1.0)
    assert all(ways)


def test_a_tie_changes_nothing() -> None:
    ways = stretches(played(Duel(), 1200, 1.1, lambda drafts: 1.9 if drafts else 1.0))
    assert [length for drafts, length in ways if not drafts] == [TRIAL] * 2


def test_the_first_steps_of_a_stretch_and_single_slow_ones_do_not_count() -> None:
    duel, seen = Duel(), [0]

    def takes(drafts: bool) -> float:
        seen[0] += 1
        slow = duel.settled < 5 or seen[0] % 6 == 0
        return (1.6 if drafts else 1.0) * (9 if slow else 1)

    ways = played(duel, 1000, 1.2, takes)
    assert sum(ways) > 0.9 * len(ways)


def test_steps_that_went_the_other_way_do_not_count() -> None:
    duel = Duel()
    for _ in range(500):
        duel.wants(1.2)
        duel.add(False, 1.0, 1e-3)
    assert duel.wants(1.2)
    assert (duel.left, duel.settled) == (TRIAL, 0)


def test_steps_of_about_as_many_rows_share_a_duel() -> None:
    duels = Duels()
    assert len({id(duels.of(rows)) for rows in (1, 2, 3, 4)}) == 4
    assert duels.of(31) is duels.of(33)
    assert duels.of(8) is not duels.of(16)


def test_drafts_that_grow_quicker_are_doubted() -> None:
    """Plain steps may have grown quicker, too, by more; nobody has measured them since."""
    duel, pace = Duel(), 1.0

    def takes(drafts: bool) -> float:
        return (1.6 if drafts else 1.0) * pace

    ways = stretches(played(duel, 600, 1.2, takes))
    assert ways[-1][0], "drafts have won"
    left = duel.left
    assert left > 200
    pace = 0.7
    ways = stretches(played(duel, 80, 1.2, takes))
    assert [length for drafts, length in ways if not drafts] == [TRIAL]


def test_a_new_number_of_rows_begins_as_its_neighbour_stands() -> None:
    duels = Duels()
    assert duels.of(32).drafting
    played(duels.of(32), 200, 1.1, lambda drafts: 2.2 if drafts else 1.0)
    assert not duels.of(32).drafting
    assert not duels.of(24).wants(1.1)
    assert duels.of(24) is not duels.of(32)
    # Few rows promise more, and so are tried at once, with nothing known of their plain steps.
    ways = stretches(played(duels.of(1), 40, 1.6, lambda drafts: 1.2 if drafts else 1.0))
    assert ways == [(True, 40)]
    ways = stretches(played(duels.of(2), 40, 1.39, lambda drafts: 1.2 if drafts else 1.0))
    assert ways == [(True, TRIAL), (False, TRIAL), (True, 40 - 2 * TRIAL)]


def test_a_trial_is_no_verdict() -> None:
    duels = Duels()
    played(duels.of(32), TRIAL + 2, 1.1, lambda drafts: 1.0)
    assert duels.of(32).trial
    assert not duels.of(32).drafting
    assert duels.of(20).wants(1.1)


def test_a_trial_that_nobody_goes_on_with_is_over() -> None:
    duel = Duel()
    played(duel, 90, 1.1, lambda drafts: 2.2 if drafts else 1.0)
    while not (duel.trial and duel.drafting):
        played(duel, 1, 1.1, lambda drafts: 2.2 if drafts else 1.0)
    duel.decline()
    assert duel.lost
    assert not duel.trial
    assert not duel.wants(1.1)


def test_to_decline_is_no_verdict_on_drafts_that_have_not_lost() -> None:
    duel = Duel()
    duel.decline()
    assert duel.wants(1.1)
