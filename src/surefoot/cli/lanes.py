"""The engines that a benchmark compares, all on the same weights, and the prompts they get.

Loads torch, so commands import this module when they run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice

from surefoot.cli.asks import Ask
from surefoot.cli.options import AUTO
from surefoot.cli.prompts import PROMPT_TOKENS, TEXTS
from surefoot.cli.show import Screen
from surefoot.config import EngineConfig
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel, load, load_draft
from surefoot.errors import SettingError

_SHIFT = 7


@dataclass(frozen=True)
class Lane:
    """One engine of the comparison.

    Attributes:
        engine: assembled and idle.
        drafter: who guesses ahead.
        draft_tokens: how deep; "auto", or 0 without drafter.
    """

    engine: Engine
    drafter: str
    draft_tokens: int | str


@dataclass(frozen=True)
class Texts:
    """Where the prompts come from.

    Attributes:
        asks: prompts of the user, or None for texts of our own.
        random: random token ids instead.
        prompt_tokens: length of each, or None: as the user's are, else PROMPT_TOKENS.
    """

    asks: Sequence[Ask] | None
    random: bool
    prompt_tokens: int | None

    def prompts(self, target: LoadedModel, count: int) -> list[list[int]]:
        """Token ids of `count` prompts, no two of them alike while there are enough texts.

        Raises:
            SettingError: a prompt cannot be made for this model.
        """
        sources = self._sources(target)
        return [
            self._cut(sources[index % len(sources)], index // len(sources) * _SHIFT)
            for index in range(count)
        ]

    def longest(self, target: LoadedModel) -> int:
        """Most tokens of a prompt."""
        return max(len(self._cut(ids, 0)) for ids in self._sources(target))

    def _cut(self, ids: Sequence[int], start: int) -> list[int]:
        """`ids` from `start` on, around in a circle, in the wanted length."""
        wanted = self.prompt_tokens
        if wanted is None:
            wanted = PROMPT_TOKENS if self.asks is None else len(ids)
        start %= len(ids)
        return list(islice(cycle(ids), start, start + wanted))

    def _sources(self, target: LoadedModel) -> list[list[int]]:
        if self.random or (self.asks is None and target.tokenizer is None):
            return _random_ids(target, self.prompt_tokens or PROMPT_TOKENS)
        asks = [Ask(text) for text in TEXTS] if self.asks is None else self.asks
        sources = [_ids(target, ask) for ask in asks]
        if not all(sources):
            raise SettingError("prompts", "a prompt is empty; give each at least one token")
        return sources


def _ids(target: LoadedModel, ask: Ask) -> list[int]:
    tokenizer = target.tokenizer
    if not ask.messages and not isinstance(ask.prompt, str):
        return list(ask.prompt)
    if tokenizer is None:
        raise SettingError("prompts", "are text, but the checkpoint has no tokenizer; give ids")
    if isinstance(ask.prompt, str) and not ask.messages:
        return tokenizer.encode(ask.prompt)
    if target.chat_format is None:
        raise SettingError("prompts", "are messages, but the checkpoint has no chat template")
    return tokenizer.encode(target.chat_format.render(ask.messages), add_special=False)


def _random_ids(target: LoadedModel, length: int) -> list[list[int]]:
    draw = random.Random(0)
    vocab = target.model.description.vocab_size
    return [[draw.randrange(vocab) for _ in range(length)] for _ in TEXTS]


@contextmanager
def open_lanes(
    model: str, configs: Sequence[EngineConfig], texts: Texts, new_tokens: int, screen: Screen
) -> Iterator[list[Lane]]:
    """Load a model once and put an engine on it for every config; kinds that are equal come once.

    Caches are planned for `new_tokens` after the longest prompt, unless a config says more.

    Raises:
        SettingError: the model cannot be loaded, or a config does not suit it or the prompts.
    """
    named = next((config for config in configs if config.draft_model is not None), None)
    with screen.loading(f"loading {model}") as progress:
        target = load(model, configs[0], progress)
        draft = load_draft(target, named, progress) if named is not None else None
        longest = texts.longest(target) + new_tokens
        _check_length(target, configs[0], longest)
        lanes: dict[tuple[str, int | str], Lane] = {}
        for config in configs:
            progress(f"{config.drafter} {_depth(config)}")
            lane = _lane(target, config, draft, longest)
            lanes.setdefault((lane.drafter, lane.draft_tokens), lane)
    try:
        yield list(lanes.values())
    finally:
        for lane in lanes.values():
            lane.engine.close()


def _lane(
    target: LoadedModel, config: EngineConfig, draft: LoadedModel | None, longest: int
) -> Lane:
    fitted = replace(config, max_model_len=config.max_model_len or longest)
    engine = Engine(target, fitted, draft if config.draft_model is not None else None)
    return Lane(engine, engine.parts.drafter.name, _depth(config))


def _depth(config: EngineConfig) -> int | str:
    if config.drafter == "none":
        return 0
    return AUTO if config.draft_tokens is None else config.draft_tokens


def _check_length(target: LoadedModel, config: EngineConfig, longest: int) -> None:
    most = config.max_model_len or target.model.description.max_positions
    if longest > most:
        raise SettingError(
            "prompt_tokens",
            f"prompts and new tokens are {longest} together, and the context holds {most}; "
            "lower --prompt-tokens or --new-tokens",
        )
