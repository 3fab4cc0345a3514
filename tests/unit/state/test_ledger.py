"""The ledger without bounded caches: pages, slots, sharing, eviction, work and audit."""

import pytest

from surefoot.ids import SlotId
from surefoot.state.ledger import Clear, Lease, Ledger, LedgerFault, LedgerLimits

P = 4


def ledger_of(
    pages: int, slots: int = 4, bounded: bool = False, prefix_cache: bool = True
) -> Ledger:
    return Ledger(LedgerLimits(pages, slots, 0, P, bounded, prefix_cache=prefix_cache))


def admitted(ledger: Ledger, tokens: list[int], first: int = 1) -> Lease:
    lease = ledger.admit(tokens, first)
    assert lease is not None
    return lease


def computed(ledger: Ledger, tokens: list[int], drafted: bool = False) -> Lease:
    """A lease with all of `tokens` computed and published."""
    lease = admitted(ledger, tokens)
    assert ledger.reserve(lease, len(tokens) - lease.computed)
    ledger.commit(lease, len(tokens) - lease.computed)
    if drafted:
        lease.drafted = lease.computed
    ledger.publish(lease, tokens)
    return lease


def counts(ledger: Ledger) -> tuple[int, int, int]:
    ledger.audit()
    return ledger.free_pages, ledger.cached_pages, ledger.held_pages


def test_a_lone_request_gets_consecutive_pages() -> None:
    ledger = ledger_of(8)
    lease = admitted(ledger, [1] * 10, first=10)
    assert (lease.pages, lease.slot) == ([1, 2, 3], 1)
    assert (lease.computed, lease.capacity) == (0, 12)
    assert ledger.reserve(lease, 13)
    assert lease.pages == [1, 2, 3, 4]
    assert counts(ledger) == (4, 0, 4)
    assert ledger.usage == 0.5
    assert ledger.free_slots == 3


def test_pages_given_back_are_handed_out_lowest_first() -> None:
    ledger = ledger_of(8, prefix_cache=False)
    first, second = admitted(ledger, [1] * 9, 9), admitted(ledger, [2] * 9, 9)
    ledger.release(second, [2] * 9)
    ledger.release(first, [1] * 9)
    assert admitted(ledger, [3] * 20, 20).pages == [1, 2, 3, 4, 5]


def test_reserve_within_capacity_takes_nothing() -> None:
    ledger = ledger_of(2)
    lease = admitted(ledger, [1] * 3, first=3)
    assert ledger.reserve(lease, 4)
    ledger.commit(lease, 3)
    assert ledger.reserve(lease, 1)
    assert lease.pages == [1]
    assert ledger.reserve(lease, 2)
    assert lease.pages == [1, 2]


def test_a_refused_reservation_changes_nothing() -> None:
    ledger = ledger_of(4)
    one, two = admitted(ledger, [1] * 8, 8), admitted(ledger, [2] * 4, 4)
    ledger.take_work()
    assert not ledger.reserve(two, 4 + 5)
    assert (one.pages, two.pages) == ([1, 2], [3])
    assert counts(ledger) == (1, 0, 3)
    assert ledger.take_work().clear_pages == []
    assert ledger.reserve(two, 4 + 4)


def test_reserve_evicts_cached_pages_only_if_it_may() -> None:
    ledger = ledger_of(3)
    ledger.release(computed(ledger, [1] * 8), [1] * 8)
    lease = admitted(ledger, [2] * 4, 4)
    assert counts(ledger) == (0, 2, 1)
    assert not ledger.reserve(lease, 5, evict=False)
    assert counts(ledger) == (0, 2, 1)
    assert ledger.reserve(lease, 5)
    assert counts(ledger) == (0, 1, 2)
    assert not ledger.reserve(lease, 13)
    assert counts(ledger) == (0, 1, 2)


def test_admission_is_all_or_nothing() -> None:
    ledger = ledger_of(4)
    ledger.release(computed(ledger, [1] * 8), [1] * 8)
    holder = admitted(ledger, [2] * 4, 4)
    before = [node.last_used for node in ledger.tree.nodes()]
    ledger.take_work()
    # Two pages would match and one is free; five more tokens need two.
    assert ledger.admit([1] * 13, 5) is None
    assert counts(ledger) == (1, 2, 1)
    assert [node.last_used for node in ledger.tree.nodes()] == before
    work = ledger.take_work()
    assert (work.clear_pages, work.moves) == ([], [])
    lease = admitted(ledger, [1] * 13, 4)
    assert (lease.slot, lease.cached, lease.capacity) == (holder.slot + 1, 8, 12)
    assert counts(ledger) == (0, 0, 4)


def test_admission_never_evicts_what_it_has_matched() -> None:
    ledger = ledger_of(3)
    ledger.release(computed(ledger, [1] * 8), [1] * 8)
    ledger.release(computed(ledger, [2] * 4), [2] * 4)
    lease = admitted(ledger, [1] * 9, 1)
    assert lease.pages == [1, 2, 3]
    assert ledger.tree.match([2] * 4, 1) == []


def test_without_a_slot_there_is_no_lease() -> None:
    ledger = ledger_of(8, slots=1)
    lease = admitted(ledger, [1] * 3)
    assert ledger.admit([2] * 3, 1) is None
    ledger.release(lease, [1] * 3)
    assert admitted(ledger, [2] * 3).slot == 1


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 8)])
def test_one_token_is_always_computed(length: int, cached: int) -> None:
    ledger = ledger_of(8)
    ledger.release(computed(ledger, [7] * 8), [7] * 8)
    lease = admitted(ledger, [7] * length)
    assert (lease.cached, lease.computed) == (cached, cached)
    assert lease.capacity == cached + P
    assert counts(ledger) == (5, 2 - cached // P, cached // P + 1)


def test_reuse_can_be_declined() -> None:
    ledger = ledger_of(8)
    ledger.release(computed(ledger, [7] * 8), [7] * 8)
    lease = ledger.admit([7] * 9, 9, reuse=False)
    assert lease is not None
    assert (lease.cached, lease.pages) == (0, [3, 4, 5])


def test_without_prefix_cache_nothing_is_kept() -> None:
    ledger = ledger_of(8, prefix_cache=False)
    lease = computed(ledger, [7] * 8)
    assert lease.path == []
    ledger.release(lease, [7] * 8)
    assert counts(ledger) == (8, 0, 0)
    assert admitted(ledger, [7] * 9).cached == 0


def test_bounded_caches_without_points_publish_nothing() -> None:
    ledger = ledger_of(8, bounded=True)
    lease = computed(ledger, [7] * 8)
    assert lease.path == []
    assert ledger.chunk(lease, 100) == 100


def test_publish_hands_over_full_pages_below_the_cursor() -> None:
    ledger = ledger_of(8)
    tokens = list(range(20))
    lease = admitted(ledger, tokens, 20)
    ledger.commit(lease, 7)
    ledger.publish(lease, tokens)
    assert [node.key for node in lease.path] == [(0, 1, 2, 3)]
    ledger.commit(lease, 1)
    ledger.publish(lease, tokens)
    ledger.publish(lease, tokens)
    assert [node.page for node in lease.path] == [1, 2]
    assert lease.path[1].parent is lease.path[0]
    assert counts(ledger) == (3, 0, 5)


def test_running_requests_share_published_pages() -> None:
    ledger = ledger_of(8)
    first = computed(ledger, [7] * 9)
    second = admitted(ledger, [7] * 9)
    assert first.pages == [1, 2, 3]
    assert second.pages == [1, 2, 4]
    assert [node.holders for node in second.path] == [2, 2]
    assert counts(ledger) == (4, 0, 4)
    ledger.release(first, [7] * 9)
    assert counts(ledger) == (5, 0, 3)
    ledger.release(second, [7] * 9)
    assert counts(ledger) == (6, 2, 0)


def test_publishing_what_is_there_keeps_the_own_page() -> None:
    ledger = ledger_of(8)
    tokens = [7] * 8
    first, second = admitted(ledger, tokens, 8), admitted(ledger, tokens, 8)
    for lease in (first, second):
        ledger.commit(lease, 8)
        ledger.publish(lease, tokens)
    assert second.pages == [3, 4]
    assert [node.page for node in second.path] == [1, 2]
    assert second.private_pages() == [3, 4]
    assert counts(ledger) == (4, 0, 4)
    ledger.release(first, tokens)
    assert counts(ledger) == (4, 0, 4)
    ledger.release(second, tokens)
    assert counts(ledger) == (6, 2, 0)


def test_new_pages_go_on_below_pages_that_were_there() -> None:
    ledger = ledger_of(8)
    first, second = admitted(ledger, [7] * 4, 4), admitted(ledger, [7] * 4 + [8] * 4, 8)
    ledger.commit(first, 4)
    ledger.publish(first, [7] * 4)
    ledger.commit(second, 8)
    ledger.publish(second, [7] * 4 + [8] * 4)
    assert [node.page for node in second.path] == [1, 3]
    ledger.release(second, [7] * 4 + [8] * 4)
    assert admitted(ledger, [7] * 4 + [8] * 5).pages[:2] == [1, 3]
    ledger.audit()


def test_release_publishes_what_is_committed() -> None:
    ledger = ledger_of(8)
    tokens = list(range(10))
    lease = admitted(ledger, tokens, 10)
    ledger.commit(lease, 9)
    ledger.release(lease, tokens)
    assert counts(ledger) == (6, 2, 0)
    assert admitted(ledger, tokens).cached == 8


def test_a_released_path_gives_way_from_its_end() -> None:
    ledger = ledger_of(8)
    tokens = list(range(12))
    lease = computed(ledger, tokens)
    path = lease.path
    ledger.release(lease, tokens)
    assert path[0].last_used > path[1].last_used > path[2].last_used


def test_release_can_leave_the_last_pages_unpublished() -> None:
    ledger = ledger_of(8)
    tokens = list(range(10))
    lease = admitted(ledger, tokens, 10)
    ledger.commit(lease, 4)
    ledger.publish(lease, tokens)
    ledger.commit(lease, 4)
    ledger.release(lease, tokens, publish=False)
    assert counts(ledger) == (7, 1, 0)


def test_a_page_is_marked_drafted_when_all_of_it_is() -> None:
    ledger = ledger_of(8)
    tokens = list(range(16))
    lease = admitted(ledger, tokens, 16)
    ledger.commit(lease, 16)
    lease.draft_from, lease.drafted = 3, 15
    ledger.publish(lease, tokens)
    assert [node.drafted for node in lease.path] == [False, True, True, False]


def test_drafter_state_counts_only_if_every_matched_page_has_it() -> None:
    ledger = ledger_of(8)
    tokens = list(range(13))
    ledger.release(computed(ledger, tokens[:8], drafted=True), tokens[:8])
    lease = admitted(ledger, tokens)
    assert (lease.cached, lease.drafted, lease.draft_from) == (8, 8, 0)
    assert ledger.reserve(lease, 5)
    ledger.commit(lease, 4)
    ledger.release(lease, tokens)
    lease = admitted(ledger, tokens)
    assert (lease.cached, lease.drafted, lease.draft_from) == (12, 12, 12)
    fresh = admitted(ledger, [99])
    assert (fresh.drafted, fresh.draft_from) == (0, 0)


def test_what_is_handed_out_is_to_be_cleared() -> None:
    ledger = ledger_of(8)
    lease = admitted(ledger, [1] * 5, 5)
    work = ledger.take_work()
    assert work.clear_pages == [1, 2]
    assert work.moves == [Clear(lease.slot)]
    assert ledger.reserve(lease, 12)
    work = ledger.take_work()
    assert (work.clear_pages, work.moves) == ([3], [])
    assert ledger.take_work().clear_pages == []


def test_shared_pages_are_not_cleared() -> None:
    ledger = ledger_of(8)
    ledger.release(computed(ledger, [7] * 8), [7] * 8)
    ledger.take_work()
    admitted(ledger, [7] * 9, 1)
    assert ledger.take_work().clear_pages == [3]


def test_a_page_handed_out_twice_is_cleared_after_the_second_time() -> None:
    ledger = ledger_of(1)
    ledger.release(admitted(ledger, [1], 1), [1])
    assert admitted(ledger, [2], 1).pages == [1]
    work = ledger.take_work()
    assert set(work.clear_pages) == {1}
    assert work.moves == [Clear(SlotId(1)), Clear(SlotId(1))]


def test_chunks_of_models_without_bounded_caches_are_not_cut() -> None:
    ledger = ledger_of(8)
    assert ledger.chunk(admitted(ledger, [1] * 30), 30) == 30


@pytest.mark.parametrize("n", [5, -1])
def test_commit_beyond_what_is_reserved_is_refused(n: int) -> None:
    ledger = ledger_of(8)
    lease = admitted(ledger, [1] * 4, 4)
    with pytest.raises(LedgerFault, match=f"commit of {n} tokens at 0, room for 4"):
        ledger.commit(lease, n)
    assert lease.computed == 0


def test_publish_needs_the_computed_tokens() -> None:
    ledger = ledger_of(8)
    lease = admitted(ledger, [1] * 4, 4)
    ledger.commit(lease, 4)
    with pytest.raises(LedgerFault, match="4 tokens computed, 3 known"):
        ledger.publish(lease, [1] * 3)


def test_a_released_lease_cannot_be_used() -> None:
    ledger = ledger_of(8)
    lease = admitted(ledger, [1] * 4, 4)
    ledger.release(lease, [1] * 4)
    for use in (
        lambda: ledger.release(lease, [1] * 4),
        lambda: ledger.release(lease, [1] * 4, publish=False),
        lambda: ledger.publish(lease, [1] * 4),
        lambda: ledger.reserve(lease, 0),
        lambda: ledger.commit(lease, 0),
    ):
        with pytest.raises(LedgerFault, match="slot 1"):
            use()
    assert counts(ledger) == (8, 0, 0)


def test_a_lease_of_another_ledger_is_refused() -> None:
    lease = admitted(ledger_of(8), [1])
    with pytest.raises(LedgerFault, match="slot 1"):
        ledger_of(8).release(lease, [1])
