"""Prompts of any length are computed in chunks, and a chunk needs what any other chunk needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from surefoot.config import make_config
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel, load
from surefoot.params import SamplingParams
from surefoot.testing.tiny_latents import TinyLatentSizes, write_tiny_latents
from tests.unit.made import Made, Traced

SHORT, LONG, CHUNK = 1_000, 4_500, 256
# The real ratios; all layers choose a few of many entries, or see one for 128 tokens.
SIZE = TinyLatentSizes(
    ratios=(0, 4, 128, 4), heavy_ratio=128, window=128, index_chosen=16, positions=16384
)
PROMPT = torch.randint(0, SIZE.vocab, (LONG,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_tiny_latents(tmp_path_factory.mktemp("latents"), SIZE)
    return load(str(folder), make_config(drafter="none"))


@dataclass(frozen=True)
class Needs:
    """What a step made.

    Attributes:
        largest: bytes of the largest tensor.
        total: bytes of all tensors, views among them.
        others: most bytes of other things at once.
    """

    largest: int
    total: int
    others: int


def needs(model: LoadedModel, drafter: str, prompt: Sequence[int]) -> list[Needs]:
    """Of all steps up to the first token of the answer."""
    config = make_config(
        drafter=drafter,
        draft_tokens=3,
        prefill_chunk=CHUNK,
        max_rows=2,
        max_model_len=LONG + 100,
        memory=64 << 20,
    )
    engine, steps = Engine(model, config), []
    [request] = engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0))
    while not engine.idle:
        with Made() as made, Traced() as traced:
            engine.step()
        steps.append(Needs(made.largest, made.total, traced.peak))
    assert request.output_length == 1
    return steps


@pytest.mark.parametrize("drafter", ["none", "mtp"])
def test_memory_for_a_prompt_does_not_grow_with_it(drafter: str, model: LoadedModel) -> None:
    needs(model, drafter, PROMPT[: CHUNK + 1])
    short, long = (needs(model, drafter, PROMPT[:length]) for length in (SHORT, LONG))
    assert len(long) > LONG // CHUNK > len(short) + 10
    assert max(step.largest for step in long) <= max(step.largest for step in short)
    # Experts take as many tensors as they were chosen by some token.
    most, least = max(step.total for step in long), max(step.total for step in short)
    assert most < 1.01 * least
    # Page tables and the like: less than a byte of a cache entry for each token.
    more = max(step.others for step in long) - max(step.others for step in short)
    assert more < 16 * (LONG - SHORT)
