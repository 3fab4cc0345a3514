"""The offline front door: `LLM(model).generate(prompts)`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from surefoot.config import EngineConfig, make_config
from surefoot.engine.engine import Engine
from surefoot.engine.models import Progress, silent
from surefoot.engine.rows import Emission
from surefoot.errors import PromptError, SettingError, TokenizerError
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.results import Completion, Piece, Result, Speculation, Timing
from surefoot.text.messages import Message

Prompt = str | Sequence[int]

_DEFAULTS_FROM_MODEL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class _Collector:
    """Gathers the emissions of one prompt."""

    def __init__(self, prompt: Prompt, requests: list[Request], now: float) -> None:
        self.prompt = prompt
        self.requests = requests
        self.texts = ["" for _ in requests]
        self.pieces: list[Piece] = []
        self.open = len(requests)
        self.begun = now
        self.first = 0.0
        self.first_tokens = 0
        self.last = now

    def take(self, emission: Emission, now: float) -> None:
        """One more emission of one of the samples."""
        index = self.requests.index(emission.request)
        self.texts[index] += emission.text
        reason = None if emission.reason is None else emission.reason.value
        self.pieces.append(Piece(index, emission.text, tuple(emission.token_ids), reason))
        self.open -= reason is not None
        self.last = now
        if not self.first:
            self.first, self.first_tokens = now, len(emission.token_ids)

    def result(self, drafter: str) -> Result:
        """All of it, once every sample has ended."""
        first = self.requests[0]
        return Result(
            prompt=self.prompt if isinstance(self.prompt, str) else None,
            prompt_token_ids=tuple(first.tokens[: first.prompt_length]),
            prompt_logprobs=_prompt_logprobs(first),
            outputs=tuple(map(_completion, range(len(self.requests)), self.requests, self.texts)),
            cached_tokens=first.cached_tokens,
            speculation=Speculation.total(drafter, self.requests),
            timing=self._timing(),
        )

    def _timing(self) -> Timing:
        later = sum(request.output_length for request in self.requests) - self.first_tokens
        seconds = self.last - self.first
        return Timing(self.first - self.begun, later / seconds if seconds > 0 else 0.0)


class Stream(Iterator[Piece]):
    """The pieces of one completion, as they come. `close()` ends it early."""

    def __init__(self, llm: LLM, collector: _Collector) -> None:
        self._llm = llm
        self._collector = collector

    def __next__(self) -> Piece:
        """The next piece; steps the engine until there is one."""
        collector = self._collector
        while not collector.pieces:
            if not collector.open:
                raise StopIteration
            self._llm._advance(None)
        return collector.pieces.pop(0)

    def close(self) -> None:
        """End the request if it still runs. May be called again."""
        self._collector.pieces.clear()
        self._collector.open = 0
        self._llm._drop(self._collector)

    def __del__(self) -> None:
        self.close()


class LLM:
    """A model, ready to continue text. Use it as a context manager or call `close()`.

    One thread uses it at a time. Settings are those of `EngineConfig`, under the same names.

    Example:
        with LLM("smollm2", drafter="ngram") as llm:
            print(llm.generate("The capital of France is")[0].outputs[0].text)
    """

    def __init__(self, model: str, *, progress: Progress = silent, **settings: object) -> None:
        """Load `model` (a folder, a .gguf file, a hub id or a packaged name) and plan its memory.

        Args:
            model: what to load.
            progress: called with a line of text while files are fetched and read.
            settings: fields of `EngineConfig`, or their spellings in other engines.

        Raises:
            SettingError: a ValueError that names the setting at fault; ModelError is one.
        """
        self._start(Engine.open(model, make_config(**settings), progress))

    @classmethod
    def on(cls, engine: Engine) -> Self:
        """Drive an engine that was assembled elsewhere."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: Engine) -> None:
        self.engine = engine
        self._collectors: dict[Request, _Collector] = {}

    @property
    def config(self) -> EngineConfig:
        """The settings in force."""
        return self.engine.config

    def default_params(self) -> SamplingParams:
        """The model's own sampling defaults (generation_config.json), else greedy."""
        stored = self.engine.target.generation
        chosen = {
            name: stored[name]
            for name in _DEFAULTS_FROM_MODEL
            if isinstance(stored.get(name), int | float)
        }
        if stored.get("do_sample") is False or "temperature" not in chosen:
            chosen["temperature"] = 0.0
        return replace(SamplingParams(), **chosen)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> list[Result]:
        """Continue each prompt; results come in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            params: for all prompts, or one for each; None takes the model's defaults.
            on_token: called with the number of new tokens after each step, for progress bars.

        Raises:
            PromptError: a prompt that cannot be served; nothing of this call goes on.
            SettingError: sampling values that do not suit the model.
        """
        listed = _listed(prompts)
        collectors: list[_Collector] = []
        try:
            for prompt, wanted in zip(listed, self._params_for(listed, params), strict=True):
                self._make_room(wanted.n, on_token)
                collectors.append(self._submit(prompt, wanted))
            while any(collector.open for collector in collectors):
                self._advance(on_token)
        except BaseException:
            for collector in collectors:
                self._drop(collector)
            raise
        return [collector.result(self.engine.parts.drafter.name) for collector in collectors]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        template_options: Mapping[str, object] | None = None,
    ) -> list[Result]:
        """Answer a conversation, or several, through the model's chat template.

        Args:
            messages: [{"role": ..., "content": ...}, ...], or a list of such lists.
            params: as for `generate`.
            template_options: further variables for the template.

        Raises:
            TokenizerError: the model has no chat template.
            PromptError: the template refuses the messages.
        """
        many = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        prompts = [self.render_chat(one, template_options or {}) for one in many]  # type: ignore[arg-type]
        return self.generate(prompts, params)

    def render_chat(self, messages: Sequence[Message], options: Mapping[str, object]) -> list[int]:
        """Token ids of a conversation, ready for the answer."""
        target = self.engine.target
        if target.tokenizer is None or target.chat_format is None:
            raise TokenizerError(f"{target.name!r} has no chat template; use generate")
        if "messages" in options:
            raise SettingError("template_options", "cannot replace 'messages', which is given")
        opens = options.get("add_generation_prompt", True) is True
        text = target.chat_format.render(messages, options, add_generation_prompt=opens)
        return target.tokenizer.encode(text, add_special=False)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Continue one prompt and hand out each step's piece at once.

        Closing the stream, or forgetting it, ends the request.
        """
        return Stream(self, self._submit(prompt, params or self.default_params()))

    def close(self) -> None:
        """Give the memory back. May be called again."""
        self._collectors.clear()
        self.engine.close()

    def __enter__(self) -> Self:
        """Nothing more to do: the model is loaded."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _submit(self, prompt: Prompt, params: SamplingParams) -> _Collector:
        requests = self.engine.submit(prompt, params)
        collector = _Collector(prompt, requests, time.perf_counter())
        for request in requests:
            self._collectors[request] = collector
        return collector

    def _make_room(self, count: int, on_token: Callable[[int], None] | None) -> None:
        """Work off the line until `count` more requests may wait."""
        while self.engine.usage.waiting + count > self.config.max_waiting and not self.engine.idle:
            self._advance(on_token)

    def _advance(self, on_token: Callable[[int], None] | None) -> None:
        emissions = self.engine.step()
        now = time.perf_counter()
        for emission in emissions:
            collector = self._collectors.get(emission.request)
            if collector is not None:
                collector.take(emission, now)
            if emission.reason is not None:
                self._collectors.pop(emission.request, None)
        if on_token is not None:
            on_token(sum(len(emission.token_ids) for emission in emissions))

    def _drop(self, collector: _Collector) -> None:
        """Abort what is left of a prompt."""
        for request in collector.requests:
            if self._collectors.pop(request, None) is not None:
                self.engine.abort(request)

    def _params_for(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            return [self.default_params()] * len(prompts)
        if isinstance(params, SamplingParams):
            return [params] * len(prompts)
        if len(params) != len(prompts):
            raise SettingError(
                "params", f"{len(params)} for {len(prompts)} prompts; give one or one for each"
            )
        return list(params)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list.

    Raises:
        PromptError: neither text, nor token ids, nor a list of them.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise PromptError(f"must be text, token ids or a list of them, not {prompts!r}")
    if not prompts:
        raise PromptError("is empty; give at least one token")
    listed: list[Prompt] = [item for item in prompts if isinstance(item, Sequence)]
    if len(listed) == len(prompts):
        return listed
    if listed:
        raise PromptError("mixes token ids and prompts; give a list of one kind")
    # Whatever else stands in the list is refused, by name, as a token id.
    return [prompts]  # type: ignore[list-item]


def _completion(index: int, request: Request, text: str) -> Completion:
    assert request.finish_reason is not None, "only ended requests become results"
    return Completion(
        index=index,
        text=text,
        token_ids=tuple(request.output),
        finish_reason=request.finish_reason.value,
        logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
        error=request.error,
    )


def _prompt_logprobs(request: Request) -> tuple[dict[int, float] | None, ...] | None:
    if request.params.prompt_logprobs is None:
        return None
    return (None, *request.prompt_logprobs)


__all__ = ["LLM", "Completion", "Piece", "Result", "SamplingParams"]
