"""Shared by the benchmark scripts: load once, decode, time, and compare side by side."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.config import make_config
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel
from surefoot.params import SamplingParams
from surefoot.request import Request

HERE = Path(__file__).parent
RESULTS = HERE / "results"
STRETCH = 4  # steps that one engine makes before it is another one's turn


@dataclass(frozen=True)
class Decoded:
    """One timed run: decode speed, and what drafting did.

    With drafts requests end at different times. `tokens_per_s` counts up to the last one's end,
    `full_per_s` only as long as all of them are decoding.
    """

    tokens_per_s: float
    full_per_s: float
    drafts: int
    accepted: int
    tokens: tuple[tuple[int, ...], ...]


def load_prompts(name: str) -> list[dict[str, str]]:
    """The prompts of one file in benchmarks/prompts."""
    lines = (HERE / "prompts" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def engine_on(model: LoadedModel, **settings: object) -> Engine:
    """An engine for timing: no prefix cache, so that every run prefills."""
    return Engine(model, make_config(prefix_cache=False, memory=2 << 30, **settings))


def decode(
    engine: Engine, prompts: Sequence[str | Sequence[int]], new_tokens: int, temperature: float = 0
) -> Decoded:
    """Decode speed of one batch, from the moment that all prompts are computed."""
    requests = _started(engine, prompts, new_tokens, temperature)
    before = sum(request.output_length for request in requests)
    begun = time.perf_counter()
    full = 0.0
    while not engine.idle:
        engine.step()
        if not full and any(request.finish_reason for request in requests):
            full = _made(requests, before) / (time.perf_counter() - begun)
    seconds = time.perf_counter() - begun
    return Decoded(
        tokens_per_s=_made(requests, before) / seconds,
        full_per_s=full,
        drafts=sum(request.speculation.drafts for request in requests),
        accepted=sum(request.speculation.accepted for request in requests),
        tokens=tuple(tuple(request.output) for request in requests),
    )


def _started(
    engine: Engine, prompts: Sequence[str | Sequence[int]], new_tokens: int, temperature: float
) -> list[Request]:
    """Requests whose prompts are all computed."""
    params = SamplingParams(
        max_tokens=new_tokens, temperature=temperature, seed=7, ignore_eos=True, n=1
    )
    requests = [request for prompt in prompts for request in engine.submit(prompt, params)]
    started: set[object] = set()
    while len(started) < len(requests):
        started |= {emission.request for emission in engine.step() if emission.token_ids}
    return requests


def decode_in_turn(
    engines: dict[str, Engine], prompts: Sequence[str], new_tokens: int, temperature: float
) -> dict[str, float]:
    """Tokens a second of engines that decode the same prompts, a few steps each in turn.

    A machine whose speed moves within seconds moves for all of them. Counts until a first request
    ends.
    """
    running = {
        name: _started(engine, prompts, new_tokens, temperature) for name, engine in engines.items()
    }
    before = {name: _made(requests, 0) for name, requests in running.items()}
    seconds = dict.fromkeys(engines, 0.0)
    ended = False
    while not ended:
        for name, engine in engines.items():
            begun = time.perf_counter()
            for _ in range(STRETCH):
                engine.step()
                if any(request.finish_reason for request in running[name]):
                    ended = True
                    break
            seconds[name] += time.perf_counter() - begun
    counted = {name: _made(requests, 0) for name, requests in running.items()}
    for engine in engines.values():
        while not engine.idle:
            engine.step()
    return {name: (counted[name] - before[name]) / seconds[name] for name in engines}


def _made(requests: Sequence[Request], before: int) -> int:
    return sum(request.output_length for request in requests) - before


def alternate(sides: dict[str, Callable[[], float]], pairs: int) -> dict[str, list[float]]:
    """Run all sides in turn, `pairs` times, after one warm-up of each."""
    for run in sides.values():
        run()
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(pairs):
        for name, run in sides.items():
            speeds[name].append(run())
    return speeds


def ratio(ours: Sequence[float], base: Sequence[float]) -> float:
    """Median of the ratios pair by pair."""
    return statistics.median(a / b for a, b in zip(ours, base, strict=True))


def print_speeds(batch: int, speeds: dict[str, list[float]], base: str) -> None:
    """A line for each side: median tokens a second, and the ratio to the side called `base`."""
    for name, values in speeds.items():
        print(
            f"batch {batch:3d} {name:9s} {statistics.median(values):7.1f} tok/s "
            f"{ratio(values, speeds[base]):5.2f}x",
            flush=True,
        )


def save(name: str, record: dict[str, object]) -> None:
    """Append one record to benchmarks/results/NAME.jsonl."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
