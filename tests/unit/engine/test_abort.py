"""Requests can be ended from outside at any moment, and nothing is left of them."""

import pytest

from surefoot.params import SamplingParams
from surefoot.request import FinishReason, Request, Status
from tests.unit.engine.rig import Rig

LONG = tuple(range(30))


def check_aborted(rig: Rig, request: Request) -> None:
    assert request.finish_reason is FinishReason.ABORT
    assert request.status is Status.FINISHED
    rig.ledger.audit()
    before = len(rig.emissions)
    rig.drain()
    assert all(emission.request is not request for emission in rig.emissions[before:])


def test_a_waiting_request_is_aborted() -> None:
    rig = Rig(rows=1)
    first, second, third = (rig.add([1, 2, 3]) for _ in range(3))
    rig.step()
    assert second.status is Status.WAITING
    rig.loop.abort(second)
    check_aborted(rig, second)
    assert [list(r.output) for r in (first, second, third)] == [[1, 2, 3], [], [1, 2, 3]]


def test_a_request_is_aborted_between_two_chunks_of_its_prompt() -> None:
    rig = Rig(chunk=7)
    request, other = rig.add([1], prompt=LONG), rig.add([4, 5])
    rig.step()
    assert request.output_length == 0
    rig.loop.abort(request)
    check_aborted(rig, request)
    assert list(other.output) == [4, 5]


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_decoding_request_is_aborted(steps: int) -> None:
    rig = Rig(depth=2)
    request, other = rig.add(range(20)), rig.add([4, 5, 6, 7, 8, 9])
    for _ in range(steps):
        rig.step()
    emitted = list(request.output)
    rig.loop.abort(request)
    check_aborted(rig, request)
    assert list(request.output) == emitted == list(range(len(emitted)))
    assert list(other.output) == [4, 5, 6, 7, 8, 9]


def test_a_preempted_request_is_aborted() -> None:
    rig = Rig()
    request = rig.add(range(9))
    rig.step()
    rig.scheduler.preempt_all()
    assert request.status is Status.WAITING
    rig.loop.abort(request)
    check_aborted(rig, request)


def test_a_request_that_waits_for_its_second_try_is_aborted() -> None:
    rig = Rig()
    request = rig.add(range(9))
    rig.step()
    rig.scheduler.retry(request)
    rig.loop.abort(request)
    check_aborted(rig, request)


def test_aborting_an_ended_request_does_nothing() -> None:
    rig = Rig()
    request = rig.add([1, 2])
    rig.drain()
    rig.loop.abort(request)
    assert request.finish_reason is FinishReason.LENGTH


def test_what_an_aborted_request_computed_serves_the_next_one() -> None:
    rig = Rig(chunk=12)
    request = rig.add([1], prompt=LONG)
    rig.step()
    rig.loop.abort(request)
    again = rig.add([1], SamplingParams(max_tokens=1), prompt=LONG)
    rig.drain()
    assert again.cached_tokens == 12
