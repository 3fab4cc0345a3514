"""Whether drafting pays: stretches of steps with drafts against stretches without.

What a step would take the other way can be put together from what was measured of its parts, but
only roughly: steps of one kind alone are quicker than between steps of another, and what is not
done is not measured. Where drafts are nearly a tie that is not enough. So the other way is tried
for a few steps now and then, and the two are compared by their whole steps.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

_TRIAL = 12
_SETTLED = 5  # the first steps of a stretch are dearer: caches hold what went before
_KEPT = 16
_FIRST = 64
_LONGER = 4
_MOST = 1024
_BETTER = 1.02  # times as fast, or all stays as it is
_FOLLOWED = 1.06  # a drafter follows for a while, which makes plain steps so much dearer at first
_SURE = 1.4  # a gain by estimate that no trial would take away
_QUICKER = 1.15  # than when drafts won: the machine may have changed, and what plain steps take
_LOOK_EVERY = 16
_HOPE = 1.25  # times as much as was hoped for when drafts had lost: try them at once
_SPREAD = 1.25
_FEW = 4


@dataclass(slots=True)
class _Way:
    """The last settled steps of one way: expected tokens, and seconds."""

    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def speed(self) -> float:
        """Tokens a second."""
        return statistics.mean(self.tokens) / max(statistics.median(self.seconds), 1e-9)

    def clear(self) -> None:
        """Forget what was long ago."""
        self.tokens.clear()
        self.seconds.clear()


@dataclass(slots=True)
class Duel:
    """Drafting against not drafting, for steps of about as many rows.

    Attributes:
        drafting: the way of the next step.
        left: steps until the other way may be tried, or until a trial ends.
        trial: `drafting` is what is being tried.
        span: steps from a trial to the next one, four times as many whenever nothing changes.
        gain: that drafts promise at present, by estimate.
        hoped: the gain that they promised when they last lost.
        settled: steps of this stretch.
        won_at: tokens a second of drafting when it was decided on.
    """

    drafting: bool = True
    left: int = _TRIAL
    trial: bool = False
    span: int = _FIRST
    gain: float = 1.0
    hoped: float = math.inf
    settled: int = 0
    won_at: float = math.inf
    _with: _Way = field(default_factory=_Way)
    _without: _Way = field(default_factory=_Way)

    @property
    def lost(self) -> bool:
        """Whether drafts have lost, whatever is being tried."""
        return self.drafting == self.trial

    def wants(self, gain: float) -> bool:
        """Whether to draft in the next step, which promises to be `gain` times as fast by it."""
        self.gain = gain
        if not self.trial:
            known = self._with if self.drafting else self._without
            enough = len(known.tokens) >= _TRIAL - _SETTLED
            if self.drafting:
                due = gain < _SURE and (self.left <= 0 or self._doubted())
            else:
                due = self.left <= 0 or gain > _HOPE * self.hoped
            if due and enough:
                self._try_other()
            elif due and not self.drafting and not known.tokens:
                self.drafting, self.left = True, _TRIAL  # as if nobody had tried near here
        return self.drafting

    def decline(self) -> None:
        """The next step is not drafted for, whoever would: drafts promise nothing any more.

        A trial of them that nobody goes on with is over.
        """
        if self.trial and self.drafting:
            self.drafting, self.trial, self.left, self.settled = False, False, self.span, 0

    def add(self, drafted: bool, tokens: float, seconds: float) -> None:
        """A step took so long; steps of the other way, which others decided on, do not count."""
        if drafted != self.drafting:
            self.settled = 0
            return
        self.settled += 1
        self.left -= 1
        if self.settled > _SETTLED:
            way = self._with if drafted else self._without
            way.tokens.append(tokens)
            way.seconds.append(seconds)
        if self.trial and self.left <= 0 and self.settled > _SETTLED:
            self._decide()

    def skip(self) -> None:
        """A plain step like those before it, which nobody has timed."""
        if not self.drafting:
            self.settled += 1
            self.left -= 1

    def _doubted(self) -> bool:
        """Whether drafts are so quick by now that plain steps have to be measured anew."""
        if self.settled % _LOOK_EVERY or not self._with.tokens:
            return False
        return self._with.speed() > _QUICKER * self.won_at

    def _try_other(self) -> None:
        self.drafting, self.trial, self.left, self.settled = not self.drafting, True, _TRIAL, 0
        (self._with if self.drafting else self._without).clear()

    def _decide(self) -> None:
        tried, other = (self._with, self._without)[:: 1 if self.drafting else -1]
        handicap = 1.0 if self.drafting else _FOLLOWED
        better = handicap * tried.speed() > _BETTER * other.speed()
        if not better:
            self.drafting, self.settled = not self.drafting, 0
        if self.drafting:
            self.won_at = self._with.speed()
        else:
            self.hoped = self.gain
        self.span = _FIRST if better else min(_LONGER * self.span, _MOST)
        self.trial, self.left = False, self.span


class Duels:
    """One for each number of rows, about."""

    def __init__(self) -> None:
        """Nothing was tried yet."""
        self._duels: dict[int, Duel] = {}
        self._by_rows: dict[int, Duel] = {}

    def of(self, rows: int) -> Duel:
        """That of so many rows."""
        if rows not in self._by_rows:
            key = rows if rows <= _FEW else round(_FEW + math.log(rows / _FEW, _SPREAD))
            self._by_rows[rows] = self._duels.get(key) or self._begun(key)
        return self._by_rows[rows]

    def _begun(self, key: int) -> Duel:
        """A new one, which stands as its neighbour does until something is tried."""
        near = min(self._duels, key=lambda other: abs(other - key), default=None)
        duel = Duel()
        if near is not None and self._duels[near].lost:
            duel = Duel(drafting=False, left=_FIRST, hoped=self._duels[near].hoped)
        self._duels[key] = duel
        return duel
