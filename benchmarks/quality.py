"""What int8 costs in quality: perplexity, and how often the best token is that of floats.

python benchmarks/quality.py --models smollm2 tiny-hybrid tiny-dsv4

Models that come with text kept back from their training are asked for that; the others for
Python's language reference, as it is installed with Python.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from measure import engine_on, save

from surefoot.config import QUANTIZATIONS, make_config
from surefoot.engine.models import LoadedModel, load
from surefoot.llm import LLM
from surefoot.params import SamplingParams
from surefoot.weights.locate import locate


@dataclass(frozen=True)
class Reading:
    """What a model makes of texts.

    Attributes:
        best: its best token at each place.
        losses: minus the log-probability of each real token.
    """

    best: tuple[int, ...]
    losses: tuple[float, ...]

    @property
    def perplexity(self) -> float:
        return math.exp(sum(self.losses) / len(self.losses))

    def agreement(self, other: Reading) -> float:
        """Share of places with the same best token."""
        return sum(a == b for a, b in zip(self.best, other.best, strict=True)) / len(self.best)


def texts_for(name: str, model: LoadedModel, options: argparse.Namespace) -> list[list[int]]:
    """Token ids of the texts, none longer than wanted."""
    assert model.tokenizer is not None, f"{name} has no tokenizer"
    kept = locate(name, revision=None, progress=print) / "held_out.json"
    if kept.is_file():
        texts = [entry["prompt"] + entry["continuation"] for entry in json.loads(kept.read_text())]
    else:
        texts = sorted(text for text in topics.values() if len(text) > 4 * options.tokens)
    encoded = [model.tokenizer.encode(text)[: options.tokens] for text in texts]
    return encoded[: options.texts]


def read(model: LoadedModel, texts: Sequence[Sequence[int]]) -> Reading:
    """Have the model foretell each token of the texts from those before it."""
    engine = engine_on(model, drafter="none")
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    entries = list(_entries(LLM.on(engine), texts, params))
    engine.close()
    best = tuple(max(entry, key=entry.__getitem__) for _, entry in entries)
    return Reading(best, tuple(-entry[token] for token, entry in entries))


def _entries(
    llm: LLM, texts: Sequence[Sequence[int]], params: SamplingParams
) -> Iterator[tuple[int, dict[int, float]]]:
    for text, result in zip(texts, llm.generate(texts, params), strict=True):
        assert result.prompt_logprobs is not None
        for token, entry in zip(text[1:], result.prompt_logprobs[1:], strict=True):
            assert entry is not None
            yield token, entry


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["smollm2", "tiny-hybrid", "tiny-dsv4"])
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default=QUANTIZATIONS[0])
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=384, help="most tokens of a text")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.models:
        readings = {}
        for form in (None, options.quantization):
            model = load(name, make_config(drafter="none", quantization=form))
            texts = texts_for(name, model, options)
            readings[form] = read(model, texts)
        exact, near = readings[None], readings[options.quantization]
        record = {
            "model": name,
            "quantization": options.quantization,
            "tokens": len(exact.best),
            "perplexity": exact.perplexity,
            "int8_perplexity": near.perplexity,
            "agreement": near.agreement(exact),
        }
        print(
            f"{name:12s} {record['tokens']:6d} tokens  perplexity {exact.perplexity:.3f}, in int8 "
            f"{near.perplexity:.3f} ({near.perplexity / exact.perplexity - 1:+.2%})  "
            f"the same best token {near.agreement(exact):.1%}",
            flush=True,
        )
        save("quality", record)


if __name__ == "__main__":
    main()
