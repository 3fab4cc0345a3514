"""Runs the cases of a check and compares each with plain runs of the same requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from surefoot.checking.cases import Amount, Ask, Case, Scope, plan
from surefoot.checking.compare import NearTies, difference_of
from surefoot.checking.drive import Tally, drive
from surefoot.checking.engines import SAID_BETWEEN, Engines, Models
from surefoot.checking.prompts import Prompt
from surefoot.checking.report import CaseReport, Difference, Report
from surefoot.config import EngineConfig
from surefoot.engine.engine import Engine
from surefoot.request import Request

_TOGETHER = 8
_ALONE_EVERY = 4


@dataclass(frozen=True)
class _Told:
    """An ask, its finished plain run, and the request that a case made of it."""

    ask: Ask
    plain: Request
    request: Request


class Watch:
    """Follows a check; this one looks away."""

    def begins(self, what: str) -> None:
        """Now comes this plain run or case."""

    def expects(self, tokens: int) -> None:
        """So many tokens will be compared in all, as far as known now."""

    def advances(self, tokens: int) -> None:
        """A case brought so many more tokens."""

    def ends(self, report: CaseReport) -> None:
        """A case was compared."""


class Checker:
    """Compares the tokens of each case with those of plain runs, each of which is made once."""

    def __init__(
        self,
        models: Models,
        config: EngineConfig,
        prompts: Sequence[Prompt],
        amount: Amount,
        watch: Watch | None = None,
    ) -> None:
        """Prepare the plain runs.

        Args:
            models: what is checked.
            config: device, memory and lengths; the cases set what they are about.
            prompts: at least one.
            amount: how much is checked.
            watch: is told how it goes.

        Raises:
            PromptError: no prompts were given.
            SettingError: the config does not suit the model.
        """
        self._prompts, self._amount, self._watch = prompts, amount, watch or Watch()
        self._engines = Engines(models, config, prompts, amount)
        self._bitwise = models.target.backend.capabilities.bitwise
        self._solo = self._engines.plain(1)
        # Where results do not depend on the batch, most plain runs are made together. Some are
        # made alone all the same: that they do not depend on it is part of what is checked.
        self._together = self._engines.plain(_TOGETHER) if self._bitwise else self._solo
        self._plain_runs: dict[Ask, Request] = {}
        self._near = NearTies(self._solo)

    def run(self, scope: Scope) -> Report:
        """Run one round of cases, or as many as it takes to compare the wanted tokens.

        Raises:
            PromptError: a prompt has no room for a new token.
            SettingError: a drafter or a depth that this model cannot have.
        """
        begun = time.perf_counter()
        reports = self._run(scope)
        seconds = time.perf_counter() - begun
        name = self._engines.models.target.name
        return Report(name, self._bitwise, self._amount.tokens, reports, seconds)

    def _run(self, scope: Scope) -> list[CaseReport]:
        reports: list[CaseReport] = []
        wanted, compared = self._amount.tokens, 0
        for cases in plan(scope, self._amount.seed):
            self._watch.expects(wanted or self._most_tokens(cases))
            for case in cases:
                reports.append(self._case(case))
                compared += reports[-1].tokens
                if wanted is not None and compared >= wanted:
                    return reports
            if wanted is None or compared == 0:
                break
        return reports

    def _most_tokens(self, cases: Sequence[Case]) -> int:
        engines = self._engines
        asked = (ask for case in cases for ask in (*engines.asks(case), *engines.follow_ups(case)))
        return sum(map(engines.amount.new_tokens_of, asked))

    def _case(self, case: Case) -> CaseReport:
        """Run a case, one turn and then, in the same engine, the next."""
        engine, drafter = self._engines.of(case)
        told: list[_Told] = []
        tally = Tally()
        for asks in (self._engines.asks(case), self._possible(self._engines.follow_ups(case))):
            if not asks or tally.fault is not None:
                continue
            self._run_plainly(asks)
            self._watch.begins(case.name)
            turn = [
                _Told(ask, self._plain_runs[ask], self._engines.submit(engine, ask, prompt))
                for ask, prompt in zip(asks, map(self._prompt, asks), strict=True)
            ]
            if drafter is not None:
                for each in turn:
                    drafter.know(each.request.id, each.plain.tokens)
            requests = [each.request for each in turn]
            tally.add(drive(engine, case, requests, self._watch.advances))
            told += turn
        engine.close()
        report = self._compared(case, told, tally)
        self._watch.ends(report)
        return report

    def _prompt(self, ask: Ask) -> Sequence[int]:
        """The tokens of an ask's prompt; those of a second turn begin with the first plain run."""
        own = self._prompts[ask.prompt].tokens
        if ask.turn == 0:
            return own
        return [*self._plain_runs[replace(ask, turn=0)].tokens, *own[:SAID_BETWEEN]]

    def _label(self, ask: Ask) -> str:
        label = self._prompts[ask.prompt].label
        return f"{label} (next turn)" if ask.turn else label

    def _possible(self, asks: Sequence[Ask]) -> list[Ask]:
        """Second turns that have room for a token; their first turns are run if need be."""
        self._run_plainly([replace(ask, turn=0) for ask in asks])
        longest = self._engines.longest
        return [ask for ask in asks if len(self._prompt(ask)) < longest]

    def _run_plainly(self, asks: Sequence[Ask]) -> None:
        """Make the plain runs that were not made before."""
        missing = list(dict.fromkeys(ask for ask in asks if ask not in self._plain_runs))
        alone = missing[::_ALONE_EVERY] if self._bitwise else missing
        for ask in alone:
            self._finish_plainly(self._solo, [ask])
        self._finish_plainly(self._together, [ask for ask in missing if ask not in alone])

    def _finish_plainly(self, engine: Engine, asks: Sequence[Ask]) -> None:
        if asks:
            labels = dict.fromkeys(self._label(ask) for ask in asks)
            self._watch.begins(f"plain run of {', '.join(labels)}")
        for ask in asks:
            self._plain_runs[ask] = self._engines.submit(engine, ask, self._prompt(ask))
        while not engine.idle:
            engine.step()

    def _compared(self, case: Case, told: Sequence[_Told], tally: Tally) -> CaseReport:
        tokens, near_ties, found = 0, 0, []
        for each in told:
            difference = difference_of(self._label(each.ask), each.plain, each.request)
            if difference is None:
                tokens += each.plain.output_length
                continue
            tokens += min(difference.position + 1, each.plain.output_length)
            if not self._bitwise and self._near.holds(each.plain, difference):
                near_ties += 1
            else:
                found.append(difference)
        if tally.fault is not None:
            found.append(Difference("", 0, None, None, tally.fault))
        return CaseReport(
            case=case,
            tokens=tokens,
            differences=len(found),
            near_ties=near_ties,
            first_difference=found[0] if found else None,
            partial_accepts=tally.partial_accepts,
            longest=max((each.plain.output_length for each in told), default=0),
            cache_hits=sum(each.request.cached_tokens > 0 for each in told),
            preemptions=sum(each.request.preemptions for each in told),
        )
