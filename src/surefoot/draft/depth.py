"""How deep to draft: a fixed depth, or the one that measured acceptance and step costs pay for.

Depth may depend on time and chance, since the tokens do not depend on depth.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from surefoot.ids import RequestId
from surefoot.request import Request

_DECAY = 0.9
_PRIOR_TRIALS = 2.0
_PROBE_AFTER = 24
_LEAST_GAIN = 1.02
_SAMPLES = 9


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one decoding step took.

    Attributes:
        tokens: all tokens computed, drafts included.
        forward_s: seconds for the forward pass and the choice.
        draft_s: seconds in the drafter.
        drafted: tokens that the drafter proposed.
    """

    tokens: int
    forward_s: float
    draft_s: float
    drafted: int


class Depth(Protocol):
    """Says how many tokens to draft, and learns from what became of them."""

    def limits(self, requests: Sequence[Request], others: int) -> list[int]:
        """Depth for each decoding request, in a step that computes `others` tokens besides."""
        ...

    def learn(self, request: RequestId, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens of a request, the first `accepted` were right."""
        ...

    def measure(self, cost: StepCost) -> None:
        """A step of decoding rows took this long."""
        ...

    def forget(self, request: RequestId) -> None:
        """The request left the engine."""
        ...


@dataclass(frozen=True)
class FixedDepth:
    """Always the same depth."""

    depth: int

    def limits(self, requests: Sequence[Request], others: int) -> list[int]:
        """See Depth."""
        return [self.depth] * len(requests)

    def learn(self, request: RequestId, drafted: int, accepted: int) -> None:
        """Nothing to learn."""

    def measure(self, cost: StepCost) -> None:
        """Nothing to learn."""

    def forget(self, request: RequestId) -> None:
        """Nothing is kept."""


class CostCurve:
    """Seconds of a step by its tokens: running medians, and straight lines between them."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        """Start from measured seconds by token count; at least one entry."""
        self._samples = {tokens: deque([seconds], _SAMPLES) for tokens, seconds in measured.items()}
        self._counts = sorted(self._samples)
        self._medians = dict(measured)

    def add(self, tokens: int, seconds: float) -> None:
        """One more measurement."""
        if tokens not in self._samples:
            self._samples[tokens] = deque(maxlen=_SAMPLES)
            self._counts = sorted(self._samples)
        self._samples[tokens].append(seconds)
        self._medians[tokens] = statistics.median(self._samples[tokens])

    def seconds(self, tokens: int) -> float:
        """Estimated seconds of a step of `tokens` tokens."""
        counts, at = self._counts, bisect_left(self._counts, tokens)
        if at < len(counts) and counts[at] == tokens:
            return self._medians[tokens]
        if len(counts) == 1 or at == 0:
            return self._medians[counts[0]]
        low, high = (counts[at - 1], counts[at]) if at < len(counts) else (counts[-2], counts[-1])
        slope = (self._medians[high] - self._medians[low]) / (high - low)
        return max(self._medians[low] + max(slope, 0.0) * (tokens - low), self._medians[low])


@dataclass(slots=True)
class _History:
    """Decayed counts of one request's drafts."""

    right: float = 0.0
    tried: float = 0.0
    idle: int = 0


@dataclass
class AutoDepth:
    """The depths that give most tokens a second, by what was measured.

    A draft token at place i is worth the chance that it and all before it are right. Places of all
    requests are added in order of that worth, and the cut with the best ratio of expected tokens to
    expected seconds wins. A request that has not been drafted for is probed now and then.

    Attributes:
        curve: step cost by tokens.
        ceiling: greatest depth.
        rate: chance that a drafted token is right, over all requests.
        draft_s: seconds per drafted token.
    """

    curve: CostCurve
    ceiling: int
    rate: float = 0.6
    draft_s: float = 0.0
    _requests: dict[RequestId, _History] = field(default_factory=dict)

    def limits(self, requests: Sequence[Request], others: int) -> list[int]:
        """See Depth."""
        histories = [self._requests.setdefault(request.id, _History()) for request in requests]
        rates = [self._chance(history) for history in histories]
        worths = sorted(
            (
                (rate**place, row)
                for row, rate in enumerate(rates)
                for place in range(1, self.ceiling + 1)
            ),
            reverse=True,
        )
        base = len(requests)
        best, cut = base / self.curve.seconds(base + others) * _LEAST_GAIN, 0
        expected = float(base)
        for count, (worth, _) in enumerate(worths, start=1):
            expected += worth
            seconds = self.curve.seconds(base + others + count) + self.draft_s * count
            if expected / seconds > best:
                best, cut = expected / seconds, count
        depths = [0] * base
        for _, row in worths[:cut]:
            depths[row] += 1
        return [
            self._probe(history, depth) for history, depth in zip(histories, depths, strict=True)
        ]

    def _chance(self, history: _History) -> float:
        right = history.right + self.rate * _PRIOR_TRIALS
        return min(right / (history.tried + _PRIOR_TRIALS), 0.999)

    @staticmethod
    def _probe(history: _History, depth: int) -> int:
        if depth > 0:
            history.idle = 0
            return depth
        history.idle += 1
        if history.idle < _PROBE_AFTER:
            return 0
        history.idle = 0
        return 1

    def learn(self, request: RequestId, drafted: int, accepted: int) -> None:
        """See Depth."""
        if drafted == 0:
            return
        history = self._requests.setdefault(request, _History())
        tried = accepted + (accepted < drafted)
        history.right = history.right * _DECAY + accepted
        history.tried = history.tried * _DECAY + tried
        self.rate += 0.02 * (accepted / tried - self.rate)

    def measure(self, cost: StepCost) -> None:
        """See Depth."""
        self.curve.add(cost.tokens, cost.forward_s)
        if cost.drafted:
            self.draft_s += 0.1 * (cost.draft_s / cost.drafted - self.draft_s)

    def forget(self, request: RequestId) -> None:
        """See Depth."""
        self._requests.pop(request, None)
