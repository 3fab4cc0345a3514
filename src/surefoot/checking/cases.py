"""Which cases a check runs: every pair of settings at least once, decided by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, count

from surefoot.params import MAX_SEED, SamplingParams

SAMPLINGS = ("greedy", "sampled", "penalties")
PLAIN, DRAFT_MODEL = "none", "draft-model"
PRESSURES = ("calm", "forced", "scarce")
TEST_DRAFTERS = {"replay": 0.3, "wrong": 1.0}
"""Drafters that every model can be checked with: how often a token of theirs is spoilt."""

DEPTHS: Sequence[Sequence[int | None]] = ((1, 3, 8, None), (2, 5, 8, None), (4, 6, 7, None))
"""Draft lengths of one round after the other."""

_PLAIN_EVERY = 4
_LONG_EVERY, _FIRST_LONG = 20, 2

Pair = tuple[int, int, int, int]


@dataclass(frozen=True)
class Amount:
    """How much is checked.

    Attributes:
        new_tokens: most new tokens of a request whose answer is not long.
        tokens: how many to compare at least; None runs one round of cases.
        seed: decides cases, noise, spoilt drafts and moments of pre-emption.
        long_tokens: new tokens of the few long answers, 0 for none; None goes by the model.
    """

    new_tokens: int = 24
    tokens: int | None = None
    seed: int = 0
    long_tokens: int | None = None

    def new_tokens_of(self, ask: Ask) -> int:
        """Most new tokens of a request."""
        long = ask.long and ask.turn == 0
        return self.long_tokens if long and self.long_tokens else self.new_tokens

    @property
    def longest(self) -> int:
        """New tokens of the longest answer."""
        return max(self.new_tokens, self.long_tokens or 0)


@dataclass(frozen=True)
class Scope:
    """What the cases range over; one value of each makes a case.

    A value that stands twice comes about twice as often.

    Attributes:
        drafters: names of drafters; "none" stands for plain decoding cut in other ways.
        depths: for each round, in turn, its draft lengths in tokens; None adapts.
        batches: most requests computed at once.
        samplings: some of SAMPLINGS.
        caches: prefix cache on or off.
        chunks: most prompt tokens of one request in a step.
        pressures: some of PRESSURES: left alone, pre-empted at random steps, or short of pages.
    """

    drafters: Sequence[str]
    depths: Sequence[Sequence[int | None]] = DEPTHS
    batches: Sequence[int] = (8, 4, 1)
    samplings: Sequence[str] = SAMPLINGS
    caches: Sequence[bool] = (True, False, True)
    chunks: Sequence[int] = (256, 24, 5)
    pressures: Sequence[str] = PRESSURES


@dataclass(frozen=True)
class Wanted:
    """Fields of a `Scope` as a user wants them; empty where nothing was said."""

    drafters: Sequence[str] = ()
    depths: Sequence[int | None] = ()
    batches: Sequence[int] = ()
    caches: Sequence[bool] = ()
    chunks: Sequence[int] = ()

    def over(self, drafters: Sequence[str]) -> Scope:
        """The usual scope with what is wanted in its place; `drafters` are all there are."""
        usual = Scope(drafters)
        return Scope(
            drafters=self.drafters or usual.drafters,
            depths=[self.depths] if self.depths else usual.depths,
            batches=self.batches or usual.batches,
            caches=self.caches or usual.caches,
            chunks=self.chunks or usual.chunks,
        )


@dataclass(frozen=True)
class Ask:
    """One request of a case; equal ones have the same plain run.

    Attributes:
        prompt: index among the prompts.
        sampling: one of SAMPLINGS.
        seed: of the sampling noise.
        turn: 1 continues the plain answer of turn 0.
        long: turn 0 has a long answer; end tokens are ignored in both turns.
    """

    prompt: int
    sampling: str
    seed: int
    turn: int = 0
    long: bool = False

    def params(self, prompt: Sequence[int], new_tokens: int) -> SamplingParams:
        """How its tokens are chosen; `prompt` are its token ids."""
        params = self._chosen(prompt, new_tokens)
        return replace(params, ignore_eos=True) if self.long else params

    def _chosen(self, prompt: Sequence[int], new_tokens: int) -> SamplingParams:
        if self.sampling == "greedy":
            return SamplingParams(max_tokens=new_tokens, temperature=0)
        if self.sampling == "penalties":
            return self._penalised(prompt, new_tokens)
        # Half of them are cut at the edges, half take any token.
        if self.prompt % 2:
            return SamplingParams(max_tokens=new_tokens, temperature=1.0, seed=self.seed)
        return SamplingParams(
            max_tokens=new_tokens, temperature=0.8, top_k=50, top_p=0.95, seed=self.seed
        )

    def _penalised(self, prompt: Sequence[int], new_tokens: int) -> SamplingParams:
        """Some tokens are wanted again and again, and pushed back once they have come.

        So a choice made with a history that is not its own is likely to show.
        """
        wanted = prompt[:: 1 + len(prompt) // 6]
        return SamplingParams(
            max_tokens=new_tokens,
            temperature=0.7,
            min_p=0.02,
            presence_penalty=1.5,
            frequency_penalty=0.5,
            repetition_penalty=1.2,
            logit_bias={**dict.fromkeys(wanted, 3.0), prompt[-1]: -1.5},
            min_tokens=new_tokens // 2,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Case:
    """One way to run some requests; the fields are values of a `Scope`.

    Attributes:
        number: counts the cases of a check from 1.
        round: counts from 0 how often all pairs were gone through; later ones draw other noise.
        seed: of the whole check.
    """

    number: int
    round: int
    seed: int
    drafter: str
    depth: int | None
    sampling: str
    batch: int
    prefix_cache: bool
    chunk: int
    pressure: str

    @property
    def depth_name(self) -> int | str:
        """The depth as reports show it."""
        return "auto" if self.depth is None else self.depth

    @property
    def name(self) -> str:
        """Says what the case does, and is unique within a check."""
        drafting = PLAIN if self.drafter == PLAIN else f"{self.drafter} k={self.depth_name}"
        cache = "cache" if self.prefix_cache else "no-cache"
        how = f"{self.sampling} batch={self.batch} {cache} chunk={self.chunk} {self.pressure}"
        return f"{self.number:02d} {drafting} {how}"

    def asks(self, prompts: int, long: bool = False) -> list[Ask]:
        """Its requests, more than one batch of them, on some of `prompts` prompts.

        Most of those behind the first batch repeat a prompt of that batch, so that they find its
        pages in the prefix cache. With `long`, the first answer of some cases is a long one.
        """
        places = [*range(self.batch), *range(1, self.batch + 1)]
        if self.batch == 1:
            places = [0, 0, 1]
        first, *rest = [self._ask((5 * self.number + place) % prompts) for place in places]
        is_long = long and self.number % _LONG_EVERY == _FIRST_LONG
        return [replace(first, long=is_long), *rest]

    def follow_ups(self, prompts: int, long: bool = False) -> list[Ask]:
        """What comes when `asks` are answered: the next turn of some of them, if pages are kept."""
        if not self.prefix_cache:
            return []
        return [replace(ask, turn=1) for ask in self.asks(prompts, long)[: 1 + self.batch // 2]]

    def _ask(self, prompt: int) -> Ask:
        if self.sampling == "greedy":
            return Ask(prompt, self.sampling, 0)
        return Ask(prompt, self.sampling, (self.seed + 7919 * self.round + prompt) % MAX_SEED)


_Values = tuple[str, int | None, str, int, bool, int, str]


def plan(scope: Scope, seed: int) -> Iterator[list[Case]]:
    """Rounds of cases without end; each holds every pair of settings of its drafted cases.

    Before every fourth drafted case stands one without a drafter, cut into other batches and
    chunks. Where there are no drafted cases, a round holds every pair of settings of the others.
    """
    numbers = count(1)
    undrafted = (_undrafted(scope, random.Random(f"{seed}/{PLAIN}/{i}")) for i in count())
    flat = chain.from_iterable(undrafted)
    for number in count():
        drafted = _drafted(scope, number, random.Random(f"{seed}/{number}"))
        rows: list[_Values] = [] if drafted else next(undrafted)
        for at, values in enumerate(drafted):
            if at % _PLAIN_EVERY == 0 and PLAIN in scope.drafters:
                rows.append(next(flat))
            rows.append(values)
        yield [Case(next(numbers), number, seed, *values) for values in rows]


def _drafted(scope: Scope, number: int, rng: random.Random) -> list[_Values]:
    drafters = [name for name in scope.drafters if name != PLAIN]
    depths = scope.depths[number % len(scope.depths)]
    sizes = [len(drafters), len(depths), *_other_sizes(scope)]
    return [
        (drafters[row[0]], depths[row[1]], *_others(scope, row[2:])) for row in pairwise(sizes, rng)
    ]


def _undrafted(scope: Scope, rng: random.Random) -> list[_Values]:
    return [(PLAIN, 0, *_others(scope, row)) for row in pairwise(_other_sizes(scope), rng)]


def _other_sizes(scope: Scope) -> list[int]:
    rest = (scope.samplings, scope.batches, scope.caches, scope.chunks, scope.pressures)
    return [len(values) for values in rest]


def _others(scope: Scope, row: Sequence[int]) -> tuple[str, int, bool, int, str]:
    return (
        scope.samplings[row[0]],
        scope.batches[row[1]],
        scope.caches[row[2]],
        scope.chunks[row[3]],
        scope.pressures[row[4]],
    )


def pairwise(sizes: Sequence[int], rng: random.Random) -> list[tuple[int, ...]]:
    """Few combinations that hold each pair of values of any two dimensions.

    Args:
        sizes: how many values each of at least two dimensions has.
        rng: breaks ties.

    Returns:
        One index for each dimension in each combination; none if a dimension has no values.
    """
    if 0 in sizes:
        return []
    missing: set[Pair] = {
        (one, a, other, b)
        for one, other in combinations(range(len(sizes)), 2)
        for a in range(sizes[one])
        for b in range(sizes[other])
    }
    rows = []
    while missing:
        row = _densest(sizes, missing, rng)
        missing -= {(i, row[i], j, row[j]) for i, j in combinations(range(len(sizes)), 2)}
        rows.append(row)
    return rows


def _densest(sizes: Sequence[int], missing: set[Pair], rng: random.Random) -> tuple[int, ...]:
    """A combination that starts from a missing pair and takes in as many others as it can."""
    one, a, other, b = rng.choice(sorted(missing))
    row = {one: a, other: b}
    rest = [dimension for dimension in range(len(sizes)) if dimension not in row]
    rng.shuffle(rest)
    for dimension in rest:
        values = list(range(sizes[dimension]))
        rng.shuffle(values)
        row[dimension] = max(values, key=lambda value: _gain(row, dimension, value, missing))
    return tuple(row[dimension] for dimension in range(len(sizes)))


def _gain(row: dict[int, int], dimension: int, value: int, missing: set[Pair]) -> int:
    return sum(
        ((i, a, dimension, value) if i < dimension else (dimension, value, i, a)) in missing
        for i, a in row.items()
    )
