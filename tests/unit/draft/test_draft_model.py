"""The draft model's caches, and the target's, are those of a run that never speculated."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from surefoot.backend.protocol import UNCHOSEN, Backend
from surefoot.draft.depth import AutoDepth
from surefoot.draft.draft_model import ModelDrafter
from surefoot.draft.guard import GuardedDrafter
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.sample.choose import try_choose
from surefoot.sample.processors import RowContext
from surefoot.state.ledger import Lease
from surefoot.state.plan import MemoryPlan
from surefoot.state.pool import Pools
from surefoot.state.spec import Paged, Ring
from surefoot.step import Row, Step
from tests.unit.draft.conftest import Pair
from tests.unit.engine.engines import complete, drain, engine_of

GREEDY = SamplingParams(max_tokens=40, temperature=0)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=3)
PROMPT = [(11 * i * i + 2) % 64 for i in range(21)]
MODELS = pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM"])


def drafter_of(engine: Engine) -> ModelDrafter:
    guard = engine.parts.drafter
    assert isinstance(guard, GuardedDrafter)
    assert isinstance(guard._drafter, ModelDrafter)
    return guard._drafter


def lease_of(engine: Engine, request: Request) -> Lease:
    return engine.parts.scheduler._running[request]


def fresh_caches(model: LoadedModel, plan: MemoryPlan, tokens: Sequence[int], first: int) -> Pools:
    """Caches of `tokens[first:]`, computed in one go; nothing below `first` is seen."""
    pools = Pools(model.model.description.caches, plan, model.backend.device)
    pages = list(range(1, len(tokens) // plan.page_tokens + 2))
    row = Row(tokens[first:], first, len(tokens) - first, pages, 1, first, 0, first)
    with torch.inference_mode():
        model.model.forward(Step.of([row], plan.page_tokens).build(model.backend), pools)
    return pools


def check_caches(
    model: LoadedModel,
    engine: Engine,
    pools: Pools,
    lease: Lease,
    tokens: Sequence[int],
    first: int,
) -> None:
    """Every entry from `first` to the end of `tokens` has the bits of a fresh run."""
    plan, end = engine.parts.plan, len(tokens)
    fresh = fresh_caches(model, plan, tokens, first)
    for spec in model.model.description.caches:
        start = max(first, end - spec.window) if isinstance(spec, Ring) else first
        positions = range(start, end)
        for part in ("k", "v"):
            if isinstance(spec, Paged):
                own = entries(pools.paged(spec.name, part), lease.pages, positions)
                other = entries(fresh.paged(spec.name, part), range(1, end + 1), positions)
            else:
                columns = [position % plan.capacities[spec.name] for position in positions]
                own = pools.rows(spec.name, part)[:, lease.slot, columns]
                other = fresh.rows(spec.name, part)[:, 1, columns]
            assert torch.equal(own, other), f"{spec.name}.{part} of positions {positions}"


def entries(pool: Tensor, table: Sequence[int], positions: range) -> Tensor:
    """The entries of some positions: [n, layers, heads, size]."""
    size = pool.shape[-2]
    pages = [table[position // size] for position in positions]
    return pool[:, pages, :, [position % size for position in positions]]


def check_both(engine: Engine, draft: LoadedModel, request: Request) -> None:
    """The target's caches up to its cursor, the drafter's up to its own."""
    lease, tokens = lease_of(engine, request), request.tokens
    assert lease.drafted <= lease.computed
    check_caches(
        engine.target, engine, engine.parts.pools, lease, tokens[: lease.computed], first=0
    )
    if lease.drafted > lease.draft_from:
        pools, known = drafter_of(engine)._pools, tokens[: lease.drafted]
        check_caches(draft, engine, pools, lease, known, lease.draft_from)


@MODELS
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_caches_are_right_after_every_accepted_count(
    architecture: str, depth: int, params: SamplingParams, pair: Callable[[str, float], Pair]
) -> None:
    target, draft = pair(architecture, 0.1)
    seen = set()
    for start in range(4):
        engine = engine_of(target, depth, draft=draft, page_tokens=8)
        [request] = engine.submit(PROMPT[start:], params)
        before = 0
        while not engine.idle:
            engine.step()
            if not request.finished:
                counts = request.speculation
                if counts.drafts:
                    seen.add(counts.accepted - before)
                before = counts.accepted
                check_both(engine, draft, request)
    assert seen == set(range(depth + 1))


@MODELS
def test_caches_are_right_in_a_crowd_with_chunks_and_preemptions(
    architecture: str, pair: Callable[[str, float], Pair]
) -> None:
    target, draft = pair(architecture, 0.1)
    engine = engine_of(target, 3, draft=draft, page_tokens=8, prefill_chunk=6, max_rows=3)
    requests = [engine.submit([*PROMPT[:9], i], GREEDY)[0] for i in range(4)]
    for number in range(30):
        if number in (5, 11):
            engine.parts.scheduler.preempt_all()
        engine.step()
        for request in engine.parts.scheduler._running:
            check_both(engine, draft, request)
    drain(engine)
    assert sum(request.speculation.accepted for request in requests) > 20


@MODELS
def test_a_resumed_prefix_brings_the_drafters_state_along(
    architecture: str, pair: Callable[[str, float], Pair]
) -> None:
    target, draft = pair(architecture, 0.1)
    engine = engine_of(target, 3, draft=draft, page_tokens=8)
    [first] = complete(engine, [PROMPT], GREEDY)
    follow = [*first.tokens, 1, 2]
    [second] = engine.submit(follow, GREEDY)
    engine.step()
    lease = lease_of(engine, second)
    assert second.cached_tokens >= 32
    assert (lease.draft_from, lease.drafted >= second.cached_tokens) == (0, True)
    check_both(engine, draft, second)
    drain(engine)
    cold = complete(engine_of(target, 3, draft=draft, page_tokens=8), [follow], GREEDY)[0]
    assert second.speculation == cold.speculation


@MODELS
def test_pages_without_drafter_state_are_marked_so(
    architecture: str, pair: Callable[[str, float], Pair]
) -> None:
    """A request that forbids drafts leaves pages that the drafter must not look at."""
    target, draft = pair(architecture, 0.1)
    engine = engine_of(target, 3, draft=draft, page_tokens=8)
    quiet = SamplingParams(max_tokens=20, temperature=0, speculate=False)
    [first] = complete(engine, [PROMPT], quiet)
    assert first.speculation.drafted == 0
    [second] = engine.submit([*first.tokens, 1, 2], GREEDY)
    engine.step()
    lease = lease_of(engine, second)
    assert lease.draft_from == lease.cached == second.cached_tokens > 0
    for _ in range(4):
        engine.step()
        check_both(engine, draft, second)
    drain(engine)
    plain = complete(engine_of(target, page_tokens=8), [[*first.tokens, 1, 2]], GREEDY)[0]
    assert second.tokens == plain.tokens


@MODELS
def test_the_cache_is_hit_as_often_with_a_drafter_as_without(
    architecture: str, pair: Callable[[str, float], Pair]
) -> None:
    target, draft = pair(architecture, 0.1)
    hits = []
    for depth in (0, 3):
        engine = engine_of(target, depth, draft=draft if depth else None, page_tokens=8)
        found = []
        tokens = PROMPT
        for _ in range(3):
            [request] = complete(engine, [tokens], SamplingParams(max_tokens=9, temperature=0))
            found.append(request.cached_tokens)
            tokens = [*request.tokens, 7]
        hits.append(found)
    assert hits[0] == hits[1]
    assert sum(hits[0]) > 0


@MODELS
def test_an_equal_draft_model_is_always_right_greedy_or_sampled(
    architecture: str, pair: Callable[[str, float], Pair]
) -> None:
    """Drafts are drawn with the target's own noise, so equal models draw equal tokens."""
    target, draft = pair(architecture, 0.0)
    for params in (GREEDY, SAMPLED):
        engine = engine_of(target, 4, draft=draft, page_tokens=8)
        [request] = complete(engine, [PROMPT], params)
        assert request.speculation.accepted == request.speculation.drafted > 25


@MODELS
def test_a_token_that_cannot_be_chosen_is_a_wrong_guess_and_no_failure(
    architecture: str, pair: Callable[[str, float], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(1000))

    def sometimes(logits: Tensor, rows: Sequence[RowContext], backend: Backend) -> Tensor:
        tokens = try_choose(logits, rows, backend)
        if next(calls) % 3 == 1:
            tokens[0] = UNCHOSEN
        return tokens

    monkeypatch.setattr("surefoot.draft.draft_model.try_choose", sometimes)
    target, draft = pair(architecture, 0.1)
    engine = engine_of(target, 4, draft=draft, page_tokens=8, max_rows=2)
    requests = [engine.submit(PROMPT[i:], GREEDY)[0] for i in range(2)]
    while not engine.idle:
        engine.step()
        for request in engine.parts.scheduler._running:
            check_both(engine, draft, request)
    guard = engine.parts.drafter
    assert isinstance(guard, GuardedDrafter)
    assert guard.failures == 0
    for request in requests:
        assert 0 < request.speculation.accepted < request.speculation.drafted


def test_drafter_caches_exist_only_with_a_draft_model(pair: Callable[[str, float], Pair]) -> None:
    target, draft = pair("LlamaForCausalLM", 0.1)
    budget = 1 << 20
    plain = engine_of(target, memory=budget).parts
    drafted = engine_of(target, 2, draft=draft, memory=budget).parts
    assert plain.pools.bytes == plain.plan.total_bytes <= budget
    assert drafted.plan.total_bytes <= budget
    # The same budget holds two models' pages.
    assert drafted.plan.page_bytes == 2 * plain.plan.page_bytes


def test_a_draft_model_follows_every_step(pair: Callable[[str, float], Pair]) -> None:
    """It needs all of a text: what it missed it would have to compute at once."""
    target, draft = pair("LlamaForCausalLM", 0.1)
    policy = engine_of(target, 3, draft=draft, draft_tokens=None).parts.loop._depth
    assert isinstance(policy, AutoDepth)
    assert not policy.suspends
