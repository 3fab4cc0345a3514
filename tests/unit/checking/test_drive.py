import pytest

from surefoot.checking.cases import Case
from surefoot.checking.drive import Tally, drive
from surefoot.config import make_config
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel
from surefoot.engine.rows import Emission
from surefoot.errors import PromptError
from surefoot.ids import RequestId
from surefoot.params import SamplingParams
from surefoot.request import Request

PARAMS = SamplingParams(max_tokens=12, temperature=0)


def case(pressure: str = "calm") -> Case:
    return Case(1, 0, 0, "ngram", 3, "greedy", 2, True, 4, pressure)


def engine_of(target: LoadedModel) -> Engine:
    return Engine(target, make_config(page_tokens=4, max_model_len=64, draft_tokens=3, max_rows=2))


def submit(engine: Engine, count: int = 3) -> list[Request]:
    return [engine.submit([5, 6, 7] * 3 + [at], PARAMS)[0] for at in range(count)]


def ignore(tokens: int) -> None:
    pass


def test_a_calm_case_runs_to_its_end(target: LoadedModel) -> None:
    engine = engine_of(target)
    requests = submit(engine)
    brought: list[int] = []
    tally = drive(engine, case(), requests, brought.append)
    assert tally.fault is None
    assert engine.idle
    assert sum(brought) == 36
    assert not any(request.preemptions for request in requests)


def test_forced_preemption_comes_at_the_same_steps_each_time(target: LoadedModel) -> None:
    counts = []
    for _ in range(2):
        engine = engine_of(target)
        requests = submit(engine)
        assert drive(engine, case("forced"), requests, ignore).fault is None
        counts.append([request.preemptions for request in requests])
    assert counts[0] == counts[1]
    assert 0 < max(counts[0]) <= 2


def test_partial_accepts_are_counted_row_by_row() -> None:
    one, other = (Request(RequestId(at), [1], 1, PARAMS, seed=0, length_limit=9) for at in range(2))
    tally = Tally()
    for drafted, accepted in ((4, 0), (4, 4), (4, 2), (0, 0), (1, 1)):
        one.speculation.record(drafted, accepted)
        other.speculation.record(3, 1)
        tally.look([one, other])
    assert tally.partial_accepts == 1 + 5
    assert tally.steps == 5


def test_a_page_that_nobody_gave_back_is_a_fault(target: LoadedModel) -> None:
    engine = engine_of(target)
    assert engine.parts.ledger.admit([1, 2, 3], 3) is not None
    tally = drive(engine, case(), submit(engine), ignore)
    assert tally.fault is not None
    assert tally.fault.startswith("1 pages are held though nobody runs")


def test_an_engine_that_never_ends_is_a_fault(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(target)
    requests = submit(engine)

    def idle_step() -> list[Emission]:
        return []

    monkeypatch.setattr(engine, "step", idle_step)
    tally = drive(engine, case(), requests, ignore)
    assert tally.fault is not None
    assert tally.fault.startswith("not done after ")


def test_a_broken_engine_is_a_fault_and_a_user_error_is_none(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", logger="surefoot")
    engine = engine_of(target)
    requests = submit(engine)

    def failing(error: Exception) -> None:
        def step() -> list[Emission]:
            raise error

        monkeypatch.setattr(engine, "step", step)

    failing(AssertionError("books do not add up"))
    assert drive(engine, case(), requests, ignore).fault == "AssertionError: books do not add up"
    failing(PromptError("is empty"))
    with pytest.raises(PromptError):
        drive(engine, case(), requests, ignore)
