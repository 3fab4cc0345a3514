"""Decode speed without speculation against transformers, both sides in one run.

python benchmarks/decode_vs_transformers.py --batch 1 8 32 --pairs 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from measure import alternate, decode, engine_on, ratio, save
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria

from surefoot.config import make_config
from surefoot.engine.models import LoadedModel, load
from surefoot.weights.locate import locate


class Clock(StoppingCriteria):
    """Notes the time after each token and never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def transformers_decode(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> float:
    """Tokens per second after the first token."""
    clock = Clock()
    model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=[clock],
    )
    seconds = clock.times[-1] - clock.times[0]
    return len(prompts) * (len(clock.times) - 1) / seconds


def sides_for(
    models: dict[str, LoadedModel], peer: PreTrainedModel, batch: int, options: argparse.Namespace
) -> dict[str, Callable[[], float]]:
    generator = torch.Generator().manual_seed(batch)
    size = (batch, options.prompt_tokens)
    vocab = peer.config.get_text_config().vocab_size
    prompts = torch.randint(0, vocab, size, generator=generator).tolist()
    sides: dict[str, Callable[[], float]] = {
        "transformers": lambda: transformers_decode(peer, prompts, options.new_tokens)
    }
    for name, model in models.items():
        engine = engine_on(model, drafter="none", max_rows=max(batch, 1))
        sides[name] = lambda engine=engine: decode(engine, prompts, options.new_tokens).tokens_per_s  # type: ignore[misc]
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = locate(options.model, revision=None, progress=print)
    source = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)
    models = {
        "bitwise": load(options.model, make_config(drafter="none")),
        "no-bitwise": load(options.model, make_config(drafter="none", bitwise=False)),
    }
    for batch in options.batch:
        speeds = alternate(sides_for(models, peer, batch, options), options.pairs)
        for name, values in speeds.items():
            times = ratio(values, speeds["transformers"])
            print(
                f"batch {batch:3d} {name:13s} {statistics.median(values):7.1f} tok/s {times:5.2f}x",
                flush=True,
            )
        save("decode_vs_transformers", {**vars(options), "batch": batch, "tokens_per_s": speeds})


if __name__ == "__main__":
    main()
