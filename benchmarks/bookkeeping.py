"""Cost of scheduler, ledger and prefix cache without a model, by rows and cached pages.

python benchmarks/bookkeeping.py
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from measure import save

from surefoot.engine.scheduler import Scheduler, SchedulerLimits
from surefoot.ids import RequestId
from surefoot.params import SamplingParams
from surefoot.request import FinishReason, Request
from surefoot.state.ledger import Ledger, LedgerLimits

PAGE = 32


def make(rows: int, cached_pages: int) -> tuple[Scheduler, Ledger]:
    pages = cached_pages + rows * 40
    ledger = Ledger(LedgerLimits(pages, rows, 0, PAGE, bounded=False))
    return Scheduler(ledger, SchedulerLimits(rows, rows * 10, 256)), ledger


def fill_cache(ledger: Ledger, pages: int) -> None:
    """Publish distinct prompts of 50 pages each until `pages` pages are cached."""
    rng = random.Random(0)
    while ledger.cached_pages + 50 <= pages:
        tokens = [rng.randrange(50_000) for _ in range(50 * PAGE + 1)]
        lease = ledger.admit(tokens, 1)
        assert lease is not None
        assert ledger.reserve(lease, len(tokens))
        ledger.commit(lease, len(tokens))
        ledger.release(lease, tokens)
    ledger.take_work()


def request(number: int, rng: random.Random) -> Request:
    prompt = [rng.randrange(50_000) for _ in range(64)]
    params = SamplingParams(max_tokens=512)
    return Request(RequestId(number), prompt, len(prompt), params, number, len(prompt) + 512)


def run(rows: int, cached_pages: int, steps: int) -> float:
    """Median microseconds per row and step of decoding, with accepts of 1 to 5 tokens."""
    scheduler, ledger = make(rows, cached_pages)
    fill_cache(ledger, cached_pages)
    rng = random.Random(1)
    for number in range(rows):
        scheduler.add(request(number, rng))
    times: list[float] = []
    number, running = rows, rows
    for _ in range(steps):
        begun = time.perf_counter()
        planned = scheduler.plan(lambda requests, others: [4] * len(requests))
        ledger.take_work()
        for row in planned:
            accepted = rng.randrange(5) if row.depth >= 4 else 0
            if row.final:
                row.request.tokens.extend([7] * (accepted + 1))
            scheduler.commit(row, row.count + (accepted if row.final else 0))
            scheduler.publish(row)
        ended = [row.request for row in planned if len(row.request.tokens) >= 560]
        for ending in ended:
            scheduler.finish(ending, FinishReason.LENGTH)
            scheduler.add(request(number, rng))
            number += 1
        times.append((time.perf_counter() - begun) / max(len(planned), 1))
        running = len(planned)
    ledger.audit()
    assert running > 0
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    record: dict[str, object] = {}
    for rows, cached in (
        (1, 0),
        (64, 0),
        (64, 100_000),
        (256, 100_000),
        (1024, 0),
        (1024, 100_000),
    ):
        cost = run(rows, cached, options.steps)
        record[f"{rows} rows, {cached} cached pages"] = cost
        print(
            f"{rows:5d} rows {cached:7d} cached pages {cost:6.2f} us per row and step", flush=True
        )
    save("bookkeeping", record)


if __name__ == "__main__":
    main()
