"""The draft head's entries and the states beside them, however requests come and go."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from surefoot.draft.depth import AutoDepth
from surefoot.draft.drafter import CommittedRow
from surefoot.draft.guard import GuardedDrafter
from surefoot.draft.mtp import MtpDrafter
from surefoot.engine.engine import Engine
from surefoot.errors import SettingError
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.state.pool import Pools
from surefoot.step import Batch
from tests.unit.draft.heads import (
    FakeHead,
    FakeModel,
    check_state,
    drafter_of,
    engine_on,
    fake_model,
    lease_of,
    state_of,
)
from tests.unit.engine.engines import complete, drain

MODEL = fake_model()
PROMPT = [(5 * i * i + 3) % 50 for i in range(23)]


def greedy(tokens: int, speculate: bool = True) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, speculate=speculate)


def watch(engine: Engine, most: int = 200) -> None:
    """Run to the end, with a look at every running request after each step."""
    for _ in range(most):
        if engine.idle:
            return
        engine.step()
        for request in engine.parts.scheduler._running:
            check_state(engine, request)
    raise AssertionError("comes to no end")


def plain(prompt: Sequence[int], tokens: int) -> list[int]:
    return complete(engine_on(MODEL, 0), [prompt], greedy(tokens))[0].tokens


@pytest.mark.parametrize("depth", [1, 2, 5, 8])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 23])
def test_every_entry_has_the_state_of_the_token_before(depth: int, length: int) -> None:
    engine = engine_on(MODEL, depth)
    [request] = engine.submit(PROMPT[:length], greedy(30))
    watch(engine)
    assert request.tokens == plain(PROMPT[:length], 30)
    # The head is wrong at every fourth position only, which single tokens may miss.
    assert request.speculation.accepted > (12 if depth > 1 else 8)
    assert depth == 1 or request.speculation.accepted < request.speculation.drafted


class _Reading(FakeHead):
    """Keeps how far behind a token the head's own state that came with it is."""

    def __init__(self) -> None:
        self.behind: list[float] = []

    def forward(self, batch: Batch, hidden: Tensor, pools: Pools) -> Tensor:
        given = -hidden[:, 0]
        own = given > 0
        self.behind += (batch.positions[own] - given[own] % 1000).tolist()
        return super().forward(batch, hidden, pools)


def test_behind_the_bonus_the_head_reads_its_own_state_of_the_token_before() -> None:
    head = _Reading()
    engine = engine_on(replace(MODEL, model=FakeModel(head)), 3)
    for length in (23, 9, 5):
        engine.submit(PROMPT[:length], greedy(20))
    watch(engine)
    assert set(head.behind) == {1}
    assert len(head.behind) > 20


def test_a_crowd_with_chunks_and_preemptions() -> None:
    engine = engine_on(MODEL, 3, prefill_chunk=5, max_rows=3)
    prompts = [[*PROMPT[:9], i] for i in range(5)]
    requests = [engine.submit(prompt, greedy(20))[0] for prompt in prompts]
    for number in range(8):
        if number in (3, 6):
            engine.parts.scheduler.preempt_all()
        engine.step()
        for request in engine.parts.scheduler._running:
            check_state(engine, request)
    watch(engine)
    assert sum(request.preemptions for request in requests) > 3
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.tokens == plain(prompt, 20)


def test_requests_may_want_different_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(MODEL, 4)
    depths = iter(([1, 4, 2], [4, 0, 3], [0, 1, 4]) * 20)

    def limits(requests: Sequence[Request], others: int) -> list[int]:
        return [*next(depths), 4][: len(requests)]

    monkeypatch.setattr(engine.parts.loop, "_depth", _Depths(limits))
    requests = [engine.submit(PROMPT[i:], greedy(20))[0] for i in range(3)]
    watch(engine)
    assert [request.tokens for request in requests] == [plain(PROMPT[i:], 20) for i in range(3)]


def test_an_answer_that_no_draft_is_asked_for_is_let_go_and_taken_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts are followed, and P = 4 tokens of an answer."""
    engine, depth = engine_on(MODEL, 3), 0
    monkeypatch.setattr(
        engine.parts.loop, "_depth", _Depths(lambda requests, _: [depth] * len(requests))
    )
    [request] = engine.submit(PROMPT, greedy(60))
    kept = drafter_of(engine)._kept
    for _ in range(20):
        engine.step()
    # When the head first met the request, a token of the answer was known.
    assert kept[request.id] == len(PROMPT) + 1 + 4
    assert lease_of(engine, request).drafted <= kept[request.id] < len(request.tokens) - 10
    depth, before = 2, len(request.tokens)
    for _ in range(3):
        engine.step()
    # Nothing came when a draft was first asked for; from then on the head follows.
    assert lease_of(engine, request).draft_from == before
    assert 0 < request.speculation.drafted <= 4
    check_state(engine, request)
    watch(engine)
    assert request.tokens == plain(PROMPT, 60)
    assert request.speculation.accepted > 10
    # Pages that the head did not follow are cached without its state.
    [second] = engine.submit([*request.tokens, 1], greedy(4))
    engine.step()
    assert lease_of(engine, second).draft_from == second.cached_tokens + 1 > 60


def test_an_answer_that_was_not_followed_is_taken_up_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither its prompt was; the second turn finds pages without the head's entries."""
    engine, depth = engine_on(MODEL, 3), 0
    depths = _Depths(lambda requests, _: [depth] * len(requests), follows=False)
    monkeypatch.setattr(engine.parts.loop, "_depth", depths)
    [request] = engine.submit(PROMPT, greedy(60))
    for _ in range(20):
        engine.step()
    assert request.id not in drafter_of(engine)._kept
    assert lease_of(engine, request).drafted == 0
    depth, depths.follows, before = 2, True, len(request.tokens)
    engine.step()
    assert lease_of(engine, request).draft_from == before
    watch(engine)
    assert request.tokens == plain(PROMPT, 60)
    assert request.speculation.accepted > 10
    turn = [*request.tokens, 1, 2]
    [second] = engine.submit(turn, greedy(30))
    watch(engine)
    assert second.cached_tokens > 60
    assert second.tokens == plain(turn, 30)


def test_the_head_need_not_follow_where_drafts_do_not_pay() -> None:
    policy = engine_on(MODEL, 3, draft_tokens=None).parts.loop._depth
    assert isinstance(policy, AutoDepth)
    assert policy.suspends


class _Depths:
    def __init__(self, limits: object, follows: bool = True) -> None:
        self.limits, self.follows = limits, follows

    def learn(self, *_: object) -> None: ...

    def measure(self, *_: object) -> None: ...

    def forget(self, *_: object) -> None: ...


@pytest.mark.parametrize("extra", range(1, 6))
def test_a_resumed_prefix_brings_the_drafters_state_along(extra: int) -> None:
    engine = engine_on(MODEL, 3)
    [first] = complete(engine, [PROMPT], greedy(10))
    follow = [*first.tokens, *range(extra)]
    [second] = engine.submit(follow, greedy(12))
    watch(engine)
    assert second.cached_tokens >= 24
    [cold] = complete(engine_on(MODEL, 3), [follow], greedy(12))
    assert second.tokens == cold.tokens
    assert second.speculation == cold.speculation


def test_a_resumed_prefix_is_drafted_for_at_once() -> None:
    """One token is left to compute, so the first step is a verify row."""
    engine = engine_on(MODEL, 3)
    complete(engine, [PROMPT[:21]], greedy(1))
    [request] = engine.submit(PROMPT[:21], greedy(12))
    engine.step()
    assert request.cached_tokens == 20
    assert request.speculation.drafted == 3
    check_state(engine, request)
    drain(engine)
    assert request.tokens == plain(PROMPT[:21], 12)


def test_pages_without_drafter_state_are_not_looked_at() -> None:
    engine = engine_on(MODEL, 3)
    [first] = complete(engine, [PROMPT], greedy(10, speculate=False))
    assert first.speculation.drafted == 0
    [second] = engine.submit([*first.tokens, 1, 2], greedy(12))
    engine.step()
    lease = lease_of(engine, second)
    # The state of the last cached token is nowhere, so not even the next entry exists.
    assert lease.draft_from == second.cached_tokens + 1 > 1
    check_state(engine, second)
    watch(engine)
    assert second.speculation.accepted > 0
    assert second.tokens == plain([*first.tokens, 1, 2], 12)


def test_a_first_row_without_drafter_state_is_not_drafted_for() -> None:
    engine = engine_on(MODEL, 3)
    complete(engine, [PROMPT[:21]], greedy(1, speculate=False))
    [request] = engine.submit(PROMPT[:21], greedy(12))
    engine.step()
    assert (request.cached_tokens, request.speculation.drafted) == (20, 0)
    watch(engine)
    assert request.speculation.accepted > 0


def test_pages_with_drafter_state_take_the_place_of_pages_without() -> None:
    engine = engine_on(MODEL, 3)
    complete(engine, [PROMPT], greedy(1, speculate=False))
    nodes = list(engine.parts.ledger.tree.nodes())
    assert not any(node.drafted for node in nodes)
    scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    complete(engine, [PROMPT], scored)
    assert all(node.drafted for node in engine.parts.ledger.tree.nodes())
    engine.parts.ledger.audit()


@pytest.mark.parametrize("page", [4, 8])
def test_the_cache_is_hit_as_often_with_the_head_as_without(page: int) -> None:
    for length in range(1, 40):
        prompt = [(length * i + i // 7) % 50 for i in range(length)]
        hits = []
        for depth in (0, 3):
            engine = engine_on(MODEL, depth, page_tokens=page)
            [one] = complete(engine, [prompt], greedy(6))
            [two] = complete(engine, [prompt], greedy(6))
            [three] = complete(engine, [[*one.tokens, 1]], greedy(6))
            hits.append([request.cached_tokens for request in (one, two, three)])
        assert hits[0] == hits[1], f"prompt of {length} tokens"


class _FailsOnce(FakeHead):
    """The call that catches up for the third time raises."""

    def __init__(self) -> None:
        self._calls = 0

    def catch_up(self, batch: Batch, hidden: Tensor, pools: Pools) -> None:
        """See DraftHead."""
        self._calls += 1
        if self._calls == 3:
            raise RuntimeError("planted")
        super().catch_up(batch, hidden, pools)


def test_after_a_failure_the_head_starts_anew() -> None:
    model = fake_model()
    engine = engine_on(
        replace(model, model=FakeModel(_FailsOnce())), 0, drafter="mtp", draft_tokens=3
    )
    [request] = engine.submit(PROMPT, greedy(30))
    starts = set()
    while not engine.idle:
        engine.step()
        if request.status.value == "running":
            starts.add(lease_of(engine, request).draft_from)
    guard = engine.parts.drafter
    assert isinstance(guard, GuardedDrafter)
    assert guard.failures == 1
    # The state of the last token before was lost too, so not even the next entry exists.
    start, later = sorted(starts - {0})
    assert later == start + 1 > len(PROMPT)
    assert request.tokens == plain(PROMPT, 30)
    # Pages that lack an entry are marked so, and the others lack none.
    marks = check_pages(engine, guard._drafter, request.tokens)
    assert not all(marks)
    assert any(marks[:3])
    assert any(marks[-3:])


def check_pages(engine: Engine, drafter: object, tokens: Sequence[int]) -> list[bool]:
    """What the cached pages of `tokens` say of the drafter's entries, which must be so."""
    assert isinstance(drafter, MtpDrafter)
    entries, parent = drafter._pools.paged("mtp.kv", "entry")[0], engine.parts.ledger.tree.root
    marks: list[bool] = []
    while parent.children:
        [parent] = parent.children.values()
        first = len(marks) * 4
        marks.append(parent.drafted)
        for position in range(max(1, first), first + 4) if parent.drafted else ():
            entry = entries[parent.page, 0, position % 4].tolist()
            before = float(state_of(tokens[position - 1], position - 1))
            assert entry == [tokens[position], before], f"entry {position}"
    return marks


class _SometimesSilent(FakeHead):
    """Says nothing that could be chosen at every fifth position."""

    def logits(self, hidden: Tensor) -> Tensor:
        """See DraftHead."""
        silent = (-hidden[:, 0]).long() % 5 == 0
        return super().logits(hidden).masked_fill(silent[:, None], torch.nan)


def test_a_token_that_cannot_be_chosen_is_a_wrong_guess_and_no_failure() -> None:
    model = replace(fake_model(), model=FakeModel(_SometimesSilent()))
    engine = engine_on(model, 4, max_rows=3)
    requests = [engine.submit(PROMPT[i:], greedy(20))[0] for i in range(3)]
    watch(engine)
    assert drafter_of(engine).name == "mtp"
    assert [request.tokens for request in requests] == [plain(PROMPT[i:], 20) for i in range(3)]
    for request in requests:
        assert 0 < request.speculation.accepted < request.speculation.drafted


class _FailsToKeep(MtpDrafter):
    """The states of the tokens that complete page 7 are lost."""

    def _keep(self, rows: Sequence[CommittedRow], flat: Tensor) -> None:
        if any(row.first < 28 <= row.lease.computed for row in rows):
            raise RuntimeError("planted")
        super()._keep(rows, flat)


def test_a_page_whose_last_state_was_not_kept_is_not_drafted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("surefoot.engine.assemble.MtpDrafter", _FailsToKeep)
    engine = engine_on(MODEL, 3)
    [request] = complete(engine, [PROMPT], greedy(20))
    assert request.tokens == plain(PROMPT, 20)
    guard = engine.parts.drafter
    assert isinstance(guard, GuardedDrafter)
    marks = check_pages(engine, guard._drafter, request.tokens)
    assert (guard.failures, marks[:6], marks[6], marks[-1]) == (1, [True] * 6, False, True)


def test_observing_nothing_is_nothing() -> None:
    engine = engine_on(MODEL, 3)
    drafter = drafter_of(engine)
    assert isinstance(drafter, MtpDrafter)
    rows: list[CommittedRow] = []
    drafter.observe(rows, drafter._recent)
    assert drafter.propose([]) == []


def test_the_plan_has_room_for_the_heads_caches() -> None:
    plain_plan, plan = engine_on(MODEL, 0).parts.plan, engine_on(MODEL, 3).parts.plan
    # An entry of two numbers a token, and a state of one number a page.
    assert plan.page_bytes == plain_plan.page_bytes + 4 * 2 * 4 + 4
    assert not plan.bounded


def test_all_that_the_head_keeps_is_planned() -> None:
    engine = engine_on(MODEL, 3)
    pools = drafter_of(engine)._pools
    assert engine.parts.pools.bytes + pools.bytes == engine.parts.plan.total_bytes
    recent = drafter_of(engine)._recent
    assert recent.data_ptr() == pools.rows("draft.recent", "hidden").data_ptr()
    assert len(recent) == (1 + engine.parts.plan.slots) * (4 + 3 + 1)


def test_auto_takes_the_head() -> None:
    engine = engine_on(MODEL, 3, drafter="auto")
    assert engine.parts.drafter.name == "mtp"


def test_a_model_without_a_head_says_so() -> None:
    model = fake_model()
    bare = FakeModel(None, replace(model.model.description, draft_head=None, draft_caches=()))
    with pytest.raises(SettingError, match="needs a draft head in the checkpoint"):
        engine_on(replace(model, model=bare), 3)
