"""What a check found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from surefoot.checking.cases import Case

FULL_RUN = 20_000
"""From this many compared tokens on, a check must have met enough hard cases."""

LEAST_HARD = 100
_NEAR_TIE_SHARE = 1_000


@dataclass(frozen=True)
class Difference:
    """The first place where a run left the plain one.

    Attributes:
        prompt: label of the prompt; empty if it is about the whole case.
        position: index among the new tokens.
        expected: the plain run's token, None if that had ended.
        got: the other run's token, None if that had ended.
        error: what went wrong, if more did than a choice.
    """

    prompt: str
    position: int
    expected: int | None
    got: int | None
    error: str | None = None

    def sentence(self) -> str:
        """The difference in words."""
        where = f"{self.prompt}, new token {self.position}: " if self.prompt else ""
        if self.error is not None:
            return f"{where}{self.error}"
        return f"{where}{_token(self.expected)} expected, {_token(self.got)} came"


def _token(token: int | None) -> str:
    return "the end" if token is None else f"token {token}"


@dataclass(frozen=True)
class CaseReport:
    """What came of one case.

    Attributes:
        case: its settings.
        tokens: compared, up to and with the first difference of each request.
        differences: first differences that are no near ties, and whatever else went wrong.
        near_ties: first differences that the arithmetic left open.
        first_difference: the first of `differences`.
        partial_accepts: verify rows of which some drafted tokens were kept and some were not.
        longest: new tokens of its longest answer.
        cache_hits: requests that found pages in the prefix cache.
        preemptions: how often a request gave its pages back and came again.
    """

    case: Case
    tokens: int
    differences: int
    near_ties: int
    first_difference: Difference | None
    partial_accepts: int
    longest: int
    cache_hits: int
    preemptions: int

    def as_json(self) -> dict[str, object]:
        """The case as `surefoot check --json` shows it."""
        case = self.case
        return {
            "name": case.name,
            "drafter": case.drafter,
            "draft_tokens": case.depth_name,
            "sampling": case.sampling,
            "batch": case.batch,
            "prefix_cache": case.prefix_cache,
            "chunk": case.chunk,
            "tokens": self.tokens,
            "longest_answer": self.longest,
            "differences": self.differences,
            "first_difference": self.first_difference and asdict(self.first_difference),
        }


@dataclass(frozen=True)
class Report:
    """What came of a check.

    Attributes:
        model: as the user named it.
        bitwise: whether every difference counts.
        wanted: tokens that were to be compared; None if one round of cases was asked for.
        cases: in the order they ran.
        seconds: wall-clock time, loading not counted.
    """

    model: str
    bitwise: bool
    wanted: int | None
    cases: Sequence[CaseReport]
    seconds: float

    @property
    def tokens_compared(self) -> int:
        """Over all cases."""
        return sum(case.tokens for case in self.cases)

    @property
    def differences(self) -> int:
        """Over all cases, near ties not counted."""
        return sum(case.differences for case in self.cases)

    @property
    def near_ties(self) -> int:
        """Over all cases."""
        return sum(case.near_ties for case in self.cases)

    @property
    def longest(self) -> int:
        """New tokens of the longest answer."""
        return max((case.longest for case in self.cases), default=0)

    @property
    def hard(self) -> dict[str, int]:
        """Counts that show that more than easy cases were met."""
        return {
            "partial_accepts": sum(case.partial_accepts for case in self.cases),
            "cache_hits": sum(case.cache_hits for case in self.cases),
            "preemptions": sum(case.preemptions for case in self.cases),
        }

    @property
    def passed(self) -> bool:
        """Whether there is nothing to object to."""
        return not self.objections()

    def objections(self) -> list[str]:
        """Why the check failed, a phrase each; none if it passed."""
        found = []
        if self.differences:
            found.append(_counted(self.differences, "difference"))
        if self.tokens_compared == 0:
            found.append("no tokens were compared")
        if self.near_ties * _NEAR_TIE_SHARE > self.tokens_compared:
            found.append(f"more than 1 near tie in {_NEAR_TIE_SHARE:,} tokens")
        if self.wanted is not None and self.wanted >= FULL_RUN:
            found += [
                f"only {count} {name.replace('_', ' ')}, a full run needs {LEAST_HARD}"
                for name, count in self.hard.items()
                if count < LEAST_HARD
            ]
        return found

    def verdict(self) -> str:
        """One line: PASS or FAIL, and the numbers."""
        hard = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in self.hard.items())
        mode = "bitwise" if self.bitwise else _counted(self.near_ties, "near tie")
        numbers = (
            f"{self.tokens_compared:,} tokens compared in {_counted(len(self.cases), 'case')}, "
            f"{_counted(self.differences, 'difference')} ({mode}); {hard}, answers of up to "
            f"{_counted(self.longest, 'token')}; {self.seconds:.0f} s"
        )
        found = self.objections()
        if found:
            return f"FAIL: {'; '.join(found)}. {numbers}"
        missed = [f"no {name.replace('_', ' ')}" for name, count in self.hard.items() if not count]
        more = f"; {' and '.join(missed)} came up: --tokens compares more" if missed else ""
        return f"PASS: {numbers}{more}"

    def as_json(self) -> dict[str, object]:
        """The report as `surefoot check --json` shows it."""
        return {
            "passed": self.passed,
            "model": self.model,
            "tokens_compared": self.tokens_compared,
            "differences": self.differences,
            "near_ties": self.near_ties,
            "longest_answer": self.longest,
            "cases": [case.as_json() for case in self.cases],
            **self.hard,
            "bitwise": self.bitwise,
            "seconds": round(self.seconds, 1),
        }


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
