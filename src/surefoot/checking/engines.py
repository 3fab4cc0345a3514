"""The engines of a check: one for plain runs, and one for each case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from surefoot.checking.cases import DRAFT_MODEL, PLAIN, TEST_DRAFTERS, Amount, Ask, Case
from surefoot.checking.drafters import ReplayDrafter
from surefoot.checking.prompts import Prompt
from surefoot.config import EngineConfig
from surefoot.engine.assemble import drafter_caches, make_plan
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel
from surefoot.errors import PromptError, SettingError
from surefoot.model.model import Description
from surefoot.request import Request
from surefoot.state.spec import Paged

SAID_BETWEEN = 3
"""Tokens between the answer of one turn and that of the next."""

LONG_ENTRIES = 12
"""Entries of the largest ratio that a long answer makes."""

LONG_CHOICES = 4
"""A long answer is so many times as long as what a token looks at."""

_SCARCE_SHARE = 0.5
_SMALL_STEP = 64


@dataclass(frozen=True)
class Models:
    """What is checked.

    Attributes:
        target: the model whose output must not depend on drafting.
        draft: the draft model, if one is among the drafters.
    """

    target: LoadedModel
    draft: LoadedModel | None = None


class Engines:
    """Makes engines that share the models and the context length.

    Attributes:
        models: what is checked.
        amount: how much is checked, long answers settled.
        longest: tokens of the longest context.
    """

    def __init__(
        self, models: Models, config: EngineConfig, prompts: Sequence[Prompt], amount: Amount
    ) -> None:
        """Make engines for `prompts`, each to be continued by as much as `amount` says.

        Args:
            models: what is checked.
            config: device, memory and lengths; the cases set what they are about.
            prompts: at least one.
            amount: how much is checked.

        Raises:
            PromptError: no prompts were given.
            SettingError: long answers do not fit the context.
        """
        if not prompts:
            raise PromptError("is missing; give at least one")
        description = models.target.model.description
        self._known = config.max_model_len or description.max_positions
        if amount.long_tokens is None:
            amount = replace(amount, long_tokens=_long_tokens(description))
        elif amount.long_tokens >= self._known:
            raise SettingError(
                "long_tokens",
                f"{amount.long_tokens} of them do not fit a context of {self._known} tokens",
            )
        self.models, self.amount, self._prompts = models, amount, prompts
        self.longest = self._length(amount.longest)
        self._config = replace(config, max_model_len=self.longest)

    def asks(self, case: Case) -> list[Ask]:
        """The requests of a case."""
        return case.asks(len(self._prompts), bool(self.amount.long_tokens))

    def follow_ups(self, case: Case) -> list[Ask]:
        """The next turns of some of them."""
        return case.follow_ups(len(self._prompts), bool(self.amount.long_tokens))

    def submit(self, engine: Engine, ask: Ask, tokens: Sequence[int]) -> Request:
        """Hand a request whose prompt is `tokens` to one of the engines.

        Raises:
            PromptError: its prompt has no room for a new token.
        """
        return engine.submit(tokens, ask.params(tokens, self.amount.new_tokens_of(ask)))[0]

    def plain(self, batch: int) -> Engine:
        """No drafter, no prefix cache, nothing replayed, every prompt in one piece.

        `batch` requests are computed at a time.
        """
        config = replace(
            self._config,
            drafter=PLAIN,
            draft_tokens=None,
            draft_model=None,
            max_rows=batch,
            max_step_tokens=self.longest + batch - 1,
            prefill_chunk=self.longest,
            prefix_cache=False,
            capture=False,
        )
        return Engine(self.models.target, config)

    def of(self, case: Case) -> tuple[Engine, ReplayDrafter | None]:
        """An engine that runs as a case says, and its test drafter if it has one.

        Raises:
            SettingError: a drafter or a depth that this model cannot have.
        """
        target, config = self.models.target, self._config_of(case)
        if case.drafter in TEST_DRAFTERS:
            vocab = target.model.description.vocab_size
            drafter = ReplayDrafter(case.drafter, vocab, case.seed + case.number)
            return Engine(target, config, drafter=drafter), drafter
        return Engine(target, config, self._draft_of(case)), None

    def _length(self, answer: int) -> int:
        """The context that every prompt, an answer of so many tokens and a second turn fit in."""
        # A second turn has the first one's answer in its prompt.
        answers = answer + self.amount.new_tokens + SAID_BETWEEN
        return min(max(len(prompt.tokens) for prompt in self._prompts) + answers, self._known)

    def _draft_of(self, case: Case) -> LoadedModel | None:
        return self.models.draft if case.drafter == DRAFT_MODEL else None

    def _config_of(self, case: Case) -> EngineConfig:
        least_step = _SMALL_STEP if case.chunk < _SMALL_STEP else 2 * case.chunk
        config = replace(
            self._config,
            # Room for an answer that the case does not have would spare it all pre-emption.
            max_model_len=self._length(max(map(self.amount.new_tokens_of, self.asks(case)))),
            # A test drafter is handed over; any other name than "none" makes room for its drafts.
            drafter="ngram" if case.drafter in TEST_DRAFTERS else case.drafter,
            draft_tokens=case.depth,
            draft_model=self._config.draft_model if case.drafter == DRAFT_MODEL else None,
            max_rows=case.batch,
            max_step_tokens=max(4 * case.batch, least_step),
            prefill_chunk=case.chunk,
            prefix_cache=case.prefix_cache,
        )
        return self._scarce(case, config) if case.pressure == "scarce" else config

    def _scarce(self, case: Case, config: EngineConfig) -> EngineConfig:
        """The config with memory for one request of any length, but not for a whole batch."""
        draft = self._draft_of(case)
        target = self.models.target
        own = drafter_caches(case.drafter, config, target, draft)
        caches = [*target.model.description.caches, *own]
        roomy, context = make_plan(caches, config, target, config.most_draft_tokens)
        size = roomy.page_tokens
        ends = sorted(self._pages(ask, size) for ask in self.asks(case))
        pages = max(-(-context // size), int(_SCARCE_SHARE * sum(ends[-case.batch :])))
        spared = max(0, roomy.pages - pages)
        memory = roomy.total_bytes - spared * roomy.page_bytes
        # What resume points take must not become pages.
        return replace(config, memory=memory, points=roomy.points)

    def _pages(self, ask: Ask, page_tokens: int) -> int:
        """How many pages a request fills in the end."""
        tokens = len(self._prompts[ask.prompt].tokens) + self.amount.new_tokens_of(ask)
        return -(-tokens // page_tokens)


def _long_tokens(description: Description) -> int:
    """New tokens of long answers, if the model joins tokens to entries or looks at some of them.

    Entries that stand for many tokens are few in a short answer, and choosing among them, or among
    few positions, leaves none out.
    """
    ratios = [cache.ratio for cache in description.caches if isinstance(cache, Paged)]
    ratio = max(ratios, default=1)
    return LONG_ENTRIES * ratio if ratio > 1 else LONG_CHOICES * description.looks_at
