"""Several samples of a prompt, and seeds."""

from dataclasses import replace

import pytest

from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel
from surefoot.errors import SettingError
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.sample.seeds import derive_seed
from tests.unit.engine.engines import drain, engine_of

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=11)


def samples(engine: Engine, params: SamplingParams) -> list[Request]:
    requests = engine.submit(PROMPT, params)
    drain(engine)
    return requests


def outputs(requests: list[Request]) -> list[list[int]]:
    return [list(request.output) for request in requests]


def test_samples_differ_and_are_repeatable(tiny: LoadedModel) -> None:
    params = replace(SAMPLED, n=4)
    first = outputs(samples(engine_of(tiny), params))
    assert len({tuple(output) for output in first}) == 4
    assert outputs(samples(engine_of(tiny, depth=3, max_rows=2), params)) == first


def test_sample_i_depends_on_seed_and_i_alone(tiny: LoadedModel) -> None:
    many = samples(engine_of(tiny), replace(SAMPLED, n=4))
    few = samples(engine_of(tiny), replace(SAMPLED, n=2))
    assert outputs(many)[:2] == outputs(few)
    assert [request.seed for request in many] == [derive_seed(11, i) for i in range(4)]


def test_greedy_samples_are_all_alike(tiny: LoadedModel) -> None:
    found = outputs(samples(engine_of(tiny), replace(SAMPLED, temperature=0, n=3)))
    assert found == [found[0]] * 3


def test_other_seeds_give_other_texts_and_no_seed_a_fresh_one(tiny: LoadedModel) -> None:
    engine = engine_of(tiny)
    texts = [outputs(samples(engine, replace(SAMPLED, seed=seed)))[0] for seed in (0, 1, 2**64 - 1)]
    texts += [outputs(samples(engine, replace(SAMPLED, seed=None)))[0] for _ in range(2)]
    assert len({tuple(text) for text in texts}) == 5


def test_samples_count_against_the_waiting_limit(tiny: LoadedModel) -> None:
    engine = engine_of(tiny, max_waiting=4)
    with pytest.raises(SettingError, match="max_waiting"):
        engine.submit(PROMPT, replace(SAMPLED, n=5))
    assert len(engine.submit(PROMPT, replace(SAMPLED, n=4))) == 4
    drain(engine)
