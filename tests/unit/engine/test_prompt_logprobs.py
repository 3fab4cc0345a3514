"""Log-probabilities of the prompt: one per token but the first, however the prompt is cut."""

import pytest
import torch

from surefoot.engine.models import LoadedModel
from surefoot.params import SamplingParams
from tests.unit.engine.engines import complete, drain, engine_of

PROMPT = [(7 * i * i + 3) % 64 for i in range(40)]
PARAMS = SamplingParams(max_tokens=4, temperature=0, logprobs=0, prompt_logprobs=2)


@pytest.fixture(scope="module")
def whole(tiny: LoadedModel) -> list[dict[int, float] | None]:
    """The prompt in one chunk."""
    [request] = complete(engine_of(tiny), [PROMPT], PARAMS)
    return list(request.prompt_logprobs)


def test_each_prompt_token_has_its_own_and_the_best_ones(
    whole: list[dict[int, float] | None],
) -> None:
    assert len(whole) == len(PROMPT) - 1
    for token, entry in zip(PROMPT[1:], whole, strict=True):
        assert entry is not None
        assert token in entry
        assert 2 <= len(entry) <= 3
        assert all(value <= 0 for value in entry.values())
        assert next(iter(entry.values())) == max(entry.values())


@pytest.mark.parametrize("chunk", [1, 3, 16, 39, 40])
@pytest.mark.parametrize("depth", [0, 3])
def test_chunks_and_drafts_change_nothing(
    chunk: int, depth: int, tiny: LoadedModel, whole: list[dict[int, float] | None]
) -> None:
    engine = engine_of(tiny, depth, prefill_chunk=chunk)
    [request] = complete(engine, [PROMPT], PARAMS)
    assert request.prompt_logprobs == whole


@pytest.mark.parametrize("steps", [1, 2, 4, 5, 6])
def test_a_preemption_neither_loses_nor_doubles_any(
    steps: int, tiny: LoadedModel, whole: list[dict[int, float] | None]
) -> None:
    engine = engine_of(tiny, prefill_chunk=10)
    [request] = engine.submit(PROMPT, PARAMS)
    for _ in range(steps):
        engine.step()
    engine.parts.scheduler.preempt_all()
    drain(engine)
    assert request.prompt_logprobs == whole
    assert request.preemptions == 1


def test_they_are_complete_although_the_prompt_is_cached(
    tiny: LoadedModel, whole: list[dict[int, float] | None]
) -> None:
    engine = engine_of(tiny)
    complete(engine, [PROMPT], SamplingParams(max_tokens=1, temperature=0))
    [request] = complete(engine, [PROMPT], PARAMS)
    assert request.cached_tokens == 0
    assert request.prompt_logprobs == whole


def test_a_prompt_of_one_token_has_none(tiny: LoadedModel) -> None:
    [request] = complete(engine_of(tiny), [[5]], PARAMS)
    assert request.prompt_logprobs == []


def test_emitted_tokens_have_the_models_own_log_probabilities(tiny: LoadedModel) -> None:
    """They do not change with temperature or bias; each emitted token is in its entry."""
    params = SamplingParams(max_tokens=9, temperature=1.7, logit_bias={3: 5.0}, seed=1, logprobs=1)
    [request] = complete(engine_of(tiny, 2), [PROMPT], params)
    assert len(request.logprobs) == request.output_length == 9
    tokens = [*PROMPT, *request.output]
    again = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    [check] = complete(engine_of(tiny), [tokens], again)
    for token, entry, other in zip(
        request.output, request.logprobs, check.prompt_logprobs[len(PROMPT) - 1 :], strict=True
    ):
        assert other is not None
        assert entry[token] == other[token]
        assert sum(torch.tensor(list(entry.values())).exp().tolist()) <= 1 + 1e-5
