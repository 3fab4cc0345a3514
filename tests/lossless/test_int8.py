"""In int8 tokens and log-probabilities are those of a plain run, drafts or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.config import make_config
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel, load
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.testing.tiny_dsa import write_tiny_dsa
from surefoot.testing.tiny_hybrids import write_tiny_hybrid
from surefoot.testing.tiny_latents import TinyLatentSizes, write_tiny_latents

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 7, 8], [1, 2, 3, 1, 2, 3, 1, 2, 9, 4]]
DIAL = 0.3

MODELS: dict[str, Callable[[Path], Path]] = {
    "groups": lambda folder: write_tiny_latents(
        folder, TinyLatentSizes(hidden=96, inner=64), dial=DIAL
    ),
    "dense": lambda folder: write_tiny_hybrid(folder, "Qwen3_5ForCausalLM", dial=DIAL),
    "experts": lambda folder: write_tiny_hybrid(folder, "Qwen3_5MoeForCausalLM", dial=DIAL),
    "latents": lambda folder: write_tiny_latents(folder, dial=DIAL),
    "chosen": lambda folder: write_tiny_dsa(folder, dial=DIAL),
}
SETTINGS: dict[str, dict[str, object]] = {
    "plain": {"drafter": "none", "max_rows": 1, "prefix_cache": False},
    "together": {"drafter": "none", "max_rows": 3},
    "ngram": {"drafter": "ngram", "draft_tokens": 4, "max_rows": 3, "prefill_chunk": 3},
    "mtp": {"drafter": "mtp", "draft_tokens": 3, "max_rows": 2},
    "deep": {"drafter": "mtp", "draft_tokens": 8, "max_rows": 3, "max_step_tokens": 24},
}


def run(
    target: LoadedModel,
    settings: dict[str, object],
    tokens: int = 40,
    temperatures: tuple[float, ...] = (0.0, 0.9),
) -> list[Request]:
    engine = Engine(target, make_config(memory=1 << 23, **settings))
    requests = [
        engine.submit(prompt, SamplingParams(max_tokens=tokens, temperature=t, seed=3, logprobs=2))[
            0
        ]
        for t in temperatures
        for prompt in PROMPTS
    ]
    while not engine.idle:
        engine.step()
    engine.close()
    return requests


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logprobs_equal_the_plain_run(name: str, tmp_path: Path) -> None:
    folder = MODELS[name](tmp_path)
    form = "w4a8" if name == "groups" else "w8a8"
    target = load(str(folder), make_config(device="cpu", quantization=form))
    said = {setting: run(target, settings) for setting, settings in SETTINGS.items()}
    for setting, requests in said.items():
        for one, other in zip(requests, said["plain"], strict=True):
            assert list(one.output) == list(other.output), setting
            assert one.logprobs == other.logprobs, setting
    assert sum(request.speculation.accepted for request in said["mtp"]) > 20
    assert len({tuple(request.output) for request in said["plain"]}) > 3


def test_groups_on_the_npu_say_the_same_with_drafts_and_captured(tmp_path: Path) -> None:
    folder = MODELS["groups"](tmp_path)
    config = make_config(device="npu", emulate=True, quantization="w4a8")
    target = load(str(folder), config)
    said = [
        run(target, {**SETTINGS[name], "capture": name == "mtp"}, 8, (0.0,))
        for name in ("together", "mtp")
    ]
    assert [list(each.output) for each in said[0]] == [list(each.output) for each in said[1]]
    assert sum(request.speculation.accepted for request in said[1]) > 2
