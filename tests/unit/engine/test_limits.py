"""What is refused at the door, what is cut, and that the engine lives on."""

import pytest

from surefoot.engine.models import LoadedModel
from surefoot.errors import EngineClosedError, PromptError, SettingError
from surefoot.params import SamplingParams
from surefoot.request import FinishReason
from tests.unit.engine.engines import complete, drain, engine_of

GREEDY = SamplingParams(max_tokens=4, temperature=0)


def test_more_requests_than_may_wait_are_refused_and_the_others_are_served(
    tiny: LoadedModel,
) -> None:
    """A limit of four, twenty at once."""
    engine = engine_of(tiny, max_waiting=4)
    accepted = [engine.submit([number, 1], GREEDY)[0] for number in range(4)]
    for number in range(4, 20):
        with pytest.raises(SettingError) as caught:
            engine.submit([number, 1], GREEDY)
        assert caught.value.parameter == "max_waiting"
    drain(engine)
    assert [request.output_length for request in accepted] == [4] * 4
    assert complete(engine, [[1]], GREEDY)[0].output_length == 4


@pytest.mark.parametrize("depth", [0, 5])
@pytest.mark.parametrize("asked", [None, 100, 10**9])
def test_more_tokens_than_the_context_holds_end_at_the_context(
    depth: int, asked: int | None, tiny: LoadedModel
) -> None:
    engine = engine_of(tiny, depth, max_model_len=24)
    params = SamplingParams(max_tokens=asked, temperature=0)
    [request] = complete(engine, [[1, 2] * 8], params)
    assert request.finish_reason is FinishReason.LENGTH
    assert len(request.tokens) == 24


@pytest.mark.parametrize(
    ("prompt", "symptom"),
    [
        ([], "empty"),
        ([1] * 24, "24 tokens"),
        ([1] * 1000, "1000 tokens"),
        ([1, 64], "64"),
        ([-1], "-1"),
        ([True], "True"),
        ([1.5], "1.5"),
        ("some text", "no tokenizer"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(
    prompt: list[int], symptom: str, tiny: LoadedModel
) -> None:
    engine = engine_of(tiny, max_model_len=24)
    with pytest.raises(PromptError, match=symptom):
        engine.submit(prompt, GREEDY)
    assert engine.idle
    assert complete(engine, [[1] * 23], GREEDY)[0].output_length == 1


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(logit_bias={64: 1.0}), "logit_bias"),
        (SamplingParams(allowed_token_ids=(1, 99)), "allowed_token_ids"),
        (SamplingParams(stop_token_ids=(64,)), "stop_token_ids"),
        (SamplingParams(stop=("x",)), "stop"),
        (SamplingParams(bad_words=("x",)), "bad_words"),
    ],
)
def test_sampling_values_that_do_not_suit_the_model_are_refused(
    params: SamplingParams, name: str, tiny: LoadedModel
) -> None:
    engine = engine_of(tiny)
    with pytest.raises(SettingError) as caught:
        engine.submit([1], params)
    assert caught.value.parameter == name
    assert engine.idle
    assert complete(engine, [[1]], GREEDY)[0].output_length == 4


def test_a_closed_engine_says_so(tiny: LoadedModel) -> None:
    engine = engine_of(tiny)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.submit([1], GREEDY)


def test_a_request_as_long_as_the_context_runs_in_the_least_memory(tiny: LoadedModel) -> None:
    generous = engine_of(tiny, max_model_len=64, max_rows=1).parts.plan
    least = (1 + 4) * generous.page_bytes
    engine = engine_of(tiny, max_model_len=64, max_rows=1, memory=least)
    assert engine.parts.plan.pages == 4
    params = SamplingParams(max_tokens=None, temperature=0)
    requests = complete(engine, [[1, 2, 3], [4, 5, 6]], params)
    assert [len(request.tokens) for request in requests] == [64, 64]
