"""What a decoded token costs by the length of its context, and what choosing entries saves.

python benchmarks/context.py steps --model tiny-dsv4 --tokens 1024 4096 16384 --batch 1 8
python benchmarks/context.py choice --model tiny-dsv4 --times 8 32 128 --batch 1 8
python benchmarks/context.py operators --model tiny-dsv4 --times 8 32 128 --batch 1 8

steps      whole steps without drafts, by tokens of context
choice     whole steps of a model whose indexer chooses, against the same model with a config that
           makes it take all entries, which needs no scores; with `times` as many entries as it
           usually chooses
operators  the indexer and attention to the chosen entries, against attention to all entries without
           an indexer, on made-up caches of the model's sizes

Lengths and sides take turns step by step, and medians are told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import alternate, engine_on, ratio, save

from surefoot.backend.operands import Entries, Latents, RowLayout
from surefoot.backend.protocol import Backend
from surefoot.config import make_config
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel, load
from surefoot.model.deepseek_v4_config import SPARSE, LatentConfig, read_config
from surefoot.params import SamplingParams
from surefoot.weights.locate import locate

CALLS = 20  # of operators in a row


def opened(model: LoadedModel, context: int, options: argparse.Namespace, batch: int) -> Engine:
    """An engine that decodes `batch` requests with so many tokens of context.

    The first ones go on while the others' prompts are computed, which makes them a little longer.
    """
    steps = options.rounds + options.warm_up
    room = 1 + steps + batch * (1 + context // make_config().prefill_chunk)
    engine = engine_on(model, drafter="none", max_rows=batch, max_model_len=context + room)
    vocab = model.model.description.vocab_size
    draws = torch.Generator().manual_seed(context)
    prompts = torch.randint(0, vocab, (batch, context), generator=draws).tolist()
    params = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    requests = [request for prompt in prompts for request in engine.submit(prompt, params)]
    while not all(request.output_length for request in requests):
        engine.step()
    return engine


def time_steps(
    engines: Mapping[str, Engine], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Milliseconds of steps of each engine, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    turns = list(engines.items())
    for number in range(options.warm_up + options.rounds):
        # Nobody always comes after the same one.
        for name, engine in turns[:: 1 if number % 2 else -1]:
            begun = time.perf_counter()
            emitted = engine.step()
            seconds = time.perf_counter() - begun
            assert len(emitted) == engine.config.max_rows, "a request ended early"
            if number >= options.warm_up:
                times[name].append(1e3 * seconds)
    for engine in engines.values():
        engine.close()
    return times


def steps(options: argparse.Namespace) -> None:
    """Whole steps by tokens of context."""
    model = load(options.model, make_config(drafter="none"))
    for batch in options.batch:
        engines = {str(n): opened(model, n, options, batch) for n in options.tokens}
        times = time_steps(engines, options)
        for context, values in times.items():
            cost = statistics.median(values) / batch
            print(f"batch {batch:2d}  {context:>6s} tokens of context  {cost:8.3f} ms a token")
        save("context", {**vars(options), "batch": batch, "ms": times})


def choice(options: argparse.Namespace) -> None:
    """Whole steps with few entries chosen, and with all."""
    with tempfile.TemporaryDirectory() as work:
        folders = {"chosen": locate(options.model, revision=None, progress=print)}
        folders["all"] = with_all_entries(folders["chosen"], Path(work))
        models = {
            name: load(str(folder), make_config(drafter="none")) for name, folder in folders.items()
        }
        known = known_config(folders["chosen"])
        for batch in options.batch:
            for times in options.times:
                context = times * known.indexer.chosen * known.sparse.ratio
                engines = {
                    name: opened(model, context, options, batch) for name, model in models.items()
                }
                report(options, batch, times, time_steps(engines, options))


def report(
    options: argparse.Namespace, batch: int, times: int, values: Mapping[str, Sequence[float]]
) -> None:
    """Print and save milliseconds of both sides."""
    chosen, every = (statistics.median(values[name]) for name in ("chosen", "all"))
    share = ratio(values["chosen"], values["all"])
    print(
        f"batch {batch:2d}  {times:4d} times as many entries as are chosen  "
        f"chosen {chosen:8.4f} ms  all {every:8.4f} ms  {share:5.2f}x",
        flush=True,
    )
    save("context", {**vars(options), "batch": batch, "times": times, "ms": values})


def known_config(folder: Path) -> LatentConfig:
    known = read_config(json.loads((folder / "config.json").read_text()))
    if SPARSE not in known.kinds:
        raise SystemExit("the model has no layer that chooses entries")
    return known


def with_all_entries(folder: Path, work: Path) -> Path:
    """The same model, whose indexer chooses as many entries as there may be."""
    for path in folder.resolve().iterdir():
        if path.name != "config.json":
            (work / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    config["index_topk"] = config["max_position_embeddings"]
    (work / "config.json").write_text(json.dumps(config))
    return work


@dataclass(frozen=True)
class Caches:
    """Operators of one sparse layer on made-up caches, for rows of one token.

    Attributes:
        known: sizes.
        backend: whose operators.
        entries: of each row.
        batch: rows.
    """

    known: LatentConfig
    backend: Backend
    entries: int
    batch: int

    def sides(self) -> dict[str, Callable[[], float]]:
        """Milliseconds of a token, with chosen entries and with all."""
        sizes, indexer, draws = self.known.attention, self.known.indexer, torch.Generator()
        layout, batch = self._layout(), self.batch
        pages = 1 + sum(map(len, layout.tables))
        per_page = layout.page_tokens // self.known.sparse.ratio

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draws)

        q, index_q = (numbers(batch, x.heads, x.size) for x in (sizes, indexer))
        pool, keys = (numbers(pages, per_page, x.size) for x in (sizes, indexer))
        weights, sinks = numbers(batch, indexer.heads), numbers(sizes.heads)
        ring = numbers(1 + batch, sizes.window + 1, sizes.size)
        latents = Latents(numbers(batch, sizes.size), ring, sizes.window)
        rows, ratio_ = self.backend.rows(layout), self.known.sparse.ratio

        def attend(chosen: torch.Tensor | None) -> None:
            seen = Entries(pool, ratio_, chosen)
            rows.attend_latents(q, latents, seen, sinks, sizes.size**-0.5)

        def choose_and_attend() -> None:
            attend(rows.choose_entries(index_q, weights, keys, ratio_, indexer.chosen))

        return {
            "chosen": lambda: self._time(choose_and_attend),
            "all": lambda: self._time(lambda: attend(None)),
        }

    def _layout(self) -> RowLayout:
        page = 128
        last = self.entries * self.known.sparse.ratio - 1
        count = last // page + 1
        tables = [range(1 + row * count, 1 + (row + 1) * count) for row in range(self.batch)]
        return RowLayout(
            starts=tuple(range(self.batch + 1)),
            first=(last,) * self.batch,
            tables=tuple(tables),
            slots=tuple(range(1, 1 + self.batch)),
            visible_from=(0,) * self.batch,
            settled=(last,) * self.batch,
            settles=(last + 1,) * self.batch,
            page_tokens=page,
        )

    def _time(self, run: Callable[[], None]) -> float:
        begun = time.perf_counter()
        for _ in range(CALLS):
            run()
        return 1e3 * (time.perf_counter() - begun) / CALLS / self.batch


def operators(options: argparse.Namespace) -> None:
    """Operators alone, with few entries chosen and with all."""
    model = load(options.model, make_config(drafter="none"))
    known = known_config(locate(options.model, revision=None, progress=print))
    for batch in options.batch:
        for times in options.times:
            caches = Caches(known, model.backend, times * known.indexer.chosen, batch)
            with torch.inference_mode():
                values = alternate(caches.sides(), options.rounds)
            report(options, batch, times, values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("steps", "choice", "operators"))
    parser.add_argument("--model", default="tiny-dsv4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--times", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    {"steps": steps, "choice": choice, "operators": operators}[options.what](options)


if __name__ == "__main__":
    main()
