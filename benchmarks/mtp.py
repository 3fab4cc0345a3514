"""What the model's own draft head brings: tokens a pass, speed by batch, and prefix reuse.

python benchmarks/mtp.py accept
python benchmarks/mtp.py speed --batch 1 8 32 --pairs 9
python benchmarks/mtp.py speed --batch 8 16 32 --depths 1 --in-turn
python benchmarks/mtp.py turns
python benchmarks/mtp.py bound --batch 1 8 32
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial

import torch
from measure import alternate, decode, decode_in_turn, engine_on, print_speeds, save
from safetensors.torch import load_file

from surefoot.backend.cpu import CpuBackend
from surefoot.backend.protocol import Linear
from surefoot.config import make_config
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel, load
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.weights.locate import locate

WINDOW = 20  # tokens; a window that came before in the same text counts as repetition


def held_out(model: str, count: int) -> list[str]:
    """Prompts that the model's training never saw; they lie beside its weights."""
    folder = locate(model, revision=None, progress=print)
    entries = json.loads((folder / "held_out.json").read_text())
    return [entry["prompt"] for entry in entries[:count]]


def repetition(texts: tuple[tuple[int, ...], ...]) -> float:
    """Share of token windows that came before in the same text."""
    repeated = total = 0
    for ids in texts:
        seen: set[tuple[int, ...]] = set()
        for start in range(len(ids) - WINDOW + 1):
            window = tuple(ids[start : start + WINDOW])
            repeated += window in seen
            total += 1
            seen.add(window)
    return repeated / total


def accept(model: LoadedModel, options: argparse.Namespace) -> None:
    """Tokens committed a target pass, greedy and sampled, at each depth."""
    prompts = held_out(options.model, options.prompts)
    for temperature in (0.7, 0.0):
        for depth in options.depths:
            engine = engine_on(model, drafter="mtp", draft_tokens=depth, max_rows=len(prompts))
            run = decode(engine, prompts, options.new_tokens, temperature)
            length = 1 + run.accepted / run.drafts
            repeated = repetition(run.tokens)
            print(
                f"temperature {temperature}  k = {depth}  {length:.2f} tokens a pass  "
                f"{repeated:.1%} of windows repeat",
                flush=True,
            )
            save("mtp_accept", {"temperature": temperature, "depth": depth, "length": length})
            engine.close()


def speed(model: LoadedModel, options: argparse.Namespace) -> None:
    """Decode speed with the head against none, by batch."""
    prompts = held_out(options.model, max(options.batch))
    for batch in options.batch:
        make = partial(
            engine_on, model, max_rows=batch, capture_target=options.capture_target or None
        )
        engines = {"none": make(drafter="none")}
        for depth in options.depths:
            engines[f"mtp {depth}"] = make(drafter="mtp", draft_tokens=depth)
        engines["mtp auto"] = make(drafter="mtp")
        speeds = _speeds(engines, prompts[:batch], options)
        print_speeds(batch, speeds, "none")
        save("mtp_speed", {**vars(options), "batch": batch, "tokens_per_s": speeds})


def _speeds(
    engines: dict[str, Engine], prompts: list[str], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Tokens a second of each engine, pair by pair, after a warm-up."""
    if not options.in_turn:
        sides = {
            name: partial(_speed, engine, prompts, options) for name, engine in engines.items()
        }
        return alternate(sides, options.pairs)
    runs = [
        decode_in_turn(engines, prompts, options.new_tokens, options.temperature)
        for _ in range(1 + options.pairs)
    ]
    return {name: [run[name] for run in runs[1:]] for name in engines}


def _speed(engine: Engine, prompts: list[str], options: argparse.Namespace) -> float:
    made = decode(engine, prompts, options.new_tokens, options.temperature)
    return made.tokens_per_s if options.to_the_end else made.full_per_s


def bound(model: LoadedModel, options: argparse.Namespace) -> None:
    """The most that drafting could bring if the products alone took time.

    A verified step computes k + 1 tokens a row, and the head computes one a row k times. The
    weights are read anew by each, as they are in a step.
    """
    trunk, head = _products(options.model)
    prompts = held_out(options.model, options.prompts)
    for depth in options.depths:
        engine = engine_on(model, drafter="mtp", draft_tokens=depth, max_rows=len(prompts))
        run = decode(engine, prompts, options.new_tokens, options.temperature)
        engine.close()
        length = 1 + run.accepted / run.drafts
        for batch in options.batch:
            plain, verify = _cold(trunk, batch), _cold(trunk, batch * (depth + 1))
            drafts = depth * _cold(head, batch)
            print(
                f"batch {batch:3d}  k = {depth}  {length:.2f} tokens a pass; products of a step "
                f"{1e3 * plain:.2f} ms, verified {1e3 * verify:.2f} ms, drafts {1e3 * drafts:.2f} "
                f"ms: at most {length * plain / (verify + drafts):.2f}x",
                flush=True,
            )


def _products(name: str) -> tuple[list[tuple[Linear, int]], list[tuple[Linear, int]]]:
    """Packed products of the trunk and of the draft head, each with its number of inputs."""
    backend = CpuBackend()
    trunk, head = [], []
    for path in locate(name, revision=None, progress=print).glob("*.safetensors"):
        for key, weight in load_file(path).items():
            if weight.dim() == 2:
                product = backend.pack_linear(weight.float(), None), weight.shape[1]
                (head if key.startswith("mtp.") else trunk).append(product)
                if "embed_tokens" in key:  # the output head of both
                    head.append(product)
    return trunk, head


def _cold(products: list[tuple[Linear, int]], rows: int) -> float:
    """Seconds of one call of each, with caches that hold something else."""
    other, times = torch.zeros(1 << 24), []
    inputs = {size: torch.randn(rows, size) for _, size in products}
    for _ in range(15):
        other.add_(1)
        begun = time.perf_counter()
        for product, size in products:
            product(inputs[size])
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def turns(model: LoadedModel, options: argparse.Namespace) -> None:
    """The second turn of a chat: how much of what it shares with the first is computed anew."""
    params = SamplingParams(max_tokens=options.new_tokens, temperature=0.7, seed=1, ignore_eos=True)
    prompts = held_out(options.model, options.prompts)
    for drafter in ("none", "mtp"):
        engine = Engine(model, make_config(drafter=drafter, memory=1 << 30))
        shares, seconds = [], []
        for text in prompts:
            prompt = 4 * engine.tokenizer.encode(text) if engine.tokenizer else []
            first = _finished(engine, prompt, params)
            shared = [*prompt, *first.output]
            begun = time.perf_counter()
            second = _finished(engine, [*shared, *prompt[:8]], SamplingParams(max_tokens=1))
            seconds.append(time.perf_counter() - begun)
            shares.append(second.cached_tokens / len(shared))
        print(
            f"{drafter:5s} cached {statistics.mean(shares):.1%} of the shared part "
            f"(least {min(shares):.1%}), second turn's first token in "
            f"{1e3 * statistics.median(seconds):.1f} ms",
            flush=True,
        )
        save("mtp_turns", {"drafter": drafter, "shares": shares, "seconds": seconds})
        engine.close()


def _finished(engine: Engine, prompt: list[int], params: SamplingParams) -> Request:
    (request,) = engine.submit(prompt, params)
    while not engine.idle:
        engine.step()
    return request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("accept", "speed", "turns", "bound"))
    parser.add_argument("--model", default="tiny-hybrid")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--to-the-end", action="store_true", help="time up to the last request's end"
    )
    parser.add_argument(
        "--in-turn",
        action="store_true",
        help="a few steps of each engine in turn, for a machine whose speed moves",
    )
    parser.add_argument(
        "--capture-target", action="store_true", help="record the target's steps, too"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load(options.model, make_config(drafter="none"))
    {"accept": accept, "speed": speed, "turns": turns, "bound": bound}[options.what](model, options)


if __name__ == "__main__":
    main()
