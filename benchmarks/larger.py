"""What drafting brings a hybrid of 400 million parameters at most, by batch.

python benchmarks/larger.py --batch 1 4 8 --depths 1 3 --pairs 5

The weights are random, in bfloat16, and the draft head is a table that is always right: every draft
is accepted, so what is told is the speed of the steps alone. A trained head brings less.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from functools import partial
from pathlib import Path

import torch
from measure import alternate, decode, engine_on, print_speeds, save
from safetensors.torch import load_file, save_file

from surefoot.config import make_config
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel, load
from surefoot.testing.tiny_hybrids import DENSE, write_tiny_hybrid

VOCAB = 65536
PROMPT = 100  # tokens


def write_model(folder: Path) -> Path:
    """A Qwen3.5 of 12 layers, a quarter of them full attention, sized like the smallest release."""
    write_tiny_hybrid(
        folder,
        DENSE,
        dial=0.0,
        vocab=VOCAB,
        hidden=1024,
        inner=3584,
        layers=12,
        heads=8,
        key_heads=2,
        head_dim=256,
        rotary=0.25,
        linear_key_heads=16,
        linear_value_heads=16,
        linear_key_size=128,
        linear_value_size=128,
        positions=4096,
    )
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({name: x.bfloat16() if x.dim() > 1 else x for name, x in weights.items()}, path)
    return folder


def compare(model: LoadedModel, batch: int, options: argparse.Namespace) -> None:
    """Decode speed without drafts and at each depth."""
    draws = random.Random(0)
    prompts = [[draws.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(batch)]
    engines = {"none": engine_on(model, drafter="none", max_rows=batch)}
    for depth in options.depths:
        engines[f"mtp {depth}"] = engine_on(
            model, drafter="mtp", draft_tokens=depth, max_rows=batch
        )
    sides = {
        name: partial(_speed, engine, prompts, options.new_tokens)
        for name, engine in engines.items()
    }
    speeds = alternate(sides, options.pairs)
    print_speeds(batch, speeds, "none")
    save("larger", {**vars(options), "batch": batch, "tokens_per_s": speeds})
    for engine in engines.values():
        engine.close()


def _speed(engine: Engine, prompts: list[list[int]], new_tokens: int) -> float:
    return decode(engine, prompts, new_tokens).full_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        print("writing the model", flush=True)
        model = load(str(write_model(Path(folder))), make_config(drafter="none"))
        for batch in options.batch:
            compare(model, batch, options)


if __name__ == "__main__":
    main()
