"""Tasks whose right answers are known from outside: speculation must not move a score.

That two runs of one engine agree says nothing of a fault that both have. A score does: lists are
recited by a model that knows how (see `reciter`), and text is carried on by a trained model, whose
tokens are held against the real text, and against what another library makes of the same weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from surefoot.config import make_config
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.testing.reciter import CHANGING, STOP, VOCAB

_LIST = 40
_MEMORY = 1 << 27
_MOST_STEPS = 20_000
_POINTS = 128
"""Enough for every conversation to be found again, however few run at once."""

Logits = Callable[[Sequence[int]], Tensor]
"""A text to another library's logits after each of its tokens, [n, vocabulary]."""


@dataclass(frozen=True)
class Setting:
    """How an engine runs while it takes a task.

    Attributes:
        drafter: who drafts.
        depth: most tokens of a draft.
        cache: later turns may reuse what earlier ones computed.
        batch: most requests at once.
        chunk: most prompt tokens of one request in one step.
        preempt: pre-empt every request each time that so many steps have passed; 0 is never. A
            prompt has to get from one resume point to the next in that time.
        temperature: 0 is greedy.
    """

    drafter: str = "none"
    depth: int = 0
    cache: bool = True
    batch: int = 8
    chunk: int = 256
    preempt: int = 0
    temperature: float = 0.0


@dataclass
class Score:
    """How a task went: two scores are equal if as many tokens of as many are right.

    Attributes:
        right: tokens that are what they should be.
        asked: tokens in all.
        requests: what was asked and answered.
    """

    right: int = 0
    asked: int = 0
    requests: list[Request] = field(default_factory=list, repr=False, compare=False)

    @property
    def share(self) -> float:
        """Right tokens among all."""
        return self.right / self.asked

    def add(self, request: Request, right: int) -> None:
        """Count a finished request, of whose tokens `right` are right."""
        self.right += right
        self.asked += request.output_length
        self.requests.append(request)


class Desk:
    """An engine that answers one round of prompts after the other."""

    def __init__(self, model: LoadedModel, setting: Setting) -> None:
        """Assemble an engine on `model`."""
        self._setting = setting
        depth = setting.depth if setting.drafter != "none" else None
        config = make_config(
            drafter=setting.drafter,
            draft_tokens=depth,
            prefix_cache=setting.cache,
            max_rows=setting.batch,
            prefill_chunk=setting.chunk,
            points=_POINTS,
            memory=_MEMORY,
        )
        self._engine = Engine(model, config)
        self._steps = 0

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Request]:
        """Continue each prompt by `tokens`, all prompts in line at once.

        Raises:
            RuntimeError: pre-emption leaves no time to get on.
        """
        requests = [
            self._engine.submit(prompt, self._params(number, tokens))[0]
            for number, prompt in enumerate(prompts)
        ]
        begun = self._steps
        while not self._engine.idle:
            self._steps += 1
            if self._steps > begun + _MOST_STEPS:
                raise RuntimeError(f"{self._setting} comes to no end")
            if self._setting.preempt and self._steps % self._setting.preempt == 0:
                self._engine.parts.scheduler.preempt_all()
            self._engine.step()
        return requests

    def _params(self, number: int, tokens: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=tokens,
            temperature=self._setting.temperature,
            seed=number,
            ignore_eos=True,
            logprobs=0,
        )


@dataclass(frozen=True)
class Turn:
    """One turn of a recital.

    Attributes:
        tokens: how many are asked for.
        change: the list is said first, in a new order; else the text so far is just continued.
    """

    tokens: int
    change: bool = False


TURNS = (Turn(512), Turn(48), Turn(128, change=True), Turn(48))
"""A list is told and recited at length, continued from the cache, changed, continued."""


class Recital:
    """One list, and what was said of it."""

    def __init__(self, members: Sequence[int]) -> None:
        """Tell the list once round, and its first member again."""
        self._members = list(members)
        self.said = [*members, members[0]]

    def right(self, request: Request) -> int:
        """How many tokens are what the list has after the token before them."""
        members = self._members
        follows = dict(zip(members, [*members[1:], members[0]], strict=True))
        steps = pairwise(request.tokens[request.prompt_length - 1 :])
        return sum(follows.get(before) == token for before, token in steps)

    def change(self, draws: random.Random) -> None:
        """Tell the list in another order, in which only changing tokens are followed by others."""
        members = self._members
        first = 1 + next(i for i, token in enumerate(members) if token in CHANGING)
        parts: list[list[int]] = [[]]
        for token in (*members[first:], *members[:first]):
            parts[-1].append(token)
            if token in CHANGING:
                parts.append([])
        draws.shuffle(parts)
        self._members = [token for part in parts for token in part]
        self.said += [STOP, *self._members, self._members[0]]


def recite(
    model: LoadedModel, setting: Setting, lists: int = 8, turns: Sequence[Turn] = TURNS
) -> Score:
    """Have a reciter recite so many lists side by side."""
    draws, score, desk = random.Random(lists), Score(), Desk(model, setting)
    recitals = [Recital(draws.sample(range(1, VOCAB), _LIST)) for _ in range(lists)]
    for turn in turns:
        for recital in recitals if turn.change else ():
            recital.change(draws)
        requests = desk.answer([recital.said for recital in recitals], turn.tokens)
        for recital, request in zip(recitals, requests, strict=True):
            score.add(request, recital.right(request))
            recital.said = list(request.tokens)
    return score


def carry_on(
    model: LoadedModel,
    setting: Setting,
    texts: Sequence[Sequence[int]],
    stride: int = 16,
    span: int = 8,
) -> Score:
    """Break off each text after every `stride` tokens, and have the next `span` guessed.

    A token is right if it is the text's own. The shortest text says how often texts are cut.
    """
    score, desk = Score(), Desk(model, setting)
    for cut in range(stride, min(map(len, texts)) - span + 1, stride):
        requests = desk.answer([text[:cut] for text in texts], span)
        for text, request in zip(texts, requests, strict=True):
            real = text[cut : cut + span]
            score.add(request, sum(a == b for a, b in zip(request.output, real, strict=True)))
    return score


def write_on(
    model: LoadedModel, setting: Setting, beginnings: Sequence[Sequence[int]], tokens: int = 512
) -> list[Request]:
    """Carry each beginning on at length, for `agree` to judge."""
    return Desk(model, setting).answer(beginnings, tokens)


@dataclass
class Agreement:
    """How what was written looks to another library.

    Attributes:
        score: a token is right if the other library, given the text before it, finds none better.
        shortfall: how much its best token is above the one that was written, at most.
        distance: between its log-probability of a token and ours, at most.
    """

    score: Score = field(default_factory=Score)
    shortfall: float = 0.0
    distance: float = 0.0


def agree(requests: Sequence[Request], logits_of: Logits) -> Agreement:
    """Hold what was written against another library's logits for the very same text.

    Greedy text of two libraries may part for good at a near tie. Judged token by token, a near tie
    is a small shortfall, and nothing after it is lost.
    """
    agreement = Agreement()
    for request in requests:
        logits = logits_of(request.tokens[:-1])[request.prompt_length - 1 :].double()
        written = torch.tensor(request.output)[:, None]
        short = logits.amax(1) - logits.gather(1, written)[:, 0]
        theirs = logits.log_softmax(1).gather(1, written)[:, 0]
        chosen = zip(request.logprobs, request.output, strict=True)
        ours = torch.tensor([entry[token] for entry, token in chosen])
        agreement.score.add(request, int((short == 0).sum()))
        agreement.shortfall = max(agreement.shortfall, float(short.max()))
        agreement.distance = max(agreement.distance, float((theirs - ours).abs().max()))
    return agreement
