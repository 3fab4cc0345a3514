"""Results as JSON objects and as the lines that follow a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

from surefoot.cli.show import amount
from surefoot.results import Completion, Result

if TYPE_CHECKING:
    from surefoot.cli.session import Run


def result_entries(results: Sequence[Result]) -> list[dict[str, object]]:
    """One entry for every sample of every prompt, prompt by prompt.

    `speculation` and `timing` are those of the prompt, all its samples together.
    """
    return [_entry(result, output) for result in results for output in result.outputs]


def _entry(result: Result, output: Completion) -> dict[str, object]:
    entry: dict[str, object] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "prompt_tokens": len(result.prompt_token_ids),
        "completion_tokens": len(output.token_ids),
        "finish_reason": output.finish_reason,
        "cached_tokens": result.cached_tokens,
        "speculation": asdict(result.speculation),
        "timing": asdict(result.timing),
    }
    if output.logprobs is not None:
        entry["logprobs"] = output.logprobs
    return entry


def summary(results: Sequence[Result], tokens_per_s: float) -> str:
    """Tokens, speed, drafter, accept length and cached tokens, for people."""
    tokens = sum(len(output.token_ids) for result in results for output in result.outputs)
    parts = [amount(tokens, "token"), f"{tokens_per_s:.1f} tok/s"]
    drafter = results[0].speculation.drafter
    if drafter == "none":
        parts.append("no drafter")
    else:
        parts += [drafter, f"accept length {accept_length(results):.2f}"]
    if cached := sum(result.cached_tokens for result in results):
        prompt = sum(len(result.prompt_token_ids) for result in results)
        parts.append(f"{cached:,} of {amount(prompt, 'prompt token')} from the cache")
    return ", ".join(parts)


def accept_length(results: Sequence[Result]) -> float:
    """Tokens committed per verify row over several results: 1 + accepted / drafts."""
    drafts = sum(result.speculation.drafts for result in results)
    accepted = sum(result.speculation.accepted_tokens for result in results)
    return 1 + accepted / drafts if drafts else 1.0


@dataclass(frozen=True)
class Comparison:
    """The same jobs with a drafter and without.

    Attributes:
        drafter: who guessed.
        tokens_per_s: speed with the drafter, from the first new token to the last.
        plain_tokens_per_s: speed without.
        accept_length: tokens committed per verify row.
        identical: whether every token of every sample is the same, every time.
        times: how often each was done; the speeds are medians.
    """

    drafter: str
    tokens_per_s: float
    plain_tokens_per_s: float
    accept_length: float
    identical: bool
    times: int

    @classmethod
    def of(cls, runs: Sequence[Run], plain: Sequence[Run]) -> Comparison:
        """Compare runs with as many of the same jobs without drafter."""
        results = runs[0].results
        tokens = runs[0].token_ids
        return cls(
            drafter=results[0].speculation.drafter,
            tokens_per_s=median(run.tokens_per_s for run in runs),
            plain_tokens_per_s=median(run.tokens_per_s for run in plain),
            accept_length=accept_length(results),
            identical=all(run.token_ids == tokens for run in (*runs, *plain)),
            times=len(runs),
        )

    @property
    def speedup(self) -> float:
        """How many times as fast the drafter made it; 0 where there was nothing to time."""
        return self.tokens_per_s / self.plain_tokens_per_s if self.plain_tokens_per_s else 0.0

    def entry(self) -> dict[str, object]:
        """As a JSON object."""
        return {**asdict(self), "speedup": self.speedup}

    def lines(self) -> list[str]:
        """For people."""
        width = max(len(self.drafter), len("no drafter"))
        return [
            f"{self.drafter:{width}}  {self.tokens_per_s:8.1f} tok/s, "
            f"accept length {self.accept_length:.2f}",
            f"{'no drafter':{width}}  {self.plain_tokens_per_s:8.1f} tok/s",
            f"{'speedup':{width}}  {self.speedup:8.2f}x{_of_runs(self.times)}",
            f"output identical: {'yes' if self.identical else 'no'}",
        ]


def _of_runs(times: int) -> str:
    return f", medians of {times} runs in turn" if times > 1 else ""
