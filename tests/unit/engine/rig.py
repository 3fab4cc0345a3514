"""A loop whose model says what the test has written down, and requests for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from surefoot.draft.depth import Depth, FixedDepth
from surefoot.draft.drafter import Drafter
from surefoot.engine.loop import Loop
from surefoot.engine.output import DecodedText, NoText, TextStream
from surefoot.engine.rows import Emission, PlannedRow, RowResult
from surefoot.engine.runner import Runner, StepResult
from surefoot.engine.scheduler import Scheduler, SchedulerLimits
from surefoot.ids import RequestId
from surefoot.params import SamplingParams
from surefoot.request import FinishReason, Request
from surefoot.state.ledger import Ledger, LedgerLimits, Work
from surefoot.testing.drafters import AlwaysRight
from surefoot.testing.tiny_models import END, LEAST_TEXT_VOCAB, SPECIAL, make_byte_tokenizer
from surefoot.text.tokenizer import Tokenizer

END_TOKEN = 256
PROMPT = (80, 81, 82, 83, 84)


def byte_tokenizer() -> Tokenizer:
    """One token per byte; END_TOKEN ends a text."""
    backend = make_byte_tokenizer(LEAST_TEXT_VOCAB)
    return Tokenizer(backend, special_tokens={"eos_token": END}, end_ids=[256 + SPECIAL.index(END)])


class ScriptedRunner:
    """Chooses what is written for each position of each request.

    Attributes:
        steps: the rows of every step that was run.
    """

    def __init__(self) -> None:
        """Start with nothing written."""
        self.answers: dict[RequestId, Sequence[int]] = {}
        self.steps: list[list[PlannedRow]] = []

    def prepare(self, work: Work) -> None:
        """See Runner."""

    def run(self, rows: Sequence[PlannedRow]) -> StepResult:
        """See Runner."""
        self.steps.append(list(rows))
        return StepResult([self._choose(row) for row in rows], torch.empty(0))

    def settle(self, rows: Sequence[PlannedRow]) -> None:
        """See Runner."""

    def forget(self, request: RequestId) -> None:
        """See Runner."""

    def _choose(self, row: PlannedRow) -> RowResult:
        if not row.final:
            return RowResult([])
        begin = row.first + row.count - row.request.prompt_length
        answer = [*self.answers[row.request.id], *[0] * 20]
        return RowResult(list(answer[begin : begin + 1 + len(row.drafts)]))


@dataclass
class Rig:
    """An engine around a ScriptedRunner; drafts are right unless another drafter is given."""

    pages: int = 64
    page_tokens: int = 4
    rows: int = 4
    step_tokens: int = 64
    chunk: int = 16
    depth: int = 0
    drafter: Drafter | None = None
    policy: Depth | None = None
    bounded: bool = False
    prefix_cache: bool = True
    script: ScriptedRunner = field(default_factory=ScriptedRunner)
    runner: Runner | None = None

    def __post_init__(self) -> None:
        """Join the parts."""
        points = 4 if self.bounded else 0
        limits = LedgerLimits(
            self.pages,
            self.rows,
            points,
            self.page_tokens,
            self.bounded,
            prefix_cache=self.prefix_cache,
        )
        self.ledger = Ledger(limits)
        bounds = SchedulerLimits(self.rows, self.step_tokens, self.chunk)
        self.scheduler = Scheduler(self.ledger, bounds)
        drafter = self.drafter or AlwaysRight(self._oracle)
        policy = self.policy or FixedDepth(self.depth)
        runner = self.runner or self.script
        self.loop = Loop(self.ledger, self.scheduler, runner, drafter, policy)
        self.emissions: list[Emission] = []
        self._count = 0

    def add(
        self,
        answer: Sequence[int],
        params: SamplingParams | None = None,
        prompt: Sequence[int] = PROMPT,
        text: bool = False,
    ) -> Request:
        """A request whose chosen tokens will be `answer`; its limit is params.max_tokens."""
        params = params or SamplingParams(max_tokens=len(answer))
        assert params.max_tokens is not None
        self._count += 1
        request = Request(
            id=RequestId(self._count),
            tokens=list(prompt),
            prompt_length=len(prompt),
            params=params,
            seed=0,
            length_limit=len(prompt) + params.max_tokens,
            end_tokens=frozenset({END_TOKEN, *params.stop_token_ids}),
        )
        self.script.answers[request.id] = answer
        stream: TextStream = DecodedText(byte_tokenizer(), params) if text else NoText()
        self.loop.add(request, stream)
        return request

    def step(self) -> list[Emission]:
        """One step, audited."""
        emissions = self.loop.step()
        self.emissions += emissions
        self.ledger.audit()
        return emissions

    def drain(self) -> None:
        """Step until nothing is left; then nothing may be held."""
        for _ in range(2000):
            if self.loop.idle:
                break
            self.step()
        assert self.loop.idle, "no end after 2000 steps"
        self.check_empty()

    def check_empty(self) -> None:
        """All pages and slots have come back."""
        assert self.ledger.held_pages == 0
        assert self.ledger.free_slots == self.rows
        assert self.ledger.free_pages + self.ledger.cached_pages == self.pages

    def text(self, request: Request) -> str:
        """All the text that was emitted for a request."""
        return "".join(e.text for e in self.emissions if e.request is request)

    def reasons(self, request: Request) -> list[FinishReason]:
        """The ends that were emitted for a request: one, or none after an abort."""
        own = [e.reason for e in self.emissions if e.request is request]
        return [reason for reason in own if reason is not None]

    def _oracle(self, request: Request, count: int) -> list[int]:
        begin = request.output_length
        return list(self.script.answers[request.id][begin : begin + count])


def letters(text: str) -> list[int]:
    """The tokens of a text: its bytes."""
    return list(text.encode())
