"""A step that fails is tried once more; damaged numbers end the one request that met them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from surefoot.backend.protocol import UNCHOSEN
from surefoot.config import make_config
from surefoot.draft.drafter import DraftRow
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel, load
from surefoot.engine.rows import PlannedRow, RowResult
from surefoot.params import SamplingParams
from surefoot.request import FinishReason, Request
from surefoot.state.lease import Move
from surefoot.state.ledger import Save, Work
from surefoot.testing.drafters import AlwaysWrong, StatelessDrafter
from surefoot.testing.fakes import FailingRunner, Failures
from surefoot.testing.tiny_models import write_tiny_llama
from tests.unit.engine.rig import Rig, ScriptedRunner

DAMAGED = 63
GREEDY = SamplingParams(max_tokens=12, temperature=0)


def failing_rig(at: set[int]) -> tuple[Rig, Failures]:
    """Any call may fail: to prepare, to run or to settle."""
    script, failures = ScriptedRunner(), Failures(at)
    return Rig(script=script, runner=FailingRunner(script, failures)), failures


def test_a_failing_step_is_computed_anew() -> None:
    rig, failures = failing_rig({5})
    requests = [rig.add([1, 2, 3, 4]), rig.add([5, 6, 7, 8])]
    rig.drain()
    assert failures.raised == 1
    assert [list(request.output) for request in requests] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [request.retries for request in requests] == [1, 1]
    assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * 2


def test_what_was_cached_is_what_the_first_start_found() -> None:
    """Started anew, a request finds its own pages; the user's prompt was not cached for that."""
    script = ScriptedRunner()
    rig = Rig(script=script, runner=FailingRunner(script, Failures({20})))
    request = rig.add(range(9))
    rig.drain()
    assert (request.retries, request.cached_tokens) == (1, 0)


def test_a_second_failure_ends_the_request_with_an_error_and_the_engine_lives_on() -> None:
    rig, _ = failing_rig({1, 5, 6})
    request = rig.add([1, 2, 3, 4])
    for _ in range(8):
        rig.step()
    assert rig.reasons(request) == [FinishReason.ERROR]
    assert request.error is not None
    assert "InjectedFailure" in request.error
    rig.check_empty()
    later = rig.add([7, 8])
    rig.drain()
    assert list(later.output) == [7, 8]


def test_a_request_that_comes_later_has_tries_of_its_own() -> None:
    rig, _ = failing_rig({1, 7})
    first = rig.add([1, 2, 3, 4, 5, 6])
    rig.step()
    rig.step()
    second = rig.add([7, 8])
    rig.drain()
    assert first.finish_reason is FinishReason.ERROR
    assert (second.retries, list(second.output)) == (1, [7, 8])


class FailsToSettle(ScriptedRunner):
    """The checkpoints cannot follow the steps with these numbers, counted from 0."""

    def __init__(self, at: set[int]) -> None:
        super().__init__()
        self._at, self._settled = at, 0

    def settle(self, rows: Sequence[PlannedRow]) -> None:
        """See Runner."""
        self._settled += 1
        if self._settled - 1 in self._at:
            raise RuntimeError("planted")


def test_a_step_that_fails_after_the_choice_keeps_what_was_emitted() -> None:
    """The checkpoints of its rows may be wrong, so they are computed anew from published pages."""
    rig = Rig(script=FailsToSettle({3}))
    going_on, ending = rig.add([1, 2, 3, 4, 5, 6]), rig.add([5, 6, 7, 8])
    for _ in range(4):
        rig.step()
    assert list(going_on.output) == [1, 2, 3, 4]
    assert (going_on.retries, going_on.finished) == (1, False)
    # The row that ended with this step has ended, and left nothing behind that is not certain.
    assert (ending.finish_reason, ending.retries) == (FinishReason.LENGTH, 0)
    assert list(ending.output) == [5, 6, 7, 8]
    assert rig.ledger.held_pages == 0
    assert rig.ledger.cached_pages == 1
    rig.drain()
    assert list(going_on.output) == [1, 2, 3, 4, 5, 6]
    assert rig.reasons(going_on) == [FinishReason.LENGTH]


def test_a_second_failure_after_the_choice_ends_the_request_with_an_error() -> None:
    rig = Rig(script=FailsToSettle({0, 1}))
    request = rig.add([1, 2, 3, 4])
    rig.step()
    rig.step()
    assert list(request.output) == [1, 2]
    assert rig.reasons(request) == [FinishReason.ERROR]
    rig.check_empty()


class RecordingRunner(ScriptedRunner):
    """Keeps what it was told to do to the caches."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[Move] = []

    def prepare(self, work: Work) -> None:
        self.moves += work.moves


@pytest.mark.parametrize("call", range(3, 9))
def test_what_a_failed_step_did_not_get_to_save_is_saved_later(call: int) -> None:
    """A resume point counts as taken once its save is recorded, so that must not be lost."""

    def saves(at: set[int]) -> list[Save]:
        script = RecordingRunner()
        rig = Rig(bounded=True, chunk=8, script=script)
        rig.loop._runner = FailingRunner(script, Failures(at))
        rig.add([1, 2, 3], prompt=range(10, 26))
        rig.drain()
        return [move for move in script.moves if isinstance(move, Save)]

    saved = saves(set())
    assert len(saved) >= 2
    assert set(saved) <= set(saves({call}))


def test_a_token_that_cannot_be_chosen_ends_only_its_request() -> None:
    rig = Rig(depth=3)
    broken, whole = rig.add([1, 2, UNCHOSEN, 4]), rig.add([5, 6, 7, 8])
    rig.drain()
    assert list(broken.output) == [1, 2]
    assert rig.reasons(broken) == [FinishReason.ERROR]
    assert broken.error is not None
    assert "not numbers" in broken.error
    assert rig.reasons(whole) == [FinishReason.LENGTH]


def test_an_unchosen_token_behind_a_wrong_draft_harms_nobody() -> None:
    class Spoiled(ScriptedRunner):
        """After a wrong draft nothing can be chosen."""

        def _choose(self, row: PlannedRow) -> RowResult:
            result = super()._choose(row)
            result.chosen[1:] = [UNCHOSEN] * (len(result.chosen) - 1)
            return result

    script = Spoiled()
    wrong = AlwaysWrong(lambda request, count: [1] * count, 256)
    rig = Rig(depth=3, script=script, drafter=wrong)
    request = rig.add([5, 6, 7, 8])
    rig.drain()
    assert list(request.output) == [5, 6, 7, 8]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model whose embedding of one token is not a number."""
    folder: Path = write_tiny_llama(tmp_path_factory.mktemp("damaged"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][DAMAGED] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    return load(str(folder), make_config(device="cpu"))


def engine_on(model: LoadedModel, depth: int, drafter: StatelessDrafter | None = None) -> Engine:
    config = make_config(
        device="cpu",
        drafter="ngram" if depth else "none",
        draft_tokens=depth,
        memory=1 << 21,
        max_model_len=96,
        page_tokens=16,
    )
    return Engine(model, config, drafter=drafter)


def run(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Request]:
    requests = [engine.submit(prompt, GREEDY)[0] for prompt in prompts]
    while not engine.idle:
        engine.step()
    engine.parts.ledger.audit()
    assert engine.usage.held_pages == 0
    return requests


def test_logits_that_are_not_numbers_end_only_the_request_that_met_them(
    damaged: LoadedModel, tiny: LoadedModel
) -> None:
    prompts = [[1, 2, 3], [4, DAMAGED, 6], [7, 8, 9], [1, 2, 3, 4]]
    requests = run(engine_on(damaged, 2), prompts)
    reasons = [request.finish_reason for request in requests]
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR] + [FinishReason.LENGTH] * 2
    alone = [run(engine_on(tiny, 0), [prompt])[0] for prompt in prompts]
    for place in (0, 2, 3):
        assert requests[place].tokens == alone[place].tokens


def test_pages_of_a_request_that_failed_are_not_kept(damaged: LoadedModel) -> None:
    engine = engine_on(damaged, 0)
    prompt = [*range(1, 20), DAMAGED, *range(20, 40)]
    assert run(engine, [prompt])[0].finish_reason is FinishReason.ERROR
    assert engine.usage.cached_pages == 0
    assert run(engine, [prompt[:19]])[0].finish_reason is FinishReason.LENGTH
    assert engine.usage.cached_pages == 1


class DraftsDamaged(StatelessDrafter):
    """Proposes the damaged token, in drafts that become shorter."""

    def __init__(self) -> None:
        self._calls = 0

    def guess(self, row: DraftRow) -> list[int]:
        self._calls += 1
        return [DAMAGED] * max(1, row.limit - self._calls)


def test_drafts_of_a_damaged_token_change_nothing(damaged: LoadedModel) -> None:
    plain = run(engine_on(damaged, 0), [[1, 2, 3], [5, 4, 3, 2]])
    drafted = run(engine_on(damaged, 6, DraftsDamaged()), [[1, 2, 3], [5, 4, 3, 2]])
    assert [request.error for request in drafted] == [None, None]
    assert [request.tokens for request in drafted] == [request.tokens for request in plain]
