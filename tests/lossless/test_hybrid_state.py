"""After any accepted count every cache of a hybrid is, to the last bit, that of a plain run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from torch import Tensor

from surefoot.backend.operands import Fold
from surefoot.config import make_config
from surefoot.draft.draft_model import ModelDrafter
from surefoot.draft.drafter import Drafter, DraftRow
from surefoot.draft.guard import GuardedDrafter
from surefoot.engine.engine import Engine
from surefoot.model.model import Description, DraftHead, Model
from surefoot.params import SamplingParams
from surefoot.request import Request, SpeculationCounts
from surefoot.state.pool import Pools
from surefoot.step import Batch
from surefoot.testing.drafters import StatelessDrafter
from surefoot.testing.faults import planted
from tests.lossless.caches import check_draft_model, check_drafter, check_target
from tests.lossless.harness import PROMPTS, VOCAB, Bench, drain
from tests.lossless.poison import drafter_pools, poison

GREEDY = SamplingParams(max_tokens=44, temperature=0)
SCORED = SamplingParams(max_tokens=44, temperature=0, logprobs=2)
QUIET = SamplingParams(max_tokens=20, temperature=0, speculate=False)
PROMPT = PROMPTS[0]


class RightUpTo(StatelessDrafter):
    """Drafts of full length of which so many tokens are right."""

    name = "right up to"

    def __init__(self, answer: Sequence[int], right: int) -> None:
        self.answer, self._right = answer, right

    def guess(self, row: DraftRow) -> list[int]:
        """See StatelessDrafter."""
        begin = row.request.output_length
        coming = list(self.answer[begin : begin + row.limit])
        wrong = [(token + 1) % VOCAB for token in coming[self._right :]]
        return coming[: self._right] + wrong


def engine_of(
    bench: Bench, model: str, drafter: Drafter | str, depth: int = 8, **settings: object
) -> Engine:
    """An engine with pages of 16 tokens on a hybrid."""
    name = drafter if isinstance(drafter, str) else "ngram"
    draft = bench.draft(model) if name == "draft-model" else None
    values: dict[str, object] = {
        "device": "cpu",
        "drafter": name,
        "draft_model": None if draft is None else draft.name,
        "draft_tokens": depth,
        "memory": 1 << 23,
        "max_model_len": 128,
        "page_tokens": 16,
        "max_rows": 4,
    }
    given = None if isinstance(drafter, str) else drafter
    return Engine(bench.target(model), make_config(**{**values, **settings}), draft, given)


def plain(bench: Bench, model: str, prompt: Sequence[int], params: SamplingParams) -> Request:
    """The finished request of a plain run."""
    engine = engine_of(bench, model, "none", 0, prefix_cache=False)
    [request] = engine.submit(prompt, params)
    drain(engine)
    return request


def answer(bench: Bench, model: str, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """What a plain run emits."""
    return list(plain(bench, model, prompt, params).output)


@pytest.mark.parametrize("right", range(9))
def test_caches_are_those_of_a_plain_run_after_any_accepted_count(right: int, bench: Bench) -> None:
    model = "hybrid"
    known = answer(bench, model, PROMPT[:13], GREEDY)
    engine = engine_of(bench, model, RightUpTo(known, right))
    [request] = engine.submit(PROMPT[:13], GREEDY)
    while not engine.idle:
        poison(engine, "nan")
        before = request.speculation.accepted
        engine.step()
        if not request.finished:
            check_target(engine, request)
            if request.output_length > 1:
                assert request.speculation.accepted - before == right
    assert list(request.output) == known


def watch(engine: Engine, bench: Bench, drafter: str) -> None:
    """Run to the end, and look at every cache of every request on the way."""
    draft = bench.draft("hybrid") if drafter == "draft-model" else None
    while not engine.idle:
        poison(engine, "nan")
        engine.step()
        for request in engine.parts.scheduler._running:
            check_target(engine, request)
            check_drafter(engine, request, draft)


@pytest.mark.parametrize("drafter", ["mtp", "draft-model"])
def test_the_drafters_caches_are_those_of_a_plain_run_too(drafter: str, bench: Bench) -> None:
    engine = engine_of(bench, "hybrid", drafter, 5, prefill_chunk=9, max_rows=3)
    prompts = [*PROMPTS[:3], PROMPTS[0]]
    requests = [engine.submit(prompt, GREEDY)[0] for prompt in prompts]
    for _ in range(9):
        poison(engine, "nan")
        engine.step()
    engine.parts.scheduler.preempt_all()
    watch(engine, bench, drafter)
    for request, prompt in zip(requests, prompts, strict=True):
        assert list(request.output) == answer(bench, "hybrid", prompt, GREEDY)
    assert sum(request.preemptions for request in requests) >= 3
    assert sum(request.speculation.accepted for request in requests) > 40


@pytest.mark.parametrize("drafter", ["mtp", "draft-model"])
def test_the_next_turn_resumes_target_and_drafter(drafter: str, bench: Bench) -> None:
    engine = engine_of(bench, "hybrid", drafter, 5)
    [first] = engine.submit(PROMPT, GREEDY)
    drain(engine)
    follow = [*first.tokens, 1, 2]
    [second] = engine.submit(follow, SamplingParams(max_tokens=30, temperature=0))
    watch(engine, bench, drafter)
    assert second.cached_tokens == 80
    cold = engine_of(bench, "hybrid", drafter, 5)
    [third] = cold.submit(follow, second.params)
    drain(cold)
    assert (second.tokens, second.speculation) == (third.tokens, third.speculation)


@pytest.mark.parametrize("chunk", [256, 13, 15])
def test_a_prompt_is_resumed_as_far_with_the_head_as_without(chunk: int, bench: Bench) -> None:
    """One engine each for all prompts: what was cached for one length must not help the next."""
    kinds = (("none", 0), ("mtp", 3))
    engines = [engine_of(bench, "hybrid", *kind, prefill_chunk=chunk) for kind in kinds]
    for length in (1, 2, 14, 15, 16, 17, 18, 27, 31, 32, 33, 48, 49):
        prompt = [length, *((7 * i + length) % VOCAB for i in range(length - 1))]
        plainly, drafted = (resumed(engine, [prompt]) for engine in engines)
        assert plainly == drafted, f"prompt of {length} tokens"
        assert plainly[1] == (length - 1) // 16 * 16


def test_prompts_in_a_crowd_are_resumed_as_far_with_the_head_as_without(bench: Bench) -> None:
    """Chunks are what the others of a step leave, so a single token may be left of a prompt."""
    for room in (17, 28, 44):
        hits = [
            resumed(
                engine_of(bench, "hybrid", *kind, max_step_tokens=room, memory=1 << 24),
                [[start, *PROMPT[: 13 + start]] for start in range(3)],
            )
            for kind in (("none", 0), ("mtp", 3))
        ]
        assert hits[0] == hits[1], f"{room} tokens a step"
        assert sum(hits[0]) > 0


def resumed(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Cached tokens of new prompts, of the same again, and of the turns that follow them."""
    params, hits = SamplingParams(max_tokens=7, temperature=0), []
    follow: list[list[int]] = []
    for asked in (prompts, prompts, follow):
        requests = [engine.submit(prompt, params)[0] for prompt in asked]
        drain(engine)
        hits += [request.cached_tokens for request in requests]
        follow[:] = [[*request.tokens, 3] for request in requests]
    return hits


def test_thirty_two_at_once_get_what_each_gets_alone(bench: Bench) -> None:
    engine = engine_of(bench, "hybrid", "mtp", 3, max_rows=32, memory=1 << 25)
    params = [
        SamplingParams(max_tokens=12, temperature=0.9 if seed % 2 else 0, seed=seed)
        for seed in range(32)
    ]
    prompts = [[*PROMPT[: 3 + seed], seed] for seed in range(32)]
    requests = [engine.submit(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    drain(engine)
    for request, prompt, own in zip(requests, prompts, params, strict=True):
        assert list(request.output) == answer(bench, "hybrid", prompt, own)


def test_pages_without_drafter_state_are_not_looked_at(bench: Bench) -> None:
    drafts = drafts_behind_undrafted_pages(bench, 0.0)
    assert drafts.accepted > 0
    assert drafts_behind_undrafted_pages(bench, 1e4) == drafts


def test_a_point_without_the_drafters_state_is_not_taken_for_one_with_it(bench: Bench) -> None:
    """A request that is not drafted for takes a point on a page that another one has drafted."""
    engine, draft = engine_of(bench, "hybrid", "draft-model", 3), bench.draft("hybrid")
    [first] = engine.submit(PROMPT, GREEDY)
    while len(first.tokens) < 68:
        engine.step()
    [quiet] = engine.submit(first.tokens[:51], SamplingParams(max_tokens=2, speculate=False))
    while not quiet.finished:
        engine.step()
    [second] = engine.submit(first.tokens[:51], GREEDY)
    while not second.finished:
        engine.step()
        if not second.finished:
            check_draft_model(engine, second, draft)
            lease = engine.parts.scheduler._running[second]
    assert (second.cached_tokens, lease.draft_from) == (48, 48)
    drain(engine)


@dataclass
class FailsOnce:
    """A model one of whose calls fails when all is written."""

    model: Model
    at: int
    description: Description = field(init=False)
    draft_head: DraftHead | None = None

    def __post_init__(self) -> None:
        self.description = self.model.description

    def fold(self, folds: Sequence[Fold], pools: Pools) -> None:
        """See Model."""
        self.model.fold(folds, pools)
        self._count()

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        """See Model."""
        hidden = self.model.forward(batch, pools)
        self._count()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model."""
        return self.model.logits(hidden)

    def _count(self) -> None:
        self.at -= 1
        if self.at == 0:
            raise RuntimeError("planted")


@pytest.mark.parametrize("at", [*range(1, 13), 20, 21, 22, 23, 24])
def test_a_draft_model_that_failed_half_way_starts_anew(at: int, bench: Bench) -> None:
    """Its checkpoints may be ahead of its cursor, or behind; the next turn must not get them."""
    # A replay calls no model, so nothing could fail in it.
    engine = engine_of(bench, "hybrid", "draft-model", 3, capture=False)
    draft = bench.draft("hybrid")
    guard = engine.parts.drafter
    assert isinstance(guard, GuardedDrafter)
    assert isinstance(guard._drafter, ModelDrafter)
    guard._drafter._model = FailsOnce(draft.model, at)
    tokens = list(PROMPT)
    for _ in range(2):
        [request] = engine.submit(tokens, SamplingParams(max_tokens=24, temperature=0))
        while not engine.idle:
            engine.step()
            if not request.finished:
                check_draft_model(engine, request, draft)
        tokens = [*request.tokens, 1]
    assert guard.failures == 1
    assert request.cached_tokens == 64


def drafts_behind_undrafted_pages(bench: Bench, value: float) -> SpeculationCounts:
    """How drafting goes where the head's entries of the cached pages are not there but `value`."""
    engine = engine_of(bench, "hybrid", "mtp", 3)
    [first] = engine.submit(PROMPT, QUIET)
    drain(engine)
    pages = [node.page for node in engine.parts.ledger.tree.nodes() if not node.drafted]
    assert len(pages) == 3
    [pools] = drafter_pools(engine)
    pools.poison(pages, [], [], value)
    [second] = engine.submit([*first.tokens, 1], GREEDY)
    drain(engine)
    assert second.cached_tokens == 48
    assert list(second.output) == answer(bench, "hybrid", [*first.tokens, 1], GREEDY)
    return second.speculation


def decode_across_blocks(bench: Bench) -> list[Request]:
    """Two turns, in both of which accepted drafts complete blocks; logprobs show every bit."""
    known = answer(bench, "hybrid", PROMPT[:13], SCORED)
    drafter = RightUpTo(known, 5)
    engine = engine_of(bench, "hybrid", drafter)
    [first] = engine.submit(PROMPT[:13], SCORED)
    drain(engine)
    follow = [*PROMPT[:13], *known, 1]
    drafter.answer = answer(bench, "hybrid", follow, SCORED)
    [second] = engine.submit(follow, SCORED)
    drain(engine)
    return [first, second]


def differences(bench: Bench) -> list[bool]:
    """Whether each of the two turns differs from a plain run."""
    requests = decode_across_blocks(bench)
    prompts = [PROMPT[:13], requests[1].tokens[: requests[1].prompt_length]]
    right = [plain(bench, "hybrid", prompt, SCORED) for prompt in prompts]
    return [
        (request.output, request.logprobs) != (known.output, known.logprobs)
        for request, known in zip(requests, right, strict=True)
    ]


def test_two_turns_across_blocks_are_right(bench: Bench) -> None:
    assert differences(bench) == [False, False]
    assert decode_across_blocks(bench)[1].cached_tokens == 48


@pytest.mark.parametrize("fault", ["fold forgotten", "fold done twice"])
def test_a_fault_of_folding_is_found(fault: str, bench: Bench) -> None:
    with planted(fault):
        assert differences(bench)[0]


@pytest.mark.parametrize("fault", ["points without rings", "points without checkpoints"])
def test_half_a_resume_point_is_found(fault: str, bench: Bench) -> None:
    """The point is taken when an accepted run crosses a boundary; the next turn starts there."""
    with planted(fault):
        assert differences(bench) == [False, True]


def test_a_boundary_state_that_is_not_kept_is_found(bench: Bench) -> None:
    with (
        planted("boundary state not kept"),
        pytest.raises(AssertionError, match=r"boundary|states"),
    ):
        test_the_next_turn_resumes_target_and_drafter("mtp", bench)


def test_a_draft_head_that_looks_below_draft_from_is_found(bench: Bench) -> None:
    with planted("draft_from ignored"):
        drafts = drafts_behind_undrafted_pages(bench, 0.0)
        assert drafts_behind_undrafted_pages(bench, 1e4) != drafts
