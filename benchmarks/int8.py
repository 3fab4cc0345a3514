"""Decode speed with linears in int8 against the same engine in float32, both sides in one run.

python benchmarks/int8.py --batch 1 8 --pairs 9
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from measure import alternate, decode, engine_on, print_speeds, save

from surefoot.cli.show import bytes_text
from surefoot.config import QUANTIZATIONS, make_config
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel, load

FLOATS = "floats"


def random_prompts(model: LoadedModel, batch: int, tokens: int) -> list[list[int]]:
    """The same ones for a batch, whoever takes them."""
    generator = torch.Generator().manual_seed(batch)
    vocab = model.model.description.vocab_size
    prompts: list[list[int]] = torch.randint(
        0, vocab, (batch, tokens), generator=generator
    ).tolist()
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default=QUANTIZATIONS[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = {
        FLOATS: load(options.model, make_config(drafter="none")),
        options.quantization: load(
            options.model, make_config(drafter="none", quantization=options.quantization)
        ),
    }
    for name, model in models.items():
        print(f"{name:6s} {bytes_text(model.weight_bytes)} of weights", flush=True)
    for batch in options.batch:
        sides = {}
        for name, model in models.items():
            engine = engine_on(model, drafter="none", max_rows=batch)
            prompts = random_prompts(model, batch, options.prompt_tokens)
            sides[name] = partial(_speed, engine, prompts, options.new_tokens)
        speeds = alternate(sides, options.pairs)
        print_speeds(batch, speeds, FLOATS)
        save("int8_speed", {**vars(options), "batch": batch, "tokens_per_s": speeds})


def _speed(engine: Engine, prompts: list[list[int]], new_tokens: int) -> float:
    return decode(engine, prompts, new_tokens).tokens_per_s


if __name__ == "__main__":
    main()
