"""Speed of n-gram drafting against none, by kind of text, in alternating pairs.

python benchmarks/drafting.py --pairs 9
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from measure import alternate, decode, engine_on, load_prompts, ratio, save

from surefoot.config import make_config
from surefoot.engine.engine import Engine
from surefoot.engine.models import load

KINDS = ("copy_edit", "code", "prose")


def speed(
    engine: Engine, prompts: list[str], options: argparse.Namespace, seen: dict[str, object]
) -> float:
    """Tokens per second over all prompts, `batch` at a time; notes what was generated."""
    groups = [prompts[i : i + options.batch] for i in range(0, len(prompts), options.batch)]
    runs = [decode(engine, group, options.new_tokens, options.temperature) for group in groups]
    drafts = sum(run.drafts for run in runs)
    seen["accept_length"] = 1 + sum(run.accepted for run in runs) / drafts if drafts else 1.0
    seen["tokens"] = [run.tokens for run in runs]
    tokens = sum(len(row) for run in runs for row in run.tokens)
    return tokens / sum(sum(map(len, run.tokens)) / run.tokens_per_s for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--no-bitwise", dest="bitwise", action="store_false")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load(options.model, make_config(drafter="none", bitwise=options.bitwise))
    engines = {"none": engine_on(model, drafter="none")}
    engines |= {
        f"ngram {k}": engine_on(model, drafter="ngram", draft_tokens=k) for k in options.depths
    }
    engines["ngram auto"] = engine_on(model, drafter="ngram")
    for kind in options.kinds:
        prompts = [item["prompt"] for item in load_prompts(kind)]
        seen: dict[str, dict[str, object]] = {name: {} for name in engines}
        sides = {
            name: partial(speed, engine, prompts, options, seen[name])
            for name, engine in engines.items()
        }
        speeds = alternate(sides, options.pairs)
        for name, values in speeds.items():
            same = "same" if seen[name]["tokens"] == seen["none"]["tokens"] else "DIFFERENT"
            print(
                f"{kind:10s} {name:11s} {statistics.median(values):7.1f} tok/s "
                f"{ratio(values, speeds['none']):5.2f}x  "
                f"accept length {seen[name]['accept_length']:.2f}  {same}",
                flush=True,
            )
        lengths = {name: notes["accept_length"] for name, notes in seen.items()}
        save(
            "drafting",
            {"kind": kind, "tokens_per_s": speeds, "accept_length": lengths, **vars(options)},
        )


if __name__ == "__main__":
    main()
