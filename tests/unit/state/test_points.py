"""The ledger with bounded caches: where resume points are taken, moved, given up and used."""

import pytest

from surefoot.ids import PointId
from surefoot.state.ledger import Clear, Lease, Ledger, LedgerLimits, Restore, Save

P = 4
SLOTS = 2
FIRST, SECOND = PointId(0), PointId(1)


def ledger_of(points: int = 8, pages: int = 64, every: int = 4, slots: int = SLOTS) -> Ledger:
    return Ledger(LedgerLimits(pages, slots, points, P, bounded=True, point_every=every))


def admitted(ledger: Ledger, tokens: list[int]) -> Lease:
    lease = ledger.admit(tokens, 1)
    assert lease is not None
    return lease


def row(ledger: Ledger, lease: Lease, n: int, tokens: list[int]) -> None:
    """One step of the lease: `n` tokens reserved, committed and published."""
    assert ledger.reserve(lease, n)
    ledger.commit(lease, n)
    ledger.publish(lease, tokens)
    ledger.audit()


def prefill(ledger: Ledger, lease: Lease, tokens: list[int], most: int = 1000) -> list[int]:
    """Compute all tokens in chunks; returns where the chunks ended."""
    ends = []
    while lease.computed < len(tokens):
        n = ledger.chunk(lease, min(most, len(tokens) - lease.computed))
        row(ledger, lease, n, tokens)
        ends.append(lease.computed)
    return ends


def point_pages(lease: Lease) -> list[int]:
    """Page boundaries of the lease's path that have a point."""
    return [index + 1 for index, node in enumerate(lease.path) if node.point is not None]


def decode(ledger: Ledger, lease: Lease, tokens: list[int], accepted: int) -> None:
    """One decode row that commits `accepted` tokens; as many become known."""
    tokens += [1] * accepted
    row(ledger, lease, accepted, tokens)


@pytest.mark.parametrize(
    ("length", "every", "boundaries"),
    [
        (3, 4, []),
        (4, 4, []),
        (5, 4, [1]),
        (14, 4, [1, 2, 3]),
        (57, 4, [1, 2, 4, 8, 12, 14]),
        (56, 4, [1, 2, 4, 8, 12, 13]),
        (57, 6, [1, 2, 4, 6, 12, 14]),
        (29, 1, [1, 2, 3, 4, 5, 6, 7]),
        (57, 100, [1, 2, 4, 8, 14]),
    ],
)
def test_prefill_is_cut_at_boundaries_and_takes_points(
    length: int, every: int, boundaries: list[int]
) -> None:
    ledger = ledger_of(points=16, every=every)
    tokens = list(range(length))
    lease = admitted(ledger, tokens)
    ends = prefill(ledger, lease, tokens)
    assert ends == [page * P for page in boundaries] + [length]
    fixed = [page for page in point_pages(lease) if page * P < length]
    assert fixed == boundaries


def test_chunks_shorter_than_the_distance_are_left_alone() -> None:
    ledger = ledger_of()
    tokens = list(range(14))
    lease = admitted(ledger, tokens)
    assert prefill(ledger, lease, tokens, most=3) == [3, 4, 7, 8, 11, 12, 14]
    assert point_pages(lease) == [1, 2, 3]


def test_a_chunk_that_runs_past_a_boundary_takes_no_point_there() -> None:
    ledger = ledger_of()
    tokens = list(range(20))
    lease = admitted(ledger, tokens)
    row(ledger, lease, 6, tokens)
    assert len(lease.path) == 1
    assert point_pages(lease) == []


def test_prefill_takes_points_at_the_boundaries_only() -> None:
    """A chunk may end on another page by chance; saving that row would waste a point."""
    ledger = ledger_of()
    tokens = list(range(30))
    lease = admitted(ledger, tokens)
    assert prefill(ledger, lease, tokens, most=4)[:3] == [4, 8, 12]
    assert point_pages(lease) == [1, 2, 4, 7]


def test_decode_rows_are_not_cut() -> None:
    ledger = ledger_of()
    tokens = list(range(6))
    lease = admitted(ledger, tokens)
    prefill(ledger, lease, tokens)
    assert ledger.chunk(lease, 50) == 50


def test_a_prompt_that_fills_its_last_page_leaves_a_rolling_point_there() -> None:
    ledger = ledger_of()
    tokens = list(range(8))
    lease = admitted(ledger, tokens)
    prefill(ledger, lease, tokens)
    assert point_pages(lease) == [1, 2]
    assert [node.rolling for node in lease.path] == [False, True]


def test_the_slot_row_is_saved_where_the_point_is_taken() -> None:
    ledger = ledger_of()
    tokens = list(range(6))
    lease = admitted(ledger, tokens)
    assert ledger.take_work().moves == [Clear(lease.slot)]
    row(ledger, lease, 4, tokens)
    assert ledger.take_work().moves == [Save(lease.slot, FIRST, 4)]
    assert lease.path[0].point == FIRST


def test_each_decoding_request_keeps_one_rolling_point() -> None:
    ledger = ledger_of()
    tokens = list(range(6))
    lease = admitted(ledger, tokens)
    prefill(ledger, lease, tokens)
    seen = []
    for accepted in (1, 2, 1, 3, 3):
        decode(ledger, lease, tokens, accepted)
        seen.append((lease.computed, point_pages(lease)))
    assert seen == [(7, [1]), (9, [1, 2]), (10, [1, 2]), (13, [1, 3]), (16, [1, 4])]
    assert ledger.tree.points == 2


def test_the_rolling_point_is_saved_over() -> None:
    ledger = ledger_of()
    tokens = list(range(6))
    lease = admitted(ledger, tokens)
    prefill(ledger, lease, tokens)
    ledger.take_work()
    for accepted in (3, 3):
        decode(ledger, lease, tokens, accepted)
    assert ledger.take_work().moves == [
        Save(lease.slot, SECOND, 8),
        Save(lease.slot, SECOND, 12),
    ]


def test_a_boundary_that_later_rows_may_have_overwritten_gets_no_point() -> None:
    ledger = ledger_of()
    tokens = list(range(6))
    lease = admitted(ledger, tokens)
    prefill(ledger, lease, tokens)
    assert ledger.reserve(lease, 4)
    ledger.commit(lease, 3)
    ledger.commit(lease, 1)
    ledger.publish(lease, [*tokens, 1, 1, 1, 1])
    assert len(lease.path) == 2
    assert point_pages(lease) == [1]


def test_the_row_that_ends_the_prompt_is_no_decode_row() -> None:
    """It may be longer than a ring's spare columns, so what it crosses is lost."""
    ledger = ledger_of()
    tokens = list(range(6))
    lease = admitted(ledger, tokens)
    row(ledger, lease, 6, tokens)
    assert point_pages(lease) == []


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_the_row_of_the_prompts_last_token_is_a_decode_row(accepted: int) -> None:
    """A chunk may leave one token, and drafts may follow it: that must not cost the point."""
    ledger = ledger_of()
    tokens = list(range(6))
    lease = admitted(ledger, tokens)
    for n in (4, 1):
        row(ledger, lease, n, tokens)
    while lease.computed < 9:
        decode(ledger, lease, tokens, min(accepted, 9 - lease.computed))
    assert point_pages(lease) == [1, 2]


def test_the_rolling_point_stays_with_the_tree_at_the_end() -> None:
    ledger = ledger_of()
    tokens = list(range(6))
    lease = admitted(ledger, tokens)
    prefill(ledger, lease, tokens)
    decode(ledger, lease, tokens, 3)
    path = lease.path
    ledger.release(lease, tokens)
    assert (path[1].point, path[1].rolling) == (SECOND, False)
    again = admitted(ledger, [*tokens, 5])
    assert again.cached == 8


def test_resuming_restores_the_point_to_the_slot() -> None:
    ledger = ledger_of()
    tokens = list(range(6))
    lease = admitted(ledger, tokens)
    prefill(ledger, lease, tokens)
    ledger.release(lease, tokens)
    ledger.take_work()
    again = admitted(ledger, tokens)
    assert again.cached == 4
    assert ledger.take_work().moves == [Restore(FIRST, again.slot, 4)]


def test_a_match_ends_at_the_deepest_point() -> None:
    ledger = ledger_of()
    tokens = list(range(30))
    lease = admitted(ledger, tokens)
    prefill(ledger, lease, tokens)
    assert point_pages(lease) == [1, 2, 4, 7]
    ledger.release(lease, tokens)
    assert admitted(ledger, tokens[:27]).cached == 16


def test_a_slot_that_is_reused_at_once_is_saved_before_it_is_cleared() -> None:
    """The end of one request and the start of the next may fall between two forwards."""
    ledger = ledger_of(slots=1)
    tokens = list(range(5))
    lease = admitted(ledger, tokens)
    ledger.take_work()
    row(ledger, lease, 4, tokens)
    ledger.release(lease, tokens)
    admitted(ledger, [9, 9])
    assert ledger.take_work().moves == [Save(lease.slot, FIRST, 4), Clear(lease.slot)]


def test_a_point_somebody_resumed_from_stays() -> None:
    ledger = ledger_of()
    tokens = list(range(6))
    lease = admitted(ledger, tokens)
    prefill(ledger, lease, tokens)
    decode(ledger, lease, tokens, 3)
    other = admitted(ledger, [*tokens, 5])
    assert other.cached == 8
    decode(ledger, lease, tokens, 3)
    assert point_pages(lease) == [1, 2, 3]
    assert ledger.tree.points == 3


def test_a_prompt_point_that_is_somebody_elses_rolling_one_stays() -> None:
    ledger = ledger_of(every=16)
    tokens = list(range(6))
    lease = admitted(ledger, tokens)
    other = admitted(ledger, [*tokens, 1, 1, 1, 7])
    prefill(ledger, lease, tokens)
    decode(ledger, lease, tokens, 3)
    assert lease.path[1].rolling
    prefill(ledger, other, [*tokens, 1, 1, 1, 7])
    assert other.path[1] is lease.path[1]
    assert not lease.path[1].rolling
    decode(ledger, lease, tokens, 3)
    assert point_pages(lease) == [1, 2, 3]


def test_requests_with_equal_output_do_not_take_the_same_point_twice() -> None:
    ledger = ledger_of()
    tokens, same = list(range(6)), list(range(6))
    one, two = admitted(ledger, tokens), admitted(ledger, same)
    prefill(ledger, one, tokens)
    prefill(ledger, two, same)
    decode(ledger, one, tokens, 3)
    decode(ledger, two, same, 3)
    assert two.path[1] is one.path[1]
    assert two.rolling is None
    assert ledger.tree.points == 2
    decode(ledger, two, same, 3)
    assert point_pages(two) == [1, 2, 3]
    assert ledger.tree.points == 3


def test_a_full_pool_gives_up_the_point_nobody_used_for_longest() -> None:
    ledger = ledger_of(points=2)
    for token in (1, 2):
        lease = admitted(ledger, [token] * 5)
        prefill(ledger, lease, [token] * 5)
        ledger.release(lease, [token] * 5)
    ledger.release(admitted(ledger, [1] * 5), [1] * 5)
    lease = admitted(ledger, [3] * 5)
    prefill(ledger, lease, [3] * 5)
    assert point_pages(lease) == [1]
    assert admitted(ledger, [2] * 5).cached == 0
    assert ledger.cached_pages == 2


def test_points_on_held_pages_are_never_taken_away() -> None:
    ledger = ledger_of(points=1)
    one, two = admitted(ledger, [1] * 5), admitted(ledger, [2] * 5)
    prefill(ledger, one, [1] * 5)
    prefill(ledger, two, [2] * 5)
    assert point_pages(one) == [1]
    assert point_pages(two) == []
    tokens = [2] * 5
    decode(ledger, two, tokens, 3)
    assert point_pages(two) == []
    ledger.release(one, [1] * 5)
    decode(ledger, two, tokens, 4)
    assert point_pages(two) == [3]


def test_a_point_is_read_before_it_is_written_again() -> None:
    """A lease that resumes and ends at once leaves a point to be restored, and to go."""
    ledger = ledger_of(points=1)
    lease = admitted(ledger, [1] * 5)
    prefill(ledger, lease, [1] * 5)
    ledger.release(lease, [1] * 5)
    other = admitted(ledger, [2] * 5)
    ledger.take_work()
    again = admitted(ledger, [1] * 5)
    ledger.release(again, [1] * 5)
    prefill(ledger, other, [2] * 5)
    assert other.path[0].point == FIRST
    assert ledger.take_work().moves == [
        Restore(FIRST, again.slot, 4),
        Save(other.slot, FIRST, 4),
    ]


def test_a_page_evicted_gives_its_point_back() -> None:
    ledger = ledger_of(points=1, pages=2)
    lease = admitted(ledger, [1] * 5)
    prefill(ledger, lease, [1] * 5)
    ledger.release(lease, [1] * 5)
    lease = admitted(ledger, [2] * 5)
    prefill(ledger, lease, [2] * 5)
    assert point_pages(lease) == [1]
    assert lease.path[0].point == FIRST
    ledger.audit()


def test_a_point_lost_is_taken_again_by_the_next_request() -> None:
    ledger = ledger_of()
    lease = admitted(ledger, [1] * 5)
    prefill(ledger, lease, [1] * 5)
    ledger.release(lease, [1] * 5)
    lost = ledger.tree.evict_point()
    assert lost is not None
    ledger._free_points.append(lost)
    lease = admitted(ledger, [1] * 5)
    assert lease.cached == 0
    prefill(ledger, lease, [1] * 5)
    assert point_pages(lease) == [1]
    # The tree has the page that was computed anew; the old one is free again.
    assert lease.private_pages() == [1]
    ledger.audit()


def test_without_a_free_slot_a_request_waits_even_if_it_has_a_point() -> None:
    ledger = ledger_of(slots=1)
    lease = admitted(ledger, [1] * 9)
    prefill(ledger, lease, [1] * 9)
    ledger.release(lease, [1] * 9)
    other = admitted(ledger, [2] * 5)
    assert ledger.admit([1] * 9, 1) is None
    assert ledger.tree.points == 2
    ledger.release(other, [2] * 5)
    assert admitted(ledger, [1] * 9).cached == 8
    ledger.audit()


def test_a_long_prompt_in_a_full_pool_moves_its_own_last_point_along() -> None:
    ledger = ledger_of(points=3, every=1)
    tokens = list(range(30))
    lease = admitted(ledger, tokens)
    prefill(ledger, lease, tokens)
    # The first ones serve prompts that begin alike, the last one serves the next turn.
    assert point_pages(lease) == [1, 2, 7]
    ledger.release(lease, tokens)
    assert admitted(ledger, [*tokens, 9]).cached == 28


def test_points_that_others_hold_too_do_not_move() -> None:
    ledger = ledger_of(points=2, every=1)
    tokens = list(range(9))
    one = admitted(ledger, tokens)
    prefill(ledger, one, tokens)
    assert point_pages(one) == [1, 2]
    longer = [*tokens, *range(40, 50)]
    two = admitted(ledger, longer)
    assert two.cached == 8
    prefill(ledger, two, longer)
    assert point_pages(two) == [1, 2]
    ledger.audit()


def test_without_points_nothing_is_cached_and_nothing_is_cut() -> None:
    ledger = ledger_of(points=0)
    tokens = list(range(30))
    lease = admitted(ledger, tokens)
    assert prefill(ledger, lease, tokens) == [30]
    ledger.release(lease, tokens)
    assert ledger.cached_pages == 0
    assert admitted(ledger, tokens).cached == 0
    assert [type(move) for move in ledger.take_work().moves] == [Clear, Clear]
