"""A bug that one request meets after the forward pass ends that request, and says so once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from surefoot.backend.protocol import UNCHOSEN
from surefoot.engine.rows import PlannedRow
from surefoot.params import SamplingParams
from surefoot.request import FinishReason, Request
from surefoot.testing.fakes import FailingRunner, Failures
from tests.unit.engine.rig import Rig, ScriptedRunner


class FailingText:
    """A detokenizer with a bug that shows at one of its tokens, counted from 0."""

    def __init__(self, at: int) -> None:
        self._left = at

    def push(self, token: int, may_stop: bool) -> tuple[str, bool]:
        """See TextStream."""
        del may_stop
        if not self._left:
            raise KeyError("planted")
        self._left -= 1
        return chr(token), False

    def finish(self) -> str:
        """See TextStream."""
        return ""


def add_failing(rig: Rig, answer: Sequence[int], at: int, **params: object) -> Request:
    values = SamplingParams(max_tokens=len(answer), **params)  # type: ignore[arg-type]
    request = rig.add(answer, values)
    rig.loop._streams[request] = FailingText(at)
    return request


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_bug_in_the_text_ends_its_request_alone(depth: int, at: int) -> None:
    rig = Rig(depth=depth)
    before, after = rig.add([1, 2, 3, 4, 5, 6, 7]), list(range(10, 18))
    broken = add_failing(rig, [65, 66, 67, 68, 69, 70], at)
    last = rig.add(after)
    rig.drain()
    assert list(before.output) == [1, 2, 3, 4, 5, 6, 7]
    assert list(last.output) == after
    assert rig.reasons(broken) == [FinishReason.ERROR]
    assert broken.error == "KeyError: 'planted'"
    assert broken.retries == 0
    emitted = [token for e in rig.emissions if e.request is broken for token in e.token_ids]
    # The first step brings one token, each further one as many as are verified.
    whole_steps = at and 1 + (at - 1) // (depth + 1) * (depth + 1)
    assert list(broken.output) == emitted == [65, 66, 67, 68, 69, 70][:whole_steps]
    assert rig.text(broken) == "".join(map(chr, emitted))
    later = rig.add([7, 8])
    rig.drain()
    assert list(later.output) == [7, 8]


def test_nothing_of_the_step_is_published() -> None:
    rig = Rig(depth=3)
    # Prompt and first run fill two pages; the first is published before the bug shows.
    broken = add_failing(rig, [65, 66, 67, 68, 69, 70], at=1)
    rig.drain()
    assert broken.finish_reason is FinishReason.ERROR
    assert rig.ledger.cached_pages == 1


def test_a_bug_in_the_text_of_a_step_whose_checkpoints_fail_too() -> None:
    class FailsToSettle(ScriptedRunner):
        def settle(self, rows: Sequence[PlannedRow]) -> None:
            """See Runner."""
            if len(self.steps) == 2:
                raise RuntimeError("also planted")

    rig = Rig(script=FailsToSettle())
    broken, whole = add_failing(rig, [65, 66, 67], at=1), rig.add([1, 2, 3, 4])
    rig.drain()
    assert rig.reasons(broken) == [FinishReason.ERROR]
    assert list(broken.output) == [65]
    assert rig.reasons(whole) == [FinishReason.LENGTH]
    assert list(whole.output) == [1, 2, 3, 4]


def test_log_probabilities_end_with_the_emitted_tokens() -> None:
    rig = Rig(depth=3)
    broken = add_failing(rig, [65, 66, 67, 68, 69, 70], at=2, logprobs=0)
    rig.drain()
    assert len(broken.logprobs) <= len(broken.output)
    assert broken.speculation.accepted <= len(broken.output)


def reports(caplog: pytest.LogCaptureFixture, error: str) -> list[str]:
    found = [record for record in caplog.records if error in record.getMessage()]
    assert all(record.levelno >= logging.ERROR for record in found)
    return [record.getMessage() for record in found]


def test_the_error_of_a_request_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", logger="surefoot")
    rig = Rig()
    unchosen, bug = rig.add([1, 2, UNCHOSEN, 4]), add_failing(rig, [65, 66], at=1)
    whole = rig.add([5, 6, 7, 8])
    rig.drain()
    assert whole.error is None
    for request in (unchosen, bug):
        assert request.error is not None
        assert reports(caplog, request.error) == [f"request {request.id} failed: {request.error}"]


def test_the_error_of_a_failed_step_is_logged_for_each_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("ERROR", logger="surefoot")
    script = ScriptedRunner()
    rig = Rig(script=script, runner=FailingRunner(script, Failures({1, 4})))
    requests = [rig.add([1, 2, 3]), rig.add([4, 5, 6])]
    rig.drain()
    errors = [request for request in requests if request.error is not None]
    assert errors
    for request in errors:
        assert request.error is not None
        assert len(reports(caplog, f"request {request.id} failed: {request.error}")) == 1
