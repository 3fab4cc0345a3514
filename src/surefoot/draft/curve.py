"""What a step costs, by its tokens."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence

_SAMPLES = 9
_TICK_S = 1e-9  # a coarse clock may see no time pass


class CostCurve:
    """Seconds of a step by its tokens: a running median at measured counts, straight lines between.

    What was measured at the start may be off as a whole, if the machine was busy then. So counts
    that were not met since follow those that were.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        """Start from measured seconds by token count; at least one entry."""
        self._start = {count: max(seconds, _TICK_S) for count, seconds in measured.items()}
        self._start_counts = sorted(measured)
        self._drift = deque([1.0], _SAMPLES)
        self._samples: dict[int, deque[float]] = {}
        self._now = dict(self._start)
        self._counts = self._start_counts
        self._known: dict[int, float] = {}

    def add(self, tokens: int, seconds: float) -> None:
        """One more measurement."""
        seconds = max(seconds, _TICK_S)
        if tokens not in self._samples:
            self._samples[tokens] = deque(maxlen=_SAMPLES)
        self._samples[tokens].append(seconds)
        self._drift.append(seconds / _on_lines(self._start, self._start_counts, tokens))
        drift = statistics.median(self._drift)
        for count, start in self._start.items():
            if count not in self._samples:
                self._now[count] = start * drift
        self._now[tokens] = statistics.median(self._samples[tokens])
        if len(self._now) > len(self._counts):
            self._counts = sorted(self._now)
        self._known.clear()

    def seconds(self, tokens: int) -> float:
        """Estimated seconds of a step of `tokens` tokens."""
        if tokens not in self._known:
            self._known[tokens] = _on_lines(self._now, self._counts, tokens)
        return self._known[tokens]


def _on_lines(seconds: Mapping[int, float], counts: Sequence[int], tokens: int) -> float:
    """The value at `tokens` on straight lines through `seconds`; `counts` are its sorted keys."""
    at = bisect_left(counts, tokens)
    if at < len(counts) and counts[at] == tokens:
        return seconds[tokens]
    if len(counts) == 1 or at == 0:
        return seconds[counts[0]]
    low, high = (counts[at - 1], counts[at]) if at < len(counts) else (counts[-2], counts[-1])
    slope = (seconds[high] - seconds[low]) / (high - low)
    return seconds[low] + max(slope, 0.0) * (tokens - low)
