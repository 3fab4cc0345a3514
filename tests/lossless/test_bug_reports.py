"""Faults that users of other engines met on dense models, each tried here."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch

from surefoot.config import make_config
from surefoot.draft.drafter import DraftRow
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel
from surefoot.ids import RequestId
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.sample.context import Contexts
from surefoot.sample.processors import RowContext
from surefoot.state.pool import Pools
from surefoot.step import Row, Step
from surefoot.testing.drafters import AlwaysRight, RandomLength, StatelessDrafter
from tests.lossless.harness import PROMPTS, VOCAB, Bench, Case, Run, drain
from tests.unit.engine.engines import complete, engine_of
from tests.unit.state.plans import plan_of

GREEDY = SamplingParams(max_tokens=16, temperature=0)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.9, seed=8)


class Known:
    """An oracle that was told the answers, by prompt."""

    def __init__(self, answers: dict[tuple[int, ...], Sequence[int]]) -> None:
        self.answers = answers

    def __call__(self, request: Request, count: int) -> list[int]:
        begin = request.output_length
        answer = self.answers[tuple(request.tokens[: request.prompt_length])]
        return list(answer[begin : begin + count])


def alone(model: LoadedModel, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """The plain answer."""
    engine = engine_of(model, prefix_cache=False, max_rows=1)
    return list(complete(engine, [prompt], params)[0].output)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 7, 12])
@pytest.mark.parametrize("model", ["llama", "sliding"])
def test_many_tokens_on_a_warm_cache_are_as_many_single_ones(
    model: str, chunk: int, bench: Bench
) -> None:
    case = Case(model, "none", 0, chunk=chunk, sampling="logprobs", batch=1)
    assert Run(bench, case).finish() == []


@pytest.mark.parametrize("length", range(1, 13))
def test_greedy_text_with_a_draft_model_is_the_same_for_every_prompt_length(
    length: int, bench: Bench
) -> None:
    target, prompt = bench.target("llama"), PROMPTS[0][:length]
    engine = engine_of(target, 4, draft=bench.draft("llama"))
    [request] = complete(engine, [prompt], GREEDY)
    assert list(request.output) == alone(target, prompt, GREEDY)


def test_deep_drafts_in_a_crowd_with_random_arrivals_give_everybody_their_own_text(
    bench: Bench,
) -> None:
    target, random = bench.target("llama"), Random(4)
    prompts = [tuple(random.randrange(VOCAB) for _ in range(3 + i)) for i in range(16)]
    answers: dict[tuple[int, ...], Sequence[int]] = {
        prompt: alone(target, prompt, SAMPLED) for prompt in prompts
    }
    engine = engine_of(target, 7, RandomLength(Known(answers), VOCAB, seed=2), max_rows=8)
    requests: list[Request] = []
    for prompt in prompts:
        requests += engine.submit(prompt, SAMPLED)
        for _ in range(random.randint(0, 3)):
            engine.step()
    drain(engine)
    assert [list(request.output) for request in requests] == list(answers.values())
    assert sum(request.speculation.accepted for request in requests) > 50


class Guesses(StatelessDrafter):
    """Draws from a few tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._random = tokens, Random(1)

    def guess(self, row: DraftRow) -> list[int]:
        return [self._random.choice(self._tokens) for _ in range(row.limit)]


def next_laws(
    model: LoadedModel, prefixes: Sequence[Sequence[int]], allowed: list[int]
) -> torch.Tensor:
    """[prefixes, allowed] probabilities of the allowed tokens after each prefix."""
    caches = model.model.description.caches
    plan = plan_of(*caches, max_model_len=64, budget_bytes=1 << 22, prefix_cache=False)
    rows = [Row(p, 0, len(p), [i + 1], 1, 0, 1, 0) for i, p in enumerate(prefixes)]
    pools = Pools(caches, replace(plan, pages=len(rows)), model.backend.device)
    with torch.inference_mode():
        batch = Step.of(rows, 16).build(model.backend)
        hidden = model.model.forward(batch, pools)[batch.wanted]
        return torch.softmax(model.model.logits(hidden)[:, allowed].double(), -1)


def test_every_row_of_a_verify_step_is_sampled_from_the_models_law(bench: Bench) -> None:
    """Three tokens of 1,600 samples, two of them chosen in verify rows, against enumeration."""
    model, allowed, prompt = bench.target("llama"), [3, 13, 29, 45], [1, 2, 3]
    engine = engine_of(model, 3, Guesses(allowed), max_rows=32, memory=1 << 22)
    params = SamplingParams(max_tokens=3, allowed_token_ids=tuple(allowed), n=64)
    requests = [
        request
        for seed in range(25)
        for request in engine.submit(prompt, replace(params, seed=seed))
    ]
    drain(engine)
    assert sum(request.speculation.accepted for request in requests) > 100
    first = next_laws(model, [prompt], allowed)[0]
    second = next_laws(model, [[*prompt, a] for a in allowed], allowed)
    pairs = list(product(allowed, repeat=2))
    third = next_laws(model, [[*prompt, *pair] for pair in pairs], allowed)
    expected = (first[:, None] * second).view(-1, 1) * third * len(requests)
    counts = dict.fromkeys(product(allowed, repeat=3), 0)
    for request in requests:
        counts[request.output[0], request.output[1], request.output[2]] += 1
    found = torch.tensor(list(counts.values()), dtype=torch.float64).view_as(expected)
    # Cells with small expectations are put together.
    large = expected >= 5
    rest = (found[~large].sum() - expected[~large].sum()) ** 2 / expected[~large].sum()
    statistic = ((found - expected)[large] ** 2 / expected[large]).sum() + rest
    freedom = int(large.sum())
    # Wilson and Hilferty's approximation of the quantile at 1 - 1e-4.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert freedom >= 10
    assert float(statistic) < limit


class Script:
    """A depth for each phase of a test."""

    depth = 3
    follows = True

    def limits(self, requests: Sequence[Request], others: int) -> list[int]:
        return [self.depth] * len(requests)

    def learn(self, request: RequestId, drafted: int, accepted: int) -> None:
        """Nothing to learn."""

    def measure(self, cost: object) -> None:
        """Nothing to learn."""

    def forget(self, request: RequestId) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("model", ["llama", "sliding"])
def test_drafts_are_as_good_after_a_pause_of_drafting_as_before(model: str, bench: Bench) -> None:
    """Depth 3, then 0 in a crowd of six, then 3 again; an equal draft model is always right."""
    target = bench.target(model)
    engine = engine_of(target, 3, draft=bench.equal_draft(model), page_tokens=8)
    script = Script()
    engine.parts.loop._depth = script
    [request] = engine.submit(PROMPTS[0], replace(GREEDY, max_tokens=60))

    def phase(depth: int, steps: int) -> tuple[int, int]:
        script.depth = depth
        before = request.speculation.drafted, request.speculation.accepted
        for _ in range(steps):
            engine.step()
        after = request.speculation.drafted, request.speculation.accepted
        return after[0] - before[0], after[1] - before[1]

    while request.output_length == 0:
        engine.step()
    assert phase(3, 5) == (15, 15)
    others = [engine.submit([7, i, 9], replace(GREEDY, max_tokens=8))[0] for i in range(5)]
    assert phase(0, 14) == (0, 0)
    assert all(other.finished for other in others)
    assert phase(3, 5) == (15, 15)
    drain(engine)


def test_a_short_prompt_after_a_long_one_is_drafted_as_in_a_fresh_engine(bench: Bench) -> None:
    target, short = bench.target("llama"), [5, 6, 7] * 5
    used = engine_of(target, 4, max_rows=1)
    complete(used, [[(i * i) % VOCAB for i in range(90)]], GREEDY)
    params = replace(GREEDY, max_tokens=60)
    [after] = complete(used, [short], params)
    [fresh] = complete(engine_of(target, 4, max_rows=1), [short], params)
    assert after.speculation == fresh.speculation
    assert fresh.speculation.drafted > 0


class AcceptsExactly(AlwaysRight):
    """Right up to a place, wrong from there on."""

    def __init__(self, oracle: Known, right: int) -> None:
        super().__init__(oracle)
        self._right = right

    def guess(self, row: DraftRow) -> list[int]:
        draft = super().guess(row)
        wrong = [(token + 1) % VOCAB for token in draft[self._right :]]
        return draft[: self._right] + wrong


@pytest.mark.parametrize("right", range(5))
def test_partial_rejects_at_every_offset_across_the_window_edge_change_nothing(
    right: int, bench: Bench
) -> None:
    """The window holds 8 positions; prompts of 1 to 18 tokens meet its edge at every offset."""
    target = bench.target("sliding")
    for length in range(1, 19):
        prompt = PROMPTS[0][:length]
        answer = alone(target, prompt, GREEDY)
        drafter = AcceptsExactly(Known({prompt: answer}), right)
        [request] = complete(engine_of(target, 4, drafter), [prompt], GREEDY)
        assert list(request.output) == answer, f"prompt of {length} tokens"


def test_a_long_text_takes_no_more_window_than_a_short_one(bench: Bench) -> None:
    target = bench.target("sliding")
    params = replace(GREEDY, max_tokens=300)
    answer = alone_of_length(target, 300)
    drafter = RandomLength(Known({(11,): answer}), VOCAB, seed=3)
    engine = engine_of(target, 5, drafter, max_model_len=320, memory=1 << 20)
    before = engine.parts.pools.bytes
    [request] = engine.submit([11], params)
    while not engine.idle:
        engine.step()
        assert engine.parts.ledger.free_slots >= engine.config.max_rows - 1
        held, known = engine.usage.held_pages, len(request.tokens)
        assert held <= (known + 5) // 16 + 1
    assert list(request.output) == answer
    assert engine.parts.pools.bytes == before == engine.parts.plan.total_bytes


def alone_of_length(model: LoadedModel, length: int) -> list[int]:
    """A long plain answer to a prompt of one token."""
    engine = engine_of(model, max_model_len=320, max_rows=1)
    return list(complete(engine, [[11]], replace(GREEDY, max_tokens=length))[0].output)


def test_windows_and_pages_are_sized_for_the_depth_and_for_nothing_without_drafts(
    bench: Bench,
) -> None:
    target = bench.target("sliding")
    for depth in (0, 1, 4, 16):
        plan = engine_of(target, depth).parts.plan
        assert plan.capacities == {"window": 8 + depth + 1}


class Recording(Contexts):
    """Keeps what each row's history was."""

    rows: ClassVar[list[tuple[int, list[int]]]] = []

    def after(self, request: Request, drafts: Sequence[int]) -> RowContext:
        context = super().after(request, drafts)
        self.rows.append((context.position, list(context.history)))
        return context


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_every_row_sees_a_history_that_ends_with_the_token_before_it(
    depth: int, bench: Bench
) -> None:
    target, prompt = bench.target("llama"), PROMPTS[2]
    params = replace(GREEDY, frequency_penalty=0.5)
    drafter = AlwaysRight(Known({prompt: alone(target, prompt, params)}))
    Recording.rows.clear()
    with patch("surefoot.engine.runner.Contexts", Recording):
        engine = engine_of(target, depth, drafter if depth else None)
    [request] = complete(engine, [prompt], params)
    rows = Recording.rows
    assert [position for position, _ in rows] == list(range(len(prompt), len(request.tokens)))
    for position, history in rows:
        assert history == request.tokens[:position]


def test_no_end_token_comes_before_min_tokens_in_any_row(bench: Bench) -> None:
    """A text that wants to end at once, drafted for and not, side by side."""
    target = bench.target("llama")
    wants_to_end = SamplingParams(
        max_tokens=40, temperature=0, min_tokens=17, stop_token_ids=(9,), logit_bias={9: 100.0}
    )
    prompts = [PROMPTS[2], PROMPTS[6], PROMPTS[4]]
    expected = [alone(target, prompt, wants_to_end) for prompt in prompts]
    answers: dict[tuple[int, ...], Sequence[int]] = dict(zip(prompts, expected, strict=True))
    for drafter in (AlwaysRight(Known(answers)), Guesses([9]), None):
        engine = engine_of(target, 4, drafter)
        undrafted = replace(wants_to_end, speculate=False)
        requests = [
            engine.submit(prompt, wants_to_end if i % 2 else undrafted)[0]
            for i, prompt in enumerate(prompts)
        ]
        drain(engine)
        assert [list(request.output) for request in requests] == expected
    for output in expected:
        assert 9 not in output[:17]
        assert output[17:] == [9]


def test_one_token_per_request_in_bulk_comes_back_in_time(bench: Bench) -> None:
    target = bench.target("llama")
    engine = engine_of(target, 4, max_rows=4)
    prompts = [[1 + number % 60, 2, 3] for number in range(200)]
    requests = complete(engine, prompts, replace(GREEDY, max_tokens=1))
    assert [request.output_length for request in requests] == [1] * 200


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_algorithm": "NGRAM"},
        {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 4},
        {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3},
        {"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 1},
        {"speculative_config": '{"method": "ngram"}'},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"drafter": "ngram", "draft_tokens": 3},
        {"drafter": "ngram"},
        {"drafter": "auto"},
        {},
    ],
    ids=str,
)
def test_every_way_to_ask_for_drafts_starts_with_options_left_out(
    settings: dict[str, object], bench: Bench
) -> None:
    target = bench.target("llama")
    config = make_config(device="cpu", memory=1 << 22, max_model_len=64, max_rows=2, **settings)
    engine = Engine(target, config)
    assert engine.parts.drafter.name == "ngram"
    [request] = engine.submit([5, 6] * 4, GREEDY)
    drain(engine)
    assert list(request.output) == alone(target, [5, 6] * 4, GREEDY)
