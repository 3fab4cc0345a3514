"""Resume points and the drafter: a point may lack the drafter's state where its page has it."""

from surefoot.state.ledger import Lease, Ledger, Restore, Save
from tests.unit.state.test_points import FIRST, SECOND, admitted, ledger_of, point_pages, row


def drafted_row(ledger: Ledger, lease: Lease, n: int, tokens: list[int], upto: int) -> None:
    """One step that the drafter follows up to position `upto`."""
    assert ledger.reserve(lease, n)
    ledger.commit(lease, n)
    lease.drafted = upto
    ledger.publish(lease, tokens)
    ledger.audit()


def test_a_point_says_whether_it_has_the_drafters_state() -> None:
    """A page may have it while the point, taken by a request that was not drafted for, has not."""
    ledger = ledger_of(every=16)
    tokens = list(range(10))
    lease = admitted(ledger, tokens)
    drafted_row(ledger, lease, 4, tokens, 4)
    drafted_row(ledger, lease, 4, tokens, 8)
    ledger.tree.detach(lease.path[1])
    ledger._free_points.append(SECOND)
    quiet = admitted(ledger, tokens)
    assert (quiet.cached, quiet.draft_from, quiet.drafted) == (4, 0, 4)
    row(ledger, quiet, 4, tokens)
    assert quiet.path[1] is lease.path[1]
    assert (quiet.path[1].drafted, quiet.path[1].point_drafted) == (True, False)
    ledger.release(quiet, tokens)
    later = admitted(ledger, tokens)
    assert (later.cached, later.draft_from, later.drafted) == (8, 8, 8)


def test_a_request_that_is_drafted_for_puts_the_drafters_state_into_a_point() -> None:
    ledger = ledger_of(every=16, slots=3)
    tokens = list(range(10))
    quiet, lease = admitted(ledger, tokens), admitted(ledger, tokens)
    row(ledger, quiet, 4, tokens)
    assert not quiet.path[0].point_drafted
    ledger.take_work()
    drafted_row(ledger, lease, 4, tokens, 4)
    assert lease.path[0].point_drafted
    assert ledger.take_work().moves == [Save(lease.slot, FIRST, 4)]
    # Once is enough, and one that is not drafted for changes nothing.
    other = admitted(ledger, [*tokens[:4], 99])
    assert other.cached == 4
    for each in (lease, quiet):
        row(ledger, each, 1, tokens)
    assert ledger.take_work().moves == [Restore(FIRST, other.slot, 4)]
    assert lease.path[0].point_drafted


def test_a_drafter_that_began_late_leaves_no_state_in_points() -> None:
    ledger = ledger_of()
    tokens = list(range(6))
    lease = admitted(ledger, tokens)
    assert ledger.reserve(lease, 4)
    ledger.commit(lease, 3)
    lease.undraft()
    assert (lease.draft_from, lease.drafted) == (3, 3)
    ledger.commit(lease, 1)
    lease.drafted = 4
    ledger.publish(lease, tokens)
    assert point_pages(lease) == [1]
    assert not lease.path[0].point_drafted
