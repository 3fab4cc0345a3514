"""Resume points of DeepSeek V4 at its real ratios: pages of 128 tokens, a window as long as one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from surefoot.config import make_config
from surefoot.draft.depth import FixedDepth
from surefoot.draft.drafter import DraftRow
from surefoot.draft.guard import GuardedDrafter
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel, load
from surefoot.model.deepseek_v4 import LatentModel
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.state.spec import CacheSpec
from surefoot.testing.tiny_latents import TinyLatentSizes, write_tiny_latents
from tests.lossless.poison import poison
from tests.unit.state.latents import lacking, other_span, pointed_pages

P = 128
DRAFTERS = (("none", 0), ("mtp", 3))
_GENERATOR = torch.Generator().manual_seed(11)
TEXT = torch.randint(1, 64, (1300,), generator=_GENERATOR).tolist()
FIRST, SECOND = [*TEXT[:300], *TEXT[700:760]], [*TEXT[:300], *TEXT[800:850]]
drafters = pytest.mark.parametrize(("drafter", "depth"), DRAFTERS)


SIZE = TinyLatentSizes(
    ratios=(0, 4, 128, 4), heavy_ratio=128, window=128, index_chosen=16, positions=2048
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_tiny_latents(tmp_path_factory.mktemp("points"), SIZE, dial=0.5)
    return load(str(folder), make_config(device="cpu"))


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Its draft head listens to all that it keeps."""
    folder = write_tiny_latents(tmp_path_factory.mktemp("random"), SIZE)
    return load(str(folder), make_config(device="cpu"))


@pytest.fixture(scope="module")
def want(model: LoadedModel) -> Request:
    """The second request in a plain run."""
    return plain(model, SECOND, 40)


def engine_on(model: LoadedModel, drafter: str, depth: int, **settings: object) -> Engine:
    values: dict[str, object] = {
        "device": "cpu",
        "drafter": drafter,
        "draft_tokens": depth,
        "memory": 1 << 26,
        "max_model_len": 2048,
        "max_rows": 2,
    }
    engine = Engine(model, make_config(**{**values, **settings}))
    assert engine.parts.plan.page_tokens == P
    assert isinstance(engine.parts.loop._depth, FixedDepth)
    return engine


def ask(engine: Engine, prompt: Sequence[int], count: int) -> Request:
    """One request from its begin to its end, with all that nobody owns spoilt at every step."""
    params = SamplingParams(max_tokens=count, temperature=0, logprobs=2, ignore_eos=True)
    [request] = engine.submit(prompt, params)
    while not engine.idle:
        poison(engine, "nan")
        engine.step()
    engine.parts.ledger.audit()
    return request


def plain(model: LoadedModel, prompt: Sequence[int], count: int) -> Request:
    """The request without drafts and without a prefix cache."""
    return ask(engine_on(model, "none", 0, prefix_cache=False), prompt, count)


def same(got: Request, want: Request) -> bool:
    return (got.tokens, got.logprobs) == (want.tokens, want.logprobs)


@drafters
def test_a_shared_beginning_of_300_tokens_is_used_again(
    drafter: str, depth: int, model: LoadedModel, want: Request
) -> None:
    engine = engine_on(model, drafter, depth)
    assert ask(engine, FIRST, 20).cached_tokens == 0
    got = ask(engine, SECOND, 40)
    assert got.cached_tokens == 256
    assert same(got, want)
    assert got.speculation.accepted > 0 or not depth


@drafters
def test_long_prompts_leave_points_along_the_way_and_both_ends_of_the_answer(
    drafter: str, depth: int, model: LoadedModel
) -> None:
    engine = engine_on(model, drafter, depth)
    prompt = TEXT[:1200]
    first = ask(engine, prompt, 1)
    assert pointed_pages(engine.parts.ledger, first.tokens) == [1, 2, 4, 8, 9]
    answered = ask(engine, prompt, 90)
    assert answered.cached_tokens == 9 * P
    # The tenth page ends within the answer.
    assert pointed_pages(engine.parts.ledger, answered.tokens) == [1, 2, 4, 8, 9, 10]
    follow = [*answered.tokens, 5, 6]
    got = ask(engine, follow, 12)
    assert got.cached_tokens == 10 * P
    assert same(got, plain(model, follow, 12))


def test_the_distance_of_points_is_a_setting(model: LoadedModel) -> None:
    engine = engine_on(model, "none", 0, point_every=3)
    ask(engine, TEXT[:1250], 1)
    assert pointed_pages(engine.parts.ledger, TEXT) == [1, 2, 3, 6, 9]


# What a point holds is what it must hold: with anything less the next turn is another one.


def with_caches(model: LoadedModel, change: Callable[[CacheSpec], CacheSpec]) -> LoadedModel:
    """The model with other caches."""
    changed = copy.copy(model.model)
    assert isinstance(changed, LatentModel)
    known = changed.description
    changed.description = replace(
        known,
        caches=tuple(change(spec) for spec in known.caches),
        draft_caches=tuple(change(spec) for spec in known.draft_caches),
    )
    return replace(model, model=changed)


def unchanged(spec: CacheSpec) -> CacheSpec:
    return spec


@pytest.mark.parametrize(
    ("change", "right"),
    [
        (unchanged, True),
        (lacking("window"), False),
        (lacking("sparse.raw"), False),
        (other_span("kv", 0), False),
        (other_span("kv", 1), False),
        (other_span("index", 0), False),
        (other_span("index", 1), False),
        # The draft head decides nothing.
        (lacking("mtp.window", 100), True),
    ],
    ids=["whole", "window", "raw", "values", "scores", "key values", "key scores", "head"],
)
def test_a_point_holds_what_the_next_turn_reads_and_no_less(
    change: Callable[[CacheSpec], CacheSpec], right: bool, model: LoadedModel, want: Request
) -> None:
    engine = engine_on(with_caches(model, change), "mtp", 3)
    ask(engine, FIRST, 1)
    got = ask(engine, SECOND, 40)
    assert got.cached_tokens == 256
    assert same(got, want) is right


def drafts_of(engine: Engine, prompt: Sequence[int]) -> list[list[list[int]]]:
    """All that the head guesses for a request."""
    guard, seen = engine.parts.drafter, list[Sequence[Sequence[int]]]()
    assert isinstance(guard, GuardedDrafter)
    propose = guard._drafter.propose

    def record(rows: Sequence[DraftRow]) -> Sequence[Sequence[int]]:
        seen.append(propose(rows))
        return seen[-1]

    with patch.object(guard._drafter, "propose", record):
        ask(engine, prompt, 40)
    return [[list(draft) for draft in drafts] for drafts in seen if drafts]


@pytest.mark.parametrize(
    ("change", "alike"), [(unchanged, True), (lacking("mtp.window", 100), False)]
)
def test_a_draft_head_that_resumes_guesses_as_if_it_had_computed_all(
    change: Callable[[CacheSpec], CacheSpec], alike: bool, random_model: LoadedModel
) -> None:
    """The prompt ends just behind the point, so that drafts look back beyond it."""
    prompt = TEXT[:258]
    cold = drafts_of(engine_on(random_model, "mtp", 3), prompt)
    assert len(cold) > 20
    engine = engine_on(with_caches(random_model, change), "mtp", 3)
    ask(engine, FIRST, 1)
    assert (drafts_of(engine, prompt) == cold) is alike
