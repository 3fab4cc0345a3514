"""Which combinations to test: every pair of choices together at least once, instead of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from random import Random

Choice = dict[str, object]
_Pair = tuple[tuple[str, object], tuple[str, object]]

_CANDIDATES = 30


def pairwise(
    factors: Mapping[str, Sequence[object]],
    *,
    seed: int = 0,
    at_least: int = 0,
    allowed: Callable[[Choice], bool] = lambda choice: True,
) -> list[Choice]:
    """Choices of one value per factor, such that each allowed pair of values occurs.

    Greedy: each choice is the best of some random ones that hold a pair still missing.

    Args:
        factors: values of each factor, hashable.
        seed: the result is a function of it.
        at_least: random choices fill the list up to this length.
        allowed: refuses combinations that make no sense. A pair that is found in no allowed
            choice is given up.

    Returns:
        Complete choices, in no particular order.
    """
    random = Random(seed)
    missing = _all_pairs(factors)
    chosen: list[Choice] = []
    while missing:
        wanted = next(iter(missing))
        candidates = [_complete(factors, wanted, random) for _ in range(_CANDIDATES)]
        fitting = [choice for choice in candidates if allowed(choice)]
        if not fitting:
            del missing[wanted]
            continue
        best = max(fitting, key=lambda choice: sum(pair in missing for pair in _pairs(choice)))
        chosen.append(best)
        for pair in _pairs(best):
            missing.pop(pair, None)
    while len(chosen) < at_least:
        choice = {name: random.choice(values) for name, values in factors.items()}
        if allowed(choice):
            chosen.append(choice)
    return chosen


def missing_pairs(factors: Mapping[str, Sequence[object]], chosen: Sequence[Choice]) -> list[_Pair]:
    """The pairs of values that no choice holds."""
    covered = {pair for choice in chosen for pair in _pairs(choice)}
    return [pair for pair in _all_pairs(factors) if pair not in covered]


def _all_pairs(factors: Mapping[str, Sequence[object]]) -> dict[_Pair, None]:
    return {
        ((one, left), (other, right)): None
        for one, other in combinations(factors, 2)
        for left in factors[one]
        for right in factors[other]
    }


def _pairs(choice: Choice) -> list[_Pair]:
    return list(combinations(choice.items(), 2))


def _complete(factors: Mapping[str, Sequence[object]], pair: _Pair, random: Random) -> Choice:
    fixed = dict(pair)
    return {
        name: fixed[name] if name in fixed else random.choice(values)
        for name, values in factors.items()
    }
