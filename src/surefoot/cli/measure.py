"""Times engines against each other, in turns, and counts what their drafters guessed right."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.cli.lanes import Lane
from surefoot.cli.show import Screen
from surefoot.engine.engine import Engine
from surefoot.errors import SurefootError
from surefoot.params import SamplingParams
from surefoot.request import FinishReason, Request
from surefoot.results import Speculation

_WARM_TOKENS = 8
_MOST_WARM_PROMPT = 64


@dataclass(frozen=True)
class Load:
    """What every lane computes, and how often it is timed.

    Attributes:
        prompts: token ids; all of them run at once.
        new_tokens: of each request.
        repeats: timed runs of each lane.
    """

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    repeats: int

    def warm(self) -> Load:
        """A short run of the same width."""
        prompts = [prompt[:_MOST_WARM_PROMPT] for prompt in self.prompts]
        return Load(prompts, min(_WARM_TOKENS, self.new_tokens), 1)


@dataclass(frozen=True)
class Trial:
    """One timed run of a batch.

    Attributes:
        decode_tokens_per_s: new tokens per second after every request had its first.
        prefill_tokens_per_s: prompt tokens per second until then.
        ttft_s: mean seconds to a request's first token.
        accept_length: tokens committed per verify row.
    """

    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    ttft_s: float
    accept_length: float


@dataclass(frozen=True)
class BenchRun:
    """Medians over the trials of one kind; the fields are the keys of the JSON output.

    Attributes:
        batch: requests at once.
        drafter: who guessed.
        draft_tokens: how deep; "auto", or 0 without drafter.
        prompt_tokens: mean length of a prompt.
        new_tokens: of each request.
        decode_tokens_per_s: see Trial.
        prefill_tokens_per_s: see Trial.
        ttft_s: see Trial.
        accept_length: see Trial.
        speedup: decode speed over that of no drafter.
    """

    batch: int
    drafter: str
    draft_tokens: int | str
    prompt_tokens: int
    new_tokens: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    ttft_s: float
    accept_length: float
    speedup: float


def measure(lanes: Sequence[Lane], loads: Sequence[Load], screen: Screen) -> list[BenchRun]:
    """Time every lane on every load: each is warmed up, then all take turns.

    Args:
        lanes: what is compared; the first has no drafter.
        loads: what they compute.
        screen: where progress is shown.
    """
    runs: list[BenchRun] = []
    done = 0
    total = len(lanes) * sum(1 + load.repeats for load in loads)
    with screen.counting("timing", total) as report:
        for load in loads:
            trials: list[list[Trial]] = [[] for _ in lanes]
            for turn in range(1 + load.repeats):
                for lane, own in zip(lanes, trials, strict=True):
                    report(done, f"batch {len(load.prompts)}, {lane.drafter} {lane.draft_tokens}")
                    done += 1
                    if turn == 0:
                        time_batch(lane.engine, load.warm())
                    else:
                        own.append(time_batch(lane.engine, load))
            runs += _runs(lanes, trials, load)
    return runs


def time_batch(engine: Engine, load: Load) -> Trial:
    """Run one load once, greedy and without end tokens, on an engine that is idle.

    Raises:
        SurefootError: a request ended with an error.
    """
    params = SamplingParams(max_tokens=load.new_tokens, temperature=0, ignore_eos=True)
    begun = time.perf_counter()
    requests = [engine.submit(list(prompt), params)[0] for prompt in load.prompts]
    first: dict[Request, float] = {}
    tokens = before = 0
    started = now = begun
    while not engine.idle:
        emissions = engine.step()
        now = time.perf_counter()
        tokens += sum(len(emission.token_ids) for emission in emissions)
        waiting = len(first) < len(requests)
        for emission in emissions:
            first.setdefault(emission.request, now)
        if waiting and len(first) == len(requests):
            started, before = now, tokens
    _check_ends(requests)
    return Trial(
        decode_tokens_per_s=_per_second(tokens - before, now - started),
        prefill_tokens_per_s=_per_second(sum(map(len, load.prompts)), started - begun),
        ttft_s=statistics.mean(first.values()) - begun,
        accept_length=Speculation.total("", requests).accept_length,
    )


def peak_memory() -> int:
    """Most bytes of main memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _runs(lanes: Sequence[Lane], trials: Sequence[Sequence[Trial]], load: Load) -> list[BenchRun]:
    plain = _medians(trials[0])
    runs = []
    for lane, own in zip(lanes, trials, strict=True):
        median = _medians(own)
        runs.append(
            BenchRun(
                batch=len(load.prompts),
                drafter=lane.drafter,
                draft_tokens=lane.draft_tokens,
                prompt_tokens=round(statistics.mean(map(len, load.prompts))),
                new_tokens=load.new_tokens,
                decode_tokens_per_s=median.decode_tokens_per_s,
                prefill_tokens_per_s=median.prefill_tokens_per_s,
                ttft_s=median.ttft_s,
                accept_length=median.accept_length,
                speedup=_ratio(median.decode_tokens_per_s, plain.decode_tokens_per_s),
            )
        )
    return runs


def _medians(trials: Sequence[Trial]) -> Trial:
    return Trial(
        decode_tokens_per_s=statistics.median(trial.decode_tokens_per_s for trial in trials),
        prefill_tokens_per_s=statistics.median(trial.prefill_tokens_per_s for trial in trials),
        ttft_s=statistics.median(trial.ttft_s for trial in trials),
        accept_length=statistics.median(trial.accept_length for trial in trials),
    )


def _check_ends(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.finish_reason is not FinishReason.LENGTH:
            raise SurefootError(f"a request ended early while it was timed: {request.error}")


def _per_second(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _ratio(value: float, base: float) -> float:
    return value / base if base > 0 else 0.0
