"""Runs the cases of a check and compares each with plain runs of the same requests."""

from __future__ import annotations

import time
from collections.abc import Sequence

from surefoot.checking.cases import Amount, Ask, Case, Scope, plan
from surefoot.checking.compare import NearTies, difference_of
from surefoot.checking.drive import Tally, drive
from surefoot.checking.engines import Engines, Models
from surefoot.checking.prompts import Prompt
from surefoot.checking.report import CaseReport, Difference, Report
from surefoot.config import EngineConfig
from surefoot.request import Request


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
        self._engines = Engines(models, config, prompts, amount.new_tokens)
        self._plain = self._engines.plain()
        self._plain_runs: dict[Ask, Request] = {}
        self._near = NearTies(self._plain)
        self._bitwise = models.target.backend.capabilities.bitwise

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
        asked = sum(len(case.asks(len(self._prompts))) for case in cases)
        return asked * self._amount.new_tokens

    def _case(self, case: Case) -> CaseReport:
        asks = case.asks(len(self._prompts))
        plain = [self._plain_run(ask) for ask in asks]
        self._watch.begins(case.name)
        engine, drafter = self._engines.of(case)
        requests = [self._engines.submit(engine, ask) for ask in asks]
        if drafter is not None:
            for request, known in zip(requests, plain, strict=True):
                drafter.know(request.id, known.tokens)
        tally = drive(engine, case, requests, self._watch.advances)
        engine.close()
        report = self._compared(case, plain, requests, tally)
        self._watch.ends(report)
        return report

    def _plain_run(self, ask: Ask) -> Request:
        """The finished request of a plain run, made now if it was not before."""
        if ask not in self._plain_runs:
            label = self._prompts[ask.prompt].label
            self._watch.begins(f"plain run of {label}, {ask.sampling}")
            request = self._engines.submit(self._plain, ask)
            while not self._plain.idle:
                self._plain.step()
            self._plain_runs[ask] = request
        return self._plain_runs[ask]

    def _compared(
        self, case: Case, plain: Sequence[Request], requests: Sequence[Request], tally: Tally
    ) -> CaseReport:
        tokens, near_ties, found = 0, 0, []
        labels = [self._prompts[ask.prompt].label for ask in case.asks(len(self._prompts))]
        for label, right, request in zip(labels, plain, requests, strict=True):
            difference = difference_of(label, right, request)
            if difference is None:
                tokens += right.output_length
                continue
            tokens += min(difference.position + 1, right.output_length)
            if not self._bitwise and self._near.holds(right, difference):
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
            cache_hits=sum(request.cached_tokens > 0 for request in requests),
            preemptions=sum(request.preemptions for request in requests),
        )
