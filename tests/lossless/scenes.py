"""Short plays on the emulated NPU: a few requests on captured steps, and what differs in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch

from surefoot.backend.ascend.places import Places
from surefoot.backend.operands import RowLayout
from surefoot.config import make_config
from surefoot.engine.engine import Engine
from surefoot.engine.rows import PlannedRow
from surefoot.engine.runner import ModelRunner
from surefoot.ids import SINK_SLOT
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.testing.drafters import make_test_drafter
from tests.lossless.harness import CONTEXT, PROMPTS, VOCAB, Answer, Bench, Case, answer_of
from tests.lossless.poison import poison

Fault = AbstractContextManager[object]
"""Something planted while it is open."""

PACKED = "packed"
PAGE = 16
BEGINNINGS = tuple(PROMPTS[0][:length] for length in (13, 9, 7, 5))


@dataclass(frozen=True)
class Scene:
    """Requests that start together, on captured steps.

    Attributes:
        model: its name; PACKED is "qwen3" with heads for the packed form of attention.
        lengths: new tokens of each request.
        drafter: who drafts up to three tokens; "random" is right up to a random place.
        rows: most of a step.
        follow: whether other turns of the first request come behind.
        capture: whether steps are captured.
    """

    model: str
    lengths: tuple[int, ...] = (14, 10)
    drafter: str = "random"
    rows: int = 2
    follow: bool = False
    capture: bool = True


@dataclass
class Stage:
    """Where scenes are played.

    Attributes:
        small: models of any size.
        legal: models whose sizes the operators were made for.
    """

    small: Bench
    legal: Bench
    _plain: dict[tuple[str, Sequence[int], int], Answer] = field(default_factory=dict)

    def plain(self, scene: Scene) -> list[Answer]:
        """What each request gives alone, uncaptured and without drafts."""
        asked = zip(BEGINNINGS, scene.lengths, strict=False)
        answers = [self._alone(scene.model, prompt, length) for prompt, length in asked]
        turns = later_turns(answers[0]) if scene.follow else []
        return answers + [self._alone(scene.model, prompt, 6) for prompt in turns]

    def _alone(self, model: str, prompt: tuple[int, ...], length: int) -> Answer:
        key = (model, prompt, length)
        if key not in self._plain:
            bench, name = self._bench(model)
            case = Case(name, "none", 0)
            self._plain[key] = bench.alone(case, prompt, greedy(length))
        return self._plain[key]

    def _bench(self, model: str) -> tuple[Bench, str]:
        return (self.legal, "qwen3") if model == PACKED else (self.small, model)

    def play(self, scene: Scene) -> list[Request]:
        """The scene's requests, when they have ended."""
        plain, known = self.plain(scene), dict[int, Answer]()

        def foretold(request: Request, count: int) -> list[int]:
            begin = request.output_length
            return list(known[request.id].tokens[begin : begin + count])

        engine, requests = self._engine(scene, foretold), []

        def submit(prompt: Sequence[int], answer: Answer) -> None:
            [request] = engine.submit(prompt, greedy(len(answer.tokens)))
            known[request.id] = answer
            requests.append(request)

        for prompt, answer in zip(BEGINNINGS, plain[: len(scene.lengths)], strict=False):
            submit(prompt, answer)
        finish(engine)
        later = plain[len(scene.lengths) :]
        for prompt, answer in zip(later_turns(plain[0]), later, strict=False):
            # What a slot is restored to is seen only if it did not hold the same before.
            poison(engine, "nan")
            submit(prompt, answer)
            finish(engine)
        engine.close()
        return requests

    def _engine(self, scene: Scene, oracle: Callable[[Request, int], list[int]]) -> Engine:
        bench, name = self._bench(scene.model)
        config = make_config(
            **bench.device,
            drafter="ngram",
            draft_tokens=3,
            page_tokens=PAGE,
            max_rows=scene.rows,
            max_model_len=CONTEXT,
            memory=1 << 22,
            capture=scene.capture,
        )
        drafter = make_test_drafter(scene.drafter, oracle, VOCAB, seed=5)
        return Engine(bench.target(name), config, None, drafter)

    def found(self, scene: Scene, fault: Fault) -> list[str]:
        """What of each request the fault is noticed by: its error, "tokens", or "" for nothing."""
        plain = self.plain(scene)
        with fault:
            requests = self.play(scene)
        return [
            "" if answer_of(request) == answer else request.error or "tokens"
            for request, answer in zip(requests, plain, strict=True)
        ]


def greedy(length: int) -> SamplingParams:
    return SamplingParams(max_tokens=length, temperature=0)


def later_turns(answer: Answer) -> list[tuple[int, ...]]:
    """Prompts that go on behind the first page of the first request and its answer."""
    page = (*BEGINNINGS[0], *answer.tokens)[:PAGE]
    return [(*page, 1), (*page, 2), (*page, 3, 4)]


def finish(engine: Engine) -> None:
    for _ in range(200):
        if engine.idle:
            return
        engine.step()
    raise AssertionError("the requests come to no end")


# How faults are planted.


def live_rows(layout: RowLayout) -> int:
    """How many rows of a step are not padding."""
    return sum(slot != SINK_SLOT for slot in layout.slots)


Change = Callable[[Places, RowLayout], None]


def moved(change: Change, before: Change = lambda places, layout: None) -> Fault:
    """Places that move wrongly: each step they are changed before and after it."""
    move = Places.move

    def faulty(self: Places, layout: RowLayout) -> None:
        before(self, layout)
        move(self, layout)
        change(self, layout)

    return patch.object(Places, "move", faulty)


def rejected(row: PlannedRow) -> int:
    """Drafts of a row that were just turned down."""
    return row.first + row.count + len(row.drafts) - row.lease.computed


def settled_with(act: Callable[[ModelRunner, PlannedRow], None]) -> Fault:
    """A runner that does something for each row whose drafts were decided."""
    settle = ModelRunner.settle

    @torch.inference_mode()
    def faulty(self: ModelRunner, rows: Sequence[PlannedRow]) -> None:
        settle(self, rows)
        for row in rows:
            act(self, row)

    return patch.object(ModelRunner, "settle", faulty)
