"""How deep to draft: a fixed depth, or the one that measured acceptance and step costs pay for.

Depth may depend on time and chance, since the tokens do not depend on depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from surefoot.draft.curve import CostCurve
from surefoot.draft.duel import Duel, Duels
from surefoot.ids import RequestId
from surefoot.request import Request

_DECAY = 0.98
_SLOW_DECAY = 0.995
_IDLE_DECAY = 0.99
_FIRST_GUESS = (6.0, 10.0)
_PRIOR_TRIALS = 4.0
_PROBE_AFTER = 24
_PROBE_SHARES = ((60, 0.01), (math.inf, 0.0025))  # of the time, up to some tokens tried
_SETTLED = 5
_SURPRISE = 1.25  # times as dear as thought: think again at once
_LEAST_GAIN = 1.01
_PATIENCE = 4
_THINK_EVERY = 4
_THINK_PLAIN_EVERY = 16
_RETHINK = 2  # times as rarely if drafts do not seem to pay
_COUNT_PLAIN_EVERY = 4
_ONWARD = 16  # tokens that a cut is looked for beyond the best one; some products go in tiles
_AT_ONCE = 1 << 30  # steps without a draft, as if nobody had waited longer


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one decoding step took.

    Attributes:
        tokens: all tokens computed, drafts included.
        rest_s: seconds for all of the step but drafting.
        draft_s: seconds in the drafter.
        drafted: tokens that the drafter proposed.
        passes: the greatest depth that was asked for; a drafter with a model computes as often.
    """

    tokens: int
    rest_s: float
    draft_s: float
    drafted: int
    passes: int


class Depth(Protocol):
    """Says how many tokens to draft, and learns from what became of them."""

    @property
    def follows(self) -> bool:
        """Whether the drafter should follow what the step commits; always if drafts were asked for.

        False while drafts do not pay.
        """
        ...

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

    @property
    def follows(self) -> bool:
        """See Depth."""
        return self.depth > 0

    def limits(self, requests: Sequence[Request], others: int) -> list[int]:
        """See Depth."""
        return [self.depth] * len(requests)

    def learn(self, request: RequestId, drafted: int, accepted: int) -> None:
        """Nothing to learn."""

    def measure(self, cost: StepCost) -> None:
        """Nothing to learn."""

    def forget(self, request: RequestId) -> None:
        """Nothing is kept."""


@dataclass(slots=True)
class _History:
    """Decayed counts of drafted tokens.

    Attributes:
        right: so many were kept.
        tried: so many could have been.
        idle: steps that have passed since a draft was asked for.
        again: nothing came then, and one was asked for once more, or will be.
    """

    right: float = 0.0
    tried: float = 0.0
    idle: int = 0
    again: bool = False

    def add(self, right: int, tried: int, decay: float) -> None:
        """Of `tried` more tokens the first `right` were right; older ones fade."""
        faded = decay**tried
        self.right = self.right * faded + right
        self.tried = self.tried * faded + tried

    def wait(self, steps: int) -> None:
        """Steps without a draft: what was seen counts a little less."""
        self.idle += steps
        self.right *= _IDLE_DECAY**steps
        self.tried *= _IDLE_DECAY**steps


@dataclass(slots=True)
class _Thought:
    """Depths found for some requests, and for how many more steps they will do."""

    ids: list[RequestId]
    others: int
    depths: list[int]
    fresh: int

    def holds(self, ids: list[RequestId], others: int) -> bool:
        """Whether they will do for a step of these requests."""
        return self.fresh > 0 and self.ids == ids and self.others == others


@dataclass
class AutoDepth:
    """The depths that give most tokens a second, by what was measured.

    A draft token at place i is worth the chance that it and all before it are right. Places of all
    requests are added in order of that worth, and the cut with the best ratio of expected tokens to
    expected seconds wins.

    What is not tried is not known. So a small share of the time goes into single drafted tokens
    for requests that are not drafted for. Whether drafts pay at all is decided by trials; see
    `duel`. Where they do not, several steps are decided at once: thinking takes time, too. And the
    drafter need not follow what it is not asked about; a prompt that comes then is not read by it.

    Attributes:
        curve: step cost by tokens.
        ceiling: greatest depth.
        suspends: whether the drafter may miss steps; one that cannot begin in the middle of a text
            would have to compute all that it missed at once.
        follows: see Depth; by what was decided last for requests that decode.
    """

    curve: CostCurve
    ceiling: int
    suspends: bool = False
    follows: bool = field(default=True, init=False)
    _pass_curve: CostCurve | None = None
    _last: _Thought = field(default_factory=lambda: _Thought([], 0, [], 0))
    _rest: _Thought = field(default_factory=lambda: _Thought([], 0, [], 0))
    _rested: int = 0
    _quiet: int = 0  # steps since drafts were promising; probes do not count
    _credit_s: float = 0.0
    _lent_s: float = 0.0  # what the probes of this step should cost
    _asked: bool = False
    _alike: int = 0
    _gain: float = 1.0
    _worth: float = 0.0  # of a token that is drafted now, on average
    _duels: Duels = field(default_factory=Duels)
    _duel: Duel | None = None  # by which the depths of this step were decided, if any were
    _all: _History = field(default_factory=lambda: _History(*_FIRST_GUESS))
    _requests: dict[RequestId, _History] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Chance that a drafted token is right, over all requests."""
        return self._all.right / self._all.tried

    def draft_s(self, drafted: int, passes: int) -> float:
        """Estimated seconds of drafting: each pass is for the rows that go as deep, on average."""
        if self._pass_curve is None or passes == 0:
            return 0.0
        return passes * self._pass_curve.seconds(max(1, round(drafted / passes)))

    def limits(self, requests: Sequence[Request], others: int) -> list[int]:
        """See Depth."""
        ids = [request.id for request in requests]
        duel = self._duel = self._duels.of(len(ids))
        if self._rest.holds(ids, others):
            self._rest.fresh -= 1
            self._rested += 1
            return list(self._rest.depths)
        passed = 1 + self._rested
        if ids != self._rest.ids:
            self._rested = 0  # who is new has not rested
        histories = [self._requests.setdefault(number, _History()) for number in ids]
        depths = self._thought(ids, histories, others)
        if not any(depths):
            duel.decline()
        elif not duel.wants(self._gain):
            depths = [0] * len(depths)
        for history in histories:
            history.wait(self._rested)
        self._quiet = 0 if any(depths) else self._quiet + passed
        self._probe(histories, depths, others)
        for history, depth in zip(histories, depths, strict=True):
            if depth:
                history.idle = 0
            else:
                history.wait(1)
        pairs = zip(histories, depths, strict=True)
        hoped = sum(_expected(self._chance(history), depth) for history, depth in pairs)
        self._worth = hoped / max(sum(depths), 1)
        wavers = duel.drafting and self._quiet <= _THINK_PLAIN_EVERY
        self.follows = not self.suspends or any(depths) or duel.trial or wavers
        self._rest = _Thought(ids, others, depths, 0 if any(depths) else _THINK_PLAIN_EVERY - 1)
        self._rested = 0
        return depths

    def _thought(
        self, ids: list[RequestId], histories: Sequence[_History], others: int
    ) -> list[int]:
        """The best depths, thought over every few steps while the same requests decode."""
        if not self._last.holds(ids, others):
            best = self._best(histories, others)
            self._last = _Thought(ids, others, best, _THINK_EVERY if any(best) else _RETHINK)
        self._last.fresh -= 1
        return list(self._last.depths)

    def _best(self, histories: Sequence[_History], others: int) -> list[int]:
        """Depths with the best ratio of expected tokens to expected seconds.

        A pass has its price whatever rows it is for, so each number of passes is looked at by
        itself, until some in turn have brought nothing.
        """
        chances = list(map(self._chance, histories))
        base = len(histories)
        plain = base / self.curve.seconds(base + others)
        best: tuple[float, list[tuple[float, int]]] = (plain * _LEAST_GAIN, [])
        worths: list[tuple[float, int]] = []
        idle = 0
        for passes in range(1, self.ceiling + 1):
            worths += [(chance**passes, row) for row, chance in enumerate(chances)]
            worths.sort(reverse=True)
            gain, count = self._cut([worth for worth, _ in worths], base, others, passes)
            if gain > best[0]:
                best, idle = (gain, worths[:count]), 0
            else:
                idle += 1
                if idle == _PATIENCE:
                    break
        self._gain, depths = best[0] / plain, [0] * base
        for _, row in best[1]:
            depths[row] += 1
        return depths

    def _cut(
        self, worths: Sequence[float], base: int, others: int, passes: int
    ) -> tuple[float, int]:
        """Tokens a second if the best `count` of these tokens are drafted, and that count."""
        best, cut, expected = 0.0, 0, float(base)
        for count, worth in enumerate(worths, start=1):
            expected += worth
            seconds = self.curve.seconds(base + others + count) + self.draft_s(count, passes)
            if expected / seconds > best:
                best, cut = expected / seconds, count
            elif count - cut > max(base, _ONWARD):
                break
        return best, cut

    def _chance(self, history: _History) -> float:
        right = history.right + self.rate * _PRIOR_TRIALS
        return min(right / (history.tried + _PRIOR_TRIALS), 0.999)

    def _probe(self, histories: Sequence[_History], depths: list[int], others: int) -> None:
        """Try one token for requests that were idle for long, as far as the time set aside goes."""
        tokens = len(depths) + others + sum(depths)
        step_s = self.curve.seconds(tokens)
        share = next(share for tried, share in _PROBE_SHARES if self._all.tried < tried)
        self._credit_s = min(self._credit_s + (1 + self._rested) * step_s * share, 10 * step_s)
        self._lent_s = 0.0
        idle = [row for row, depth in enumerate(depths) if depth == 0]
        for row in sorted(idle, key=lambda row: -histories[row].idle):
            drafted, passes = sum(depths), max(depths)
            cost = self.curve.seconds(tokens + 1) - self.curve.seconds(tokens)
            cost += self.draft_s(drafted + 1, max(passes, 1)) - self.draft_s(drafted, passes)
            waited = histories[row].idle
            if waited < _PROBE_AFTER or (cost > self._credit_s and waited < _AT_ONCE):
                return
            self._credit_s -= cost
            self._lent_s += cost
            depths[row], tokens = 1, tokens + 1

    def learn(self, request: RequestId, drafted: int, accepted: int) -> None:
        """See Depth."""
        history = self._requests.setdefault(request, _History())
        if drafted == 0:
            if history.idle == 0 and not history.again:
                # A drafter that had let go of the request follows it from now on.
                history.idle, history.again = _AT_ONCE, True
            return
        history.again = False
        tried = accepted + (accepted < drafted)
        self._all.add(accepted, tried, _SLOW_DECAY)
        history.add(accepted, tried, _DECAY)

    def measure(self, cost: StepCost) -> None:
        """See Depth."""
        duel, self._duel = self._duel, None
        if duel is None:
            return
        asked, rows = cost.passes > 0, cost.tokens - cost.drafted
        self._alike = self._alike + 1 if asked == self._asked else 0
        self._asked = asked
        settled = not asked and self._alike >= _SETTLED
        counts = asked or (settled and self._alike % _COUNT_PLAIN_EVERY == 0)
        if settled and not counts and not duel.trial:
            duel.skip()
            return
        if asked and self._quiet and not duel.drafting:
            self._settle_probes(rows, cost.rest_s + cost.draft_s)
        tokens = rows + self._worth * cost.drafted
        duel.add(asked, tokens, cost.rest_s + cost.draft_s)
        if counts:
            if asked and cost.rest_s > _SURPRISE * self.curve.seconds(cost.tokens):
                self._last.fresh = 0
            self.curve.add(cost.tokens, cost.rest_s)
        if asked:
            drafted, seconds = max(1, round(cost.drafted / cost.passes)), cost.draft_s / cost.passes
            if self._pass_curve is None:
                self._pass_curve = CostCurve({drafted: seconds})
            self._pass_curve.add(drafted, seconds)

    def _settle_probes(self, rows: int, seconds: float) -> None:
        """Charge what probes took in truth: they alone made the step longer, unless it stalled.

        Where drafting is suspended that is more than their share: nothing is ready for them.
        """
        plain = self.curve.seconds(rows)
        self._credit_s += self._lent_s - min(max(seconds - plain, 0.0), plain / 2)
        self._lent_s = 0.0

    def forget(self, request: RequestId) -> None:
        """See Depth."""
        self._requests.pop(request, None)
        self._last.fresh = self._rest.fresh = 0


def _expected(chance: float, depth: int) -> float:
    """Drafted tokens that are kept, on average, of `depth` that are each right with this chance."""
    return sum(chance**place for place in range(1, depth + 1))
