"""Measures what a step costs by its number of tokens, for the choice of depth."""

from __future__ import annotations

import time

from surefoot.engine.runner import Forward
from surefoot.ids import SINK_PAGE, SINK_SLOT
from surefoot.step import Row, Step

_BUDGET_S = 1.5
_REPEATS = 3


def measure_steps(forward: Forward, page_tokens: int, most: int) -> dict[int, float]:
    """Seconds of a step by its tokens: 1, 2, 3, 4, 6, 8, 12, ... up to `most`, best of a few runs.

    The rows write to the sink only. Stops early when it has taken long enough; what is not
    measured is continued as a straight line.
    """
    measured: dict[int, float] = {}
    begun = time.perf_counter()
    for tokens in _counts(most):
        step = Step.of([_row(page_tokens)] * tokens, page_tokens)
        times = [_timed(forward, step) for _ in range(_REPEATS)]
        measured[tokens] = min(times)
        if time.perf_counter() - begun > _BUDGET_S and len(measured) > 1:
            break
    return measured


def _counts(most: int) -> list[int]:
    powers = [1 << bit for bit in range(most.bit_length())]
    between = [3 << bit for bit in range(most.bit_length())]
    return sorted(count for count in {*powers, *between} if count <= most)


def _timed(forward: Forward, step: Step) -> float:
    begun = time.perf_counter()
    _, logits = forward(step)
    logits.sum().item()
    return time.perf_counter() - begun


def _row(page_tokens: int) -> Row:
    """One token with nearly a page of context, all of it in the sink; it completes no block."""
    first = max(0, page_tokens - 2)
    return Row([0], first, 1, [SINK_PAGE], SINK_SLOT, 0, 1, first)
