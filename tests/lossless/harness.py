"""Runs requests under one configuration, and plainly, and says where the two differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from surefoot.config import EngineConfig, make_config
from surefoot.draft.drafter import Drafter
from surefoot.draft.guard import GuardedDrafter
from surefoot.engine.assemble import drafter_caches
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel, load, load_draft
from surefoot.ids import RequestId
from surefoot.params import SamplingParams
from surefoot.request import FinishReason, Request
from surefoot.state.spec import Paged
from surefoot.testing.drafters import make_test_drafter
from surefoot.testing.tiny_dsa import write_tiny_dsa
from surefoot.testing.tiny_hybrids import write_tiny_hybrid
from surefoot.testing.tiny_latents import TinyLatentSizes, write_tiny_latents
from surefoot.testing.tiny_models import write_tiny
from tests.lossless.chosen import CHOSEN
from tests.lossless.poison import poison

VOCAB = 64
CONTEXT = 96
NEW = 24
PREEMPTED_STEPS = (2, 7, 8, 20, 31, 50)
OWN_DRAFTERS = ("none", "ngram", "draft-model", "mtp")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "sliding": "MistralForCausalLM",
}
HYBRIDS = {
    "hybrid": "Qwen3_5ForCausalLM",
    "hybrid experts": "Qwen3_5MoeForCausalLM",
    "hybrid next": "Qwen3NextForCausalLM",
}
LATENTS = "latents"
DIAL = 0.5
"""How much the layers of a hybrid say beside a table that its draft head knows."""
_GENERATOR = torch.Generator().manual_seed(7)
_STEM = torch.randint(1, VOCAB, (44,), generator=_GENERATOR).tolist()
# Several share 40 tokens, some repeat themselves, one is a single token.
PROMPTS: tuple[tuple[int, ...], ...] = (
    (*_STEM[:40], 1, 2),
    (*_STEM[:40], 3),
    (9, 8, 7, 6) * 5,
    (*_STEM[:33], 5, 5, 5, 5, 5),
    (11,),
    (*_STEM, 17, 4),
    (21, 22, 23) * 3,
    tuple(_STEM[:40]),
)
SAMPLING: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=NEW, temperature=0),
    "top-p": SamplingParams(max_tokens=NEW, temperature=0.9, top_p=0.9, top_k=20, seed=1),
    "penalties": SamplingParams(
        max_tokens=NEW,
        temperature=0.8,
        presence_penalty=1.0,
        frequency_penalty=0.8,
        repetition_penalty=1.5,
        min_p=0.05,
        logit_bias={3: 1.5, 7: -2.0},
        seed=2,
    ),
    "stops": SamplingParams(
        max_tokens=NEW,
        temperature=1.0,
        min_tokens=5,
        stop_token_ids=(3, 13, 22, 31, 42, 45),
        seed=3,
    ),
    "stop at the limit": SamplingParams(
        max_tokens=6, temperature=0, stop_token_ids=tuple(range(0, VOCAB, 2)), min_tokens=5
    ),
    "logprobs": SamplingParams(
        max_tokens=NEW, temperature=0.7, logprobs=3, prompt_logprobs=2, seed=4
    ),
}


@dataclass(frozen=True)
class Case:
    """One configuration of the matrix."""

    model: str
    drafter: str
    depth: int
    page: int = 16
    chunk: int = 256
    cache: bool = True
    batch: int = 3
    preempt: str = "never"
    sampling: str = "greedy"
    poison: str = "none"
    capture_target: bool | None = None

    @property
    def speculation(self) -> str:
        """The part of the config that says who drafts."""
        return self.drafter if self.drafter in OWN_DRAFTERS else "ngram"


@dataclass(frozen=True)
class Answer:
    """What one request brought."""

    tokens: tuple[int, ...]
    reason: FinishReason | None
    logprobs: tuple[Mapping[int, float], ...]
    prompt_logprobs: tuple[Mapping[int, float] | None, ...]


_PARTS = ("tokens", "reason", "logprobs", "prompt_logprobs")


@dataclass
class Counts:
    """How much was exercised: tokens drafted and accepted; requests with some drafts kept and some
    not, and with a cached prefix; pre-emptions.
    """

    drafted: int = 0
    accepted: int = 0
    partial: int = 0
    cached: int = 0
    preemptions: int = 0

    def add(self, requests: Sequence[Request]) -> None:
        """Add what requests say of themselves."""
        for request in requests:
            counts = request.speculation
            self.drafted += counts.drafted
            self.accepted += counts.accepted
            self.partial += 0 < counts.accepted < counts.drafted
            self.cached += request.cached_tokens > 0
            self.preemptions += request.preemptions


@dataclass
class Bench:
    """Tiny models, loaded once, and the plain answers, computed once.

    Attributes:
        folder: where their checkpoints are written.
        device: settings that say where they run.
    """

    folder: Path
    device: Mapping[str, object] = field(default_factory=lambda: {"device": "cpu"})
    _models: dict[str, LoadedModel] = field(default_factory=dict)
    _drafts: dict[str, LoadedModel] = field(default_factory=dict)
    _answers: dict[tuple[str, str, int, int], Answer] = field(default_factory=dict)

    def target(self, name: str) -> LoadedModel:
        """The model called `name`; the sliding one sees a window of 8 in every second layer."""
        if name not in self._models:
            path = self._write(name, self.folder / name, drift=0.0, mixed=True)
            self._models[name] = load(str(path), make_config(**self.device))
        return self._models[name]

    @staticmethod
    def _write(name: str, folder: Path, drift: float, mixed: bool) -> Path:
        if name == LATENTS:
            return write_tiny_latents(folder, TinyLatentSizes(drift=drift), dial=DIAL)
        if name in CHOSEN:
            return write_tiny_dsa(folder, replace(CHOSEN[name], drift=drift), dial=DIAL)
        if name in HYBRIDS:
            return write_tiny_hybrid(
                folder, HYBRIDS[name], dial=DIAL, layers=2, interval=2, drift=drift
            )
        return write_tiny(folder, ARCHITECTURES[name], mixed=mixed, drift=drift)

    def draft(self, name: str) -> LoadedModel:
        """Its draft model: the same weights with some drift, a window in every layer."""
        return self._draft(name, drift=0.08, mixed=False)

    def equal_draft(self, name: str) -> LoadedModel:
        """A draft model that is the target itself."""
        return self._draft(name, drift=0.0, mixed=True)

    def _draft(self, name: str, drift: float, mixed: bool) -> LoadedModel:
        title = f"{name}-draft-{drift}"
        if title not in self._drafts:
            path = self._write(name, self.folder / title, drift, mixed)
            given = {**self.device, "drafter": "draft-model", "draft_model": str(path)}
            config = make_config(**given)
            self._drafts[title] = load_draft(self.target(name), config)
        return self._drafts[title]

    def plain(self, case: Case, prompt: int) -> Answer:
        """What the prompt gives alone, in one chunk, without cache or speculation.

        Attention adds up page by page, so the last bits belong to a page size.
        """
        key = (case.model, case.sampling, case.page, prompt)
        if key not in self._answers:
            params = params_of(case.sampling, prompt)
            self._answers[key] = self.alone(case, PROMPTS[prompt], params)
        return self._answers[key]

    def alone(self, case: Case, prompt: Sequence[int], params: SamplingParams) -> Answer:
        """What any prompt gives in an engine of its own."""
        config = make_config(
            device="cpu",
            drafter="none",
            prefix_cache=False,
            capture=False,
            page_tokens=case.page,
            max_rows=1,
            memory=1 << 22,
            max_model_len=CONTEXT,
        )
        engine = Engine(self.target(case.model), config)
        [request] = engine.submit(prompt, params)
        drain(engine)
        return answer_of(request)


class Run:
    """One case on its way."""

    def __init__(self, bench: Bench, case: Case) -> None:
        """Assemble the engine of the case."""
        self.bench, self.case = bench, case
        self._known: dict[RequestId, tuple[int, ...]] = {}
        draft = bench.draft(case.model) if case.drafter == "draft-model" else None
        self.engine = Engine(bench.target(case.model), self._config(), draft, self._drafter())
        self.requests: list[Request] = []

    def _config(self) -> EngineConfig:
        case = self.case
        drafts_by_model = case.drafter == "draft-model"
        return make_config(
            device="cpu",
            drafter=case.speculation,
            draft_model=self.bench.draft(case.model).name if drafts_by_model else None,
            draft_tokens=case.depth,
            page_tokens=case.page,
            prefill_chunk=case.chunk,
            prefix_cache=case.cache,
            max_rows=case.batch,
            max_step_tokens=64,
            max_model_len=CONTEXT,
            memory=self._memory(),
            points=4 * case.batch,
            capture_target=case.capture_target,
        )

    def _memory(self) -> int:
        """Enough for all requests at once, or hardly more than one needs."""
        case, bench = self.case, self.bench
        target = bench.target(case.model)
        draft = bench.draft(case.model) if case.drafter == "draft-model" else None
        config = make_config(device="cpu", page_tokens=case.page)
        specs = [
            *target.model.description.caches,
            *drafter_caches(case.drafter, config, target, draft),
        ]
        longest = -(-CONTEXT // case.page)
        pages = longest + 3 if case.preempt == "scarce" else longest * 2 * case.batch
        memory = 0
        for spec in specs:
            if isinstance(spec, Paged):
                memory += (1 + pages) * spec.page_bytes(case.page)
            else:
                memory += (case.batch + 1) * spec.slot_bytes(case.depth)
                memory += 4 * case.batch * spec.point_bytes
        return memory

    def _drafter(self) -> Drafter | None:
        if self.case.drafter in OWN_DRAFTERS:
            return None
        return make_test_drafter(self.case.drafter, self._guess, VOCAB, seed=5)

    def foretell(self, request: Request, tokens: Sequence[int]) -> None:
        """Tell the test drafters what a request will emit."""
        self._known[request.id] = tuple(tokens)

    def _guess(self, request: Request, count: int) -> list[int]:
        begin = request.output_length
        return list(self._known[request.id][begin : begin + count])

    def finish(self) -> list[str]:
        """Run all requests and say where they differ from the plain answers."""
        case = self.case
        prompts = list(range(max(3, case.batch)))
        self._submit(prompts[0])
        for _ in range(4):
            self._step(0)
        for prompt in prompts[1:]:
            self._submit(prompt)
        number = 0
        while not self.engine.idle:
            number += 1
            self._step(number)
        self.engine.parts.ledger.audit()
        assert self.engine.usage.held_pages == 0, "pages are held after the last request"
        again = [request.id for request in self.requests if request.retries and not request.error]
        assert not again, f"{case}: a step failed, and requests {again} were right the second time"
        guard = self.engine.parts.drafter
        if isinstance(guard, GuardedDrafter) and case.drafter != "raising":
            assert guard.failures == 0, f"{case}: the drafter failed"
        return [
            self._difference(request, prompt)
            for prompt, request in zip(prompts, self.requests, strict=True)
            if answer_of(request) != self._plain(prompt)
        ]

    def _plain(self, prompt: int) -> Answer:
        return self.bench.plain(self.case, prompt)

    def _submit(self, prompt: int) -> None:
        params = params_of(self.case.sampling, prompt)
        known = self._plain(prompt).tokens
        [request] = self.engine.submit(PROMPTS[prompt], params)
        self.foretell(request, known)
        self.requests.append(request)

    def _step(self, number: int) -> None:
        assert number < 2000, f"{self.case} comes to no end"
        if self.case.preempt == "forced" and number in PREEMPTED_STEPS:
            self.engine.parts.scheduler.preempt_all()
        if self.case.poison != "none":
            poison(self.engine, self.case.poison)
        self.engine.step()

    def _difference(self, request: Request, prompt: int) -> str:
        plain, own = self._plain(prompt), answer_of(request)
        what = [name for name in _PARTS if getattr(own, name) != getattr(plain, name)]
        return (
            f"{self.case}, prompt {prompt}: {', '.join(what)} differ, error {request.error!r}\n"
            f"  {own.tokens} {own.reason}\n  {plain.tokens} {plain.reason} plain"
        )

    @cached_property
    def counts(self) -> Counts:
        """What was exercised."""
        counts = Counts()
        counts.add(self.requests)
        return counts


def params_of(sampling: str, prompt: int) -> SamplingParams:
    """The sampling called `sampling`, with a seed for the prompt."""
    params = SAMPLING[sampling]
    return params if params.seed is None else replace(params, seed=params.seed + 10 * prompt)


def answer_of(request: Request) -> Answer:
    """All that a caller sees of a request."""
    return Answer(
        tuple(request.output),
        request.finish_reason,
        tuple(request.logprobs),
        tuple(request.prompt_logprobs),
    )


def next_turns(bench: Bench, case: Case) -> list[str]:
    """Continue every beginning of an answer, with all of it in the prefix cache.

    Returns:
        The follow-up prompts whose answers are not those of a run alone.
    """
    params = SAMPLING["greedy"]
    prompt = PROMPTS[2]
    whole = bench.plain(replace(case, sampling="greedy"), 2).tokens
    differences = []
    for length in range(1, len(whole) + 1):
        run = Run(bench, case)
        [first] = run.engine.submit(prompt, replace(params, max_tokens=length))
        run.foretell(first, whole)
        drain(run.engine)
        follow = [*prompt, *whole[:length], 1, 2]
        [second] = run.engine.submit(follow, replace(params, max_tokens=4))
        expected = bench.alone(case, follow, second.params)
        run.foretell(second, expected.tokens)
        drain(run.engine)
        assert case.page > len(prompt) or second.cached_tokens > 0, "nothing was cached"
        if answer_of(second) != expected:
            differences.append(f"{case}, {length} tokens of answer, {second.tokens}")
    return differences


def drain(engine: Engine) -> None:
    """Step until nothing is left."""
    while not engine.idle:
        engine.step()
