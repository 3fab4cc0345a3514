"""The audit: books that do not add up are found, and the message says where."""

from collections.abc import Sequence

import pytest

from surefoot.ids import PageId
from surefoot.state.ledger import Lease, Ledger, LedgerFault, LedgerLimits
from tests.unit.state.test_ledger import P, admitted, computed, ledger_of


def test_audit_finds_a_page_with_two_writers() -> None:
    ledger = ledger_of(8)
    one, two = admitted(ledger, [1] * 4, 4), admitted(ledger, [2] * 4, 4)
    two.pages[0] = one.pages[0]
    with pytest.raises(LedgerFault, match=r"page 1 has two owners: slot \d and slot \d"):
        ledger.audit()


def test_audit_finds_a_shared_page_that_is_still_written() -> None:
    ledger = ledger_of(8)
    one, two = computed(ledger, [1] * 4), admitted(ledger, [2] * 4, 4)
    two.pages[0] = one.pages[0]
    with pytest.raises(LedgerFault, match="page 1 has two owners: the prefix tree and slot 2"):
        ledger.audit()


def test_audit_finds_a_lost_page() -> None:
    ledger = ledger_of(3)
    lease = admitted(ledger, [1] * 8, 8)
    lease.pages.pop()
    with pytest.raises(LedgerFault, match="computed 0 of 8, but 1 pages"):
        ledger.audit()
    lease.capacity = 4
    with pytest.raises(LedgerFault, match=r"of 3 pages \[2\] have no owner"):
        ledger.audit()


def test_audit_finds_a_wrong_count_of_private_pages() -> None:
    ledger = ledger_of(3)
    lease = admitted(ledger, [1] * 4, 4)
    lease.pages.append(PageId(2))
    lease.capacity = 8
    ledger._free_pages.remove(PageId(2))
    with pytest.raises(LedgerFault, match="2 pages are private, the count says 1"):
        ledger.audit()


def test_audit_finds_a_slot_with_two_requests() -> None:
    ledger = ledger_of(8)
    one, two = admitted(ledger, [1]), admitted(ledger, [2])
    two.slot = one.slot
    with pytest.raises(LedgerFault, match="slot 1 has two owners"):
        ledger.audit()


def test_audit_finds_a_forgotten_drop() -> None:
    ledger = ledger_of(8)
    lease = computed(ledger, [1] * 4)
    ledger.tree.hold(lease.path[0])
    ledger.release(lease, [1] * 4)
    with pytest.raises(LedgerFault, match="page 1 counts 1 holders, 0 leases hold it"):
        ledger.audit()


def test_audit_finds_a_path_that_does_not_hang_together() -> None:
    ledger = ledger_of(8)
    lease = computed(ledger, list(range(8)))
    lease.path.reverse()
    with pytest.raises(LedgerFault, match="page 2 does not follow its path"):
        ledger.audit()


class EarlyPublisher(Ledger):
    """Publishes everything that has a page, computed or not."""

    def publish(self, lease: Lease, tokens: Sequence[int]) -> None:
        computed, lease.computed = lease.computed, min(lease.capacity, len(tokens))
        super().publish(lease, tokens)
        lease.computed = computed


def test_audit_finds_a_page_published_past_the_cursor() -> None:
    ledger = EarlyPublisher(LedgerLimits(8, 4, 0, P, bounded=False))
    lease = admitted(ledger, [1] * 8, 8)
    ledger.commit(lease, 7)
    ledger.publish(lease, [1] * 8)
    with pytest.raises(LedgerFault, match="2 pages of 4 tokens published, but computed 7"):
        ledger.audit()
