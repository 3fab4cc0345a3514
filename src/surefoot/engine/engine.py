"""The engine as its front doors see it: requests go in, emissions come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.config import EngineConfig
from surefoot.draft.drafter import Drafter
from surefoot.engine.assemble import Assembly, assemble
from surefoot.engine.models import LoadedModel, Progress, load, load_draft, silent
from surefoot.engine.output import DecodedText, NoText, TextStream
from surefoot.engine.rows import Emission
from surefoot.errors import EngineClosedError, PromptError, SettingError
from surefoot.ids import RequestId
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.sample.processors import check_vocabulary
from surefoot.sample.seeds import derive_seed, fresh_seed
from surefoot.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Usage:
    """How full the engine is.

    Attributes:
        running: requests that hold pages.
        waiting: requests that hold nothing yet.
        free_pages: pages that hold nothing.
        cached_pages: pages of the prefix cache that nobody holds.
        held_pages: pages of running requests.
    """

    running: int
    waiting: int
    free_pages: int
    cached_pages: int
    held_pages: int


class Engine:
    """Serves many requests at once on one model. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        target: LoadedModel,
        config: EngineConfig,
        draft: LoadedModel | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """Assemble an engine on models that are already loaded; several engines may share them.

        Args:
            target: the model that is served.
            config: the settings.
            draft: the draft model, where the config asks for one.
            drafter: who guesses ahead, in place of the one that `config.drafter` names.

        Raises:
            SettingError: the config does not suit the model, or the caches do not fit.
        """
        self.target = target
        self.config = config
        self._parts: Assembly | None = assemble(target, config, draft, drafter)
        self._next_id = 0

    @classmethod
    def open(cls, model: str, config: EngineConfig, progress: Progress = silent) -> Engine:
        """Load a model, its draft model if one is asked for, and assemble an engine."""
        target = load(model, config, progress)
        draft = load_draft(target, config, progress) if config.draft_model is not None else None
        return cls(target, config, draft)

    @property
    def parts(self) -> Assembly:
        """Ledger, pools, plan and the rest.

        Raises:
            EngineClosedError: the engine was closed.
        """
        if self._parts is None:
            raise EngineClosedError("the engine was closed; open a new one")
        return self._parts

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self.target.tokenizer

    @property
    def usage(self) -> Usage:
        """How full the engine is now."""
        parts, ledger = self.parts, self.parts.ledger
        return Usage(
            running=parts.scheduler.running,
            waiting=parts.scheduler.waiting,
            free_pages=ledger.free_pages,
            cached_pages=ledger.cached_pages,
            held_pages=ledger.held_pages,
        )

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return self.parts.loop.idle

    def submit(self, prompt: str | Sequence[int], params: SamplingParams) -> list[Request]:
        """Take in one prompt: one request for each of its `params.n` samples.

        Raises:
            PromptError: empty, too long, outside the vocabulary, or text without a tokenizer.
            SettingError: sampling values that do not suit this model, or too many waiting.
        """
        parts, config = self.parts, self.config
        tokens = self._tokens(prompt)
        check_vocabulary(params, self.target.model.description.vocab_size)
        if parts.scheduler.waiting + params.n > config.max_waiting:
            raise SettingError(
                "max_waiting", f"{config.max_waiting} requests wait already; try again later"
            )
        seed = fresh_seed() if params.seed is None else params.seed
        bad = self._bad_sequences(params)
        requests = [
            self._request(tokens, params, derive_seed(seed, i), bad) for i in range(params.n)
        ]
        for request in requests:
            parts.loop.add(request, self._stream(params))
        return requests

    def step(self) -> list[Emission]:
        """One pass over the running requests; an empty list if there was nothing to emit."""
        return self.parts.loop.step()

    def abort(self, request: Request) -> None:
        """End a request at once, wherever it is; ended ones are left alone."""
        self.parts.loop.abort(request)

    def close(self) -> None:
        """Give the caches and recorded steps back. May be called again."""
        if self._parts is not None:
            self._parts.capture.close()
        self._parts = None

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        tokens = self._encode(prompt) if isinstance(prompt, str) else list(prompt)
        vocab = self.target.model.description.vocab_size
        if not tokens:
            raise PromptError("is empty; give at least one token")
        for token in tokens:
            if type(token) is not int or not 0 <= token < vocab:
                raise PromptError(f"token id {token!r} is outside the vocabulary of {vocab} tokens")
        longest = self.parts.max_model_len
        if len(tokens) >= longest:
            raise PromptError(
                f"has {len(tokens)} tokens, and the context holds {longest} with at least one new "
                "token; shorten it or raise max_model_len"
            )
        return tokens

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise PromptError(
                "is text, but the checkpoint has no tokenizer; give a list of token ids"
            )
        return self.tokenizer.encode(text)

    def _request(
        self, tokens: list[int], params: SamplingParams, seed: int, bad: tuple[tuple[int, ...], ...]
    ) -> Request:
        own_ends = (
            frozenset() if params.ignore_eos or self.tokenizer is None else self.tokenizer.end_ids
        )
        longest = self.parts.max_model_len
        wanted = longest if params.max_tokens is None else len(tokens) + params.max_tokens
        self._next_id += 1
        return Request(
            id=RequestId(self._next_id),
            tokens=list(tokens),
            prompt_length=len(tokens),
            params=params,
            seed=seed,
            length_limit=min(longest, wanted),
            end_tokens=own_ends | frozenset(params.stop_token_ids),
            bad_sequences=bad,
        )

    def _bad_sequences(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each bad word as it is spelt at the beginning of a text and after a space."""
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            raise SettingError("bad_words", "needs a tokenizer, and the checkpoint has none")
        spelt = (
            tuple(self.tokenizer.encode(form, add_special=False))
            for word in params.bad_words
            for form in (word, " " + word.lstrip())
        )
        return tuple(dict.fromkeys(sequence for sequence in spelt if sequence))

    def _stream(self, params: SamplingParams) -> TextStream:
        if self.tokenizer is None:
            if params.stop:
                raise SettingError("stop", "needs a tokenizer, and the checkpoint has none")
            return NoText()
        return DecodedText(self.tokenizer, params)
