"""Steps that are recorded and replayed give the tokens of steps that are run one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from surefoot.backend import make_backend
from surefoot.backend.cpu.recording import StepRecording
from surefoot.backend.operands import RowLayout
from surefoot.backend.protocol import Backend
from surefoot.engine.models import LoadedModel
from surefoot.step import Batch, Step
from surefoot.testing.recorded import RecordedReplay
from surefoot.testing.strategies import pairwise
from tests.lossless.harness import LATENTS, Bench, Case, Counts, Run

FACTORS: dict[str, tuple[object, ...]] = {
    "model": ("qwen3", "sliding", "hybrid", "hybrid experts", LATENTS),
    "drafter": ("none", "ngram", "draft-model", "mtp"),
    "depth": (1, 2, 3, 5),
    "sampling": ("greedy", "top-p", "penalties", "logprobs"),
    "chunk": (3, 256),
    "batch": (1, 3, 5),
    "preempt": ("never", "forced"),
    "poison": ("none", "nan", "garbage"),
    "cache": (True, False),
}


def make_cases(seed: int, at_least: int) -> list[Case]:
    chosen: list[dict[str, Any]] = pairwise(FACTORS, seed=seed, at_least=at_least)
    return [Case(**choice) for choice in chosen if _exists(choice)]


def _exists(choice: dict[str, Any]) -> bool:
    has_head = choice["model"] not in ("qwen3", "sliding")
    return has_head or choice["drafter"] != "mtp"


@dataclass
class RecordedBench(Bench):
    """Models on a backend that records; the plain answers are another bench's."""

    eager: Bench = field(default_factory=lambda: Bench(Path()))
    backends: list[RecordedReplay] = field(default_factory=list)

    def target(self, name: str) -> LoadedModel:
        with patch("surefoot.engine.models.make_backend", self._make):
            return super().target(name)

    def _draft(self, name: str, drift: float, mixed: bool) -> LoadedModel:
        with patch("surefoot.engine.models.make_backend", self._make):
            return super()._draft(name, drift, mixed)

    def _make(self, device: str, bitwise: bool | None, *, emulate: bool) -> Backend:
        self.backends.append(RecordedReplay(make_backend(device, bitwise, emulate=emulate)))
        return self.backends[-1]

    def plain(self, case: Case, prompt: int) -> Any:
        return self.eager.plain(case, prompt)


@pytest.fixture(scope="module")
def recorded(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> RecordedBench:
    return RecordedBench(tmp_path_factory.mktemp("recorded"), eager=bench)


@pytest.mark.parametrize("model", FACTORS["model"])
def test_replayed_steps_give_the_tokens_of_eager_ones(model: str, recorded: RecordedBench) -> None:
    counts = run_all(recorded, model, make_cases(seed=3, at_least=30))
    assert counts.preemptions > 5
    assert min(counts.partial, counts.cached) >= 1
    replays = [r.replays for backend in recorded.backends for r in backend.recordings]
    assert sum(replays) > 100


@pytest.mark.deep
@pytest.mark.parametrize("model", FACTORS["model"])
@pytest.mark.parametrize("seed", range(4))
def test_many_replayed_steps_do(seed: int, model: str, recorded: RecordedBench) -> None:
    run_all(recorded, model, make_cases(seed, at_least=60))


@pytest.mark.parametrize("model", FACTORS["model"])
def test_target_steps_that_are_recorded_as_they_come_do_too(model: str, bench: Bench) -> None:
    """On the CPU, by their very size; those of a target with experts cannot be recorded."""
    with counted_replays() as replays:
        run_all(bench, model, captured(make_cases(seed=5, at_least=30)))
    assert len(replays) > 100 or model in ("hybrid experts", LATENTS)


def test_a_target_step_that_is_not_fed_anew_gives_other_tokens(bench: Bench) -> None:
    fill = Step.fill

    def forgetful(self: Step, batch: Batch) -> None:
        before = batch.positions.clone()
        fill(self, batch)
        batch.positions.copy_(before)

    cases = [replace(case, drafter="none") for case in make_cases(seed=5, at_least=30)]
    with patch.object(Step, "fill", forgetful), pytest.raises(AssertionError):
        run_all(bench, "qwen3", captured(cases))


def captured(cases: Sequence[Case]) -> list[Case]:
    return [replace(case, capture_target=True) for case in cases]


@contextmanager
def counted_replays() -> Iterator[list[StepRecording]]:
    """The recordings that are replayed, one entry each time."""
    replays: list[StepRecording] = []
    replay = StepRecording.replay

    def counted(self: StepRecording, layout: RowLayout) -> None:
        replays.append(self)
        replay(self, layout)

    with patch.object(StepRecording, "replay", counted):
        yield replays


def run_all(bench: Bench, model: str, cases: Sequence[Case]) -> Counts:
    differences: list[str] = []
    counts = Counts()
    for case in cases:
        if case.model == model:
            run = Run(bench, case)
            differences += run.finish()
            counts.add(run.requests)
    assert not differences, "\n".join(differences)
    return counts
