"""Drives an engine through a case, disturbs it, and looks at what happens."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from surefoot.checking.cases import Case
from surefoot.engine.engine import Engine
from surefoot.errors import SurefootError
from surefoot.request import Request, Status

log = logging.getLogger(__name__)

_MOST_FORCED = 2
_FORCE_CHANCE = 0.2
_STEPS_PER_TOKEN = 8


@dataclass
class Tally:
    """What happened while a case ran.

    Attributes:
        partial_accepts: verify rows of which some drafted tokens were kept and some were not.
        steps: how many were made.
        fault: what broke on the way or does not add up at the end.
    """

    partial_accepts: int = 0
    steps: int = 0
    fault: str | None = None
    _seen: dict[Request, tuple[int, int]] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Add what happened in a later turn of the case."""
        self.partial_accepts += other.partial_accepts
        self.steps += other.steps
        self.fault = self.fault or other.fault

    def look(self, requests: Sequence[Request]) -> None:
        """Count the verify rows of the step that was just made; a request has one at most."""
        self.steps += 1
        for request in requests:
            drafted, accepted = request.speculation.drafted, request.speculation.accepted
            before = self._seen.get(request, (0, 0))
            self.partial_accepts += 0 < accepted - before[1] < drafted - before[0]
            self._seen[request] = drafted, accepted


def drive(
    engine: Engine, case: Case, requests: Sequence[Request], on_tokens: Callable[[int], None]
) -> Tally:
    """Run all requests of a case to their end.

    Args:
        engine: made for the case; `requests` are all it has.
        case: says whether running requests are pre-empted at random steps.
        requests: in the order they came.
        on_tokens: told how many tokens each step brought.
    """
    tally = Tally()
    try:
        _run(engine, case, requests, tally, on_tokens)
        tally.fault = tally.fault or _audit(engine)
    except SurefootError:
        raise
    except Exception as error:
        # Whatever broke is a finding of the check, and the other cases are still of use.
        log.exception("case %s broke", case.name)
        tally.fault = f"{type(error).__name__}: {error}"
    return tally


def _run(
    engine: Engine,
    case: Case,
    requests: Sequence[Request],
    tally: Tally,
    on_tokens: Callable[[int], None],
) -> None:
    rng = random.Random(f"{case.seed}/{case.number}")
    most_steps = 100 + _STEPS_PER_TOKEN * sum(request.length_limit for request in requests)
    while not engine.idle:
        if tally.steps >= most_steps:
            tally.fault = f"not done after {tally.steps} steps"
            return
        emissions = engine.step()
        tally.look(requests)
        on_tokens(sum(len(emission.token_ids) for emission in emissions))
        if case.pressure == "forced" and rng.random() < _FORCE_CHANCE:
            _preempt(engine, requests, rng)


def _preempt(engine: Engine, requests: Sequence[Request], rng: random.Random) -> None:
    """Pre-empt one running request, or all; none so often that it never comes to an end."""
    running = [
        request
        for request in requests
        if request.status is Status.RUNNING and request.preemptions < _MOST_FORCED
    ]
    if running and rng.random() < 0.5:
        running = [rng.choice(running)]
    # The youngest first, so that the line keeps its order.
    for request in reversed(running):
        engine.parts.scheduler.preempt(request)


def _audit(engine: Engine) -> str | None:
    """What does not add up now that nobody runs."""
    ledger, usage = engine.parts.ledger, engine.usage
    ledger.audit()
    limits = ledger.limits
    if usage.held_pages or usage.free_pages + usage.cached_pages != limits.pages:
        return (
            f"{usage.held_pages} pages are held though nobody runs; {usage.free_pages} are free "
            f"and {usage.cached_pages} cached of {limits.pages}"
        )
    if ledger.free_slots != limits.slots:
        return f"{ledger.free_slots} of {limits.slots} slots are free though nobody runs"
    return None
