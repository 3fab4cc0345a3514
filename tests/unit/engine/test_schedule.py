"""Who runs, how much of each, and who gives way."""

from collections.abc import Sequence

import pytest
from torch import Tensor

from surefoot.draft.depth import FixedDepth
from surefoot.draft.drafter import CommittedRow
from surefoot.params import SamplingParams
from surefoot.request import FinishReason, Request, Status
from surefoot.testing.drafters import AlwaysWrong
from tests.unit.engine.rig import PROMPT, Rig


def step_tokens(rig: Rig) -> list[int]:
    return [sum(row.count + len(row.drafts) for row in rows) for rows in rig.script.steps]


def served(rig: Rig) -> list[list[int]]:
    return [[row.request.id for row in rows] for rows in rig.script.steps]


def test_drafts_end_at_the_limit() -> None:
    rig = Rig(depth=8)
    request = rig.add(range(6))
    rig.drain()
    widths = [len(row.drafts) for rows in rig.script.steps for row in rows]
    # The prompt brings one token and the verify row its own bonus: four drafts are the rest.
    assert widths == [0, 4]
    reached = [row.first + row.count + len(row.drafts) for rows in rig.script.steps for row in rows]
    assert max(reached) == request.length_limit - 1


def test_a_request_with_one_token_to_go_is_not_drafted_for() -> None:
    rig = Rig(depth=8)
    rig.add([1, 2])
    rig.drain()
    assert [len(row.drafts) for rows in rig.script.steps for row in rows] == [0, 0]


def test_the_token_budget_of_a_step_counts_drafts() -> None:
    """Six decoding requests with drafts of three, and a long prompt, in steps of 32 tokens."""
    rig = Rig(pages=200, rows=8, step_tokens=32, chunk=64, depth=3)
    requests = [rig.add(range(20)) for _ in range(6)]
    rig.step()
    requests.append(rig.add(range(5), prompt=range(100)))
    rig.drain()
    assert max(step_tokens(rig)) == 32
    assert [list(r.output) for r in requests] == [list(range(20))] * 6 + [list(range(5))]
    # The drafts did not keep the prompt from its share for long.
    assert requests[6].finish_reason is FinishReason.LENGTH


def test_every_running_request_gets_a_token_however_small_the_budget() -> None:
    rig = Rig(rows=4, step_tokens=4, chunk=16, depth=5)
    for _ in range(4):
        rig.add(range(20), prompt=range(9))
    rig.drain()
    assert max(step_tokens(rig)) == 4
    assert served(rig).count([1, 2, 3, 4]) > 3


def test_drafts_do_not_keep_a_waiting_request_out() -> None:
    rig = Rig(rows=4, step_tokens=4, depth=5)
    rig.add(range(20))
    rig.step()
    rig.step()
    rig.add(range(3))
    rig.step()
    assert served(rig)[-1] == [1, 2]


def test_requests_of_one_token_in_bulk_free_their_rows() -> None:
    rig = Rig(pages=400, rows=4, depth=4)
    requests = [rig.add([number % 250], prompt=[number % 250]) for number in range(200)]
    rig.drain()
    assert [list(r.output) for r in requests] == [[n % 250] for n in range(200)]
    assert len(rig.script.steps) == 50


def test_requests_run_in_their_order_of_arrival() -> None:
    rig = Rig(rows=2)
    for length in (3, 1, 2, 2):
        rig.add(range(length))
    rig.drain()
    assert served(rig) == [[1, 2], [1, 3], [1, 3], [4], [4]]


def test_a_long_prompt_does_not_stop_decoding_requests() -> None:
    rig = Rig(pages=100, chunk=8, step_tokens=16)
    rig.add(range(12))
    rig.step()
    rig.add([1], prompt=range(60))
    rig.step()
    rig.step()
    counts = [[row.count for row in rows] for rows in rig.script.steps]
    assert counts == [[5], [1, 8], [1, 8]]


def scarce(
    prompts: Sequence[Sequence[int]], pages: int, depth: int = 0
) -> tuple[Rig, list[Request]]:
    """Requests whose answers do not fit together."""
    rig = Rig(pages=pages, rows=len(prompts), depth=depth)
    return rig, [rig.add(range(12), prompt=prompt) for prompt in prompts]


def test_the_youngest_gives_way_and_the_oldest_never_does() -> None:
    rig, requests = scarce([[n] * 5 for n in range(3)], pages=8)
    rig.drain()
    assert [list(request.output) for request in requests] == [list(range(12))] * 3
    assert requests[0].preemptions == 0
    assert requests[2].preemptions >= 1
    assert served(rig)[0] == [1, 2, 3]
    assert all(rows == sorted(rows) for rows in served(rig))
    oldest = [rows[0] for rows in served(rig)]
    assert oldest == sorted(oldest)


def test_a_preempted_request_goes_on_from_what_was_cached() -> None:
    rig = Rig(pages=64)
    request = rig.add(range(9), prompt=range(16))
    for _ in range(4):
        rig.step()
    rig.scheduler.preempt_all()
    assert request.status is Status.WAITING
    rig.step()
    row = rig.script.steps[-1][0]
    # 16 + 4 tokens are known and 19 were computed: four whole pages of them.
    assert (row.first, row.count, row.final) == (16, 4, True)
    rig.drain()
    assert list(request.output) == list(range(9))
    assert (request.preemptions, request.cached_tokens) == (1, 0)


def test_preempting_all_keeps_the_order() -> None:
    rig = Rig(rows=3)
    for _ in range(4):
        rig.add(range(6))
    rig.step()
    rig.scheduler.preempt_all()
    rig.step()
    assert served(rig)[-1] == [1, 2, 3]


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_drafts_take_only_pages_that_are_free(spare: int) -> None:
    """k shrinks before anything is evicted or anybody pre-empted."""
    rig = Rig(pages=4 + spare, rows=1, depth=8)
    rig.add([1], prompt=range(50, 58))
    rig.drain()
    assert rig.ledger.cached_pages == 2
    request = rig.add(range(12), prompt=[9] * 7)
    rig.step()
    rig.step()
    # Positions 7 and 8 .. 8 + k lie on pages 1 and 2 ...; the cached pages stay.
    drafts = len(rig.script.steps[-1][0].drafts)
    assert rig.ledger.cached_pages == 2
    assert drafts == min(8, 4 * spare)
    assert request.preemptions == 0


def test_a_request_can_forbid_drafts() -> None:
    rig = Rig(depth=4)
    rig.add(range(8), SamplingParams(max_tokens=8, speculate=False))
    rig.add(range(8))
    rig.drain()
    rows = [row for rows in rig.script.steps for row in rows]
    assert all(not row.drafts for row in rows if row.request.id == 1)
    assert any(row.drafts for row in rows if row.request.id == 2)


def test_wrong_drafts_cost_no_extra_step() -> None:
    wrong = AlwaysWrong(lambda request, count: [0] * count, 256)
    plain, drafted = Rig(), Rig(policy=FixedDepth(5), drafter=wrong)
    for rig in (plain, drafted):
        rig.add(range(2, 12))
        rig.drain()
    assert len(drafted.script.steps) == len(plain.script.steps)


class _Suspended(FixedDepth):
    @property
    def follows(self) -> bool:
        return False


@pytest.mark.parametrize(("policy", "told"), [(FixedDepth(2), True), (_Suspended(2), False)])
def test_a_drafter_follows_nothing_while_drafting_is_suspended(
    policy: FixedDepth, told: bool
) -> None:
    seen: list[bool] = []

    class Watching(AlwaysWrong):
        def observe(self, rows: Sequence[CommittedRow], hidden: Tensor) -> None:
            seen.extend(row.keep_up for row in rows)

    rig = Rig(policy=policy, drafter=Watching(lambda request, count: [0] * count, 256))
    rig.add(range(4))
    rig.drain()
    assert (len(seen) > 1) is told
    assert all(seen)


def test_requests_with_the_same_prompt_share_its_pages() -> None:
    rig = Rig(pages=64)
    first = rig.add([1, 2], prompt=[*PROMPT, *PROMPT])
    rig.drain()
    second = rig.add([3, 4], prompt=[*PROMPT, *PROMPT])
    rig.drain()
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)
