"""A loaded model as commands use it: `LLM` gathers the results, and each step can be watched.

Loads torch, so commands import this module when they run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from surefoot.cli.asks import Ask
from surefoot.cli.options import without_drafter
from surefoot.cli.show import Screen
from surefoot.config import EngineConfig
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel, load, load_draft
from surefoot.engine.rows import Emission
from surefoot.llm import LLM, Prompt
from surefoot.params import SamplingParams
from surefoot.results import Result

Watch = Callable[[Sequence[Emission]], None]

_WARM_TOKENS = 8


def ignore(_emissions: Sequence[Emission]) -> None:
    """A watch that sees nothing."""


class WatchedEngine(Engine):
    """An engine that shows the emissions of each step before it hands them out.

    Attributes:
        watch: called between two steps, also when there was nothing to emit; what it raises ends
            the run at a moment when everything is in order.
    """

    def __init__(
        self, target: LoadedModel, config: EngineConfig, draft: LoadedModel | None = None
    ) -> None:
        """Assemble an engine on loaded models; raises as `Engine` does."""
        super().__init__(target, config, draft)
        self.watch: Watch = ignore

    def step(self) -> list[Emission]:
        """See Engine."""
        emissions = super().step()
        self.watch(emissions)
        return emissions


@dataclass(frozen=True)
class Job:
    """A prompt in the form that the engine takes, and how to continue it."""

    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class Run:
    """What came of several jobs together.

    Attributes:
        results: one for each job, in order.
        tokens_per_s: new tokens after the first step that emitted any, per second; 0 if none.
    """

    results: list[Result]
    tokens_per_s: float

    @property
    def token_ids(self) -> list[list[tuple[int, ...]]]:
        """New tokens of every sample of every job."""
        return [[output.token_ids for output in result.outputs] for result in self.results]


class Session:
    """One engine and its front door."""

    def __init__(self, engine: WatchedEngine) -> None:
        """Drive `engine`; it is closed by whoever opened it."""
        self.engine = engine
        self.llm = LLM.on(engine)

    @property
    def drafter(self) -> str:
        """Who guesses ahead."""
        return self.engine.parts.drafter.name

    def job(self, ask: Ask, defaults: SamplingParams, options: dict[str, object]) -> Job:
        """What the engine is to do for one ask.

        Args:
            ask: a prompt or a conversation.
            defaults: sampling values that the ask does not name.
            options: further variables for the chat template.

        Raises:
            SettingError: a sampling value is out of range.
            TokenizerError: a conversation for a model without chat template.
        """
        prompt = self.llm.render_chat(ask.messages, options) if ask.messages else ask.prompt
        return Job(prompt, ask.params(defaults))

    def run(self, jobs: Sequence[Job], watch: Watch = ignore) -> Run:
        """Do all jobs; `watch` sees each step's emissions.

        Raises:
            PromptError: a prompt that cannot be served.
            SettingError: sampling values that do not suit the model.
        """
        meter = _Meter()

        def observe(emissions: Sequence[Emission]) -> None:
            meter.take(emissions)
            watch(emissions)

        self.engine.watch = observe
        try:
            prompts = [job.prompt for job in jobs]
            results = self.llm.generate(prompts, [job.params for job in jobs])
        finally:
            self.engine.watch = ignore
        return Run(results, meter.tokens_per_s)

    def warm_up(self) -> None:
        """Run a few steps, drafts included, so that later ones are not the first."""
        longest = self.engine.parts.max_model_len
        vocab = self.engine.target.model.description.vocab_size
        prompt = [token % vocab for token in (1, 2, 3)] * (_WARM_TOKENS // 2)
        params = SamplingParams(max_tokens=_WARM_TOKENS, temperature=0, ignore_eos=True)
        self.llm.generate([prompt[: max(1, longest - _WARM_TOKENS)]], params)


@contextmanager
def opened(model: str, config: EngineConfig, screen: Screen) -> Iterator[Session]:
    """Load a model and its draft model, if there is one, and give them back in the end.

    Raises:
        SettingError: the model cannot be loaded, or the settings do not suit it.
    """
    with screen.loading(f"loading {model}") as progress:
        target = load(model, config, progress)
        draft = load_draft(target, config, progress) if config.draft_model is not None else None
        engine = WatchedEngine(target, config, draft)
    try:
        yield Session(engine)
    finally:
        engine.close()


@contextmanager
def opened_plain(session: Session) -> Iterator[Session]:
    """A second engine on the same model that computes one token after the other."""
    engine = WatchedEngine(session.engine.target, without_drafter(session.engine.config))
    try:
        yield Session(engine)
    finally:
        engine.close()


class _Meter:
    """Counts new tokens from the first step that emitted any to the last."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0
        self._tokens = 0

    def take(self, emissions: Sequence[Emission]) -> None:
        count = sum(len(emission.token_ids) for emission in emissions)
        if not count:
            return
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last
        else:
            self._tokens += count

    @property
    def tokens_per_s(self) -> float:
        seconds = self._last - (self._first or 0.0)
        return self._tokens / seconds if self._tokens and seconds > 0 else 0.0
