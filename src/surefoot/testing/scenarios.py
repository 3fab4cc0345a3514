"""What a simulated run is made of: pools, limits, a drafter, arriving requests; all by a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from surefoot.engine.scheduler import SchedulerLimits
from surefoot.ids import RequestId
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.state.ledger import LedgerLimits
from surefoot.testing.fakes import HashModel

END_TOKEN = 0
DRAFTERS = (
    "none",
    "ngram",
    "right",
    "wrong",
    "random",
    "alternating",
    "raising",
    "rubbish",
    "paged",
)


@dataclass(frozen=True)
class Arrival:
    """A request and the step at which it comes."""

    step: int
    request: Request


@dataclass(frozen=True)
class Scenario:
    """All that one simulation depends on.

    Attributes:
        seed: of everything that happens by chance.
        model: decides the tokens.
        ledger: pages, slots, points.
        scheduler: rows and tokens of a step.
        drafter: one of DRAFTERS.
        draft_tokens: greatest depth.
        adaptive: the depth is chosen by measured acceptance and (pretended) cost.
        arrivals: the requests, in order of arrival.
        failure_rate: chance that a call of runner or drafter fails.
        abort_rate: chance, at each step, that some request is aborted.
        preempt_rate: chance, at each step, that requests are pre-empted from outside.
    """

    seed: int
    model: HashModel
    ledger: LedgerLimits
    scheduler: SchedulerLimits
    drafter: str
    draft_tokens: int
    adaptive: bool
    arrivals: tuple[Arrival, ...]
    failure_rate: float = 0.0
    abort_rate: float = 0.0
    preempt_rate: float = 0.0


def make_scenario(seed: int) -> Scenario:
    """The scenario of a seed; small pools, so that everything is scarce now and then."""
    random = Random(seed)
    bounded = random.random() < 0.5
    model = HashModel(
        vocab=random.choice([4, 16, 64]),
        window=random.choice([1, 3, 6, 12]) if bounded else 0,
        broken_one_in=random.choice([0, 0, 0, 150]),
    )
    page_tokens, rows = random.choice([1, 2, 4, 4, 8]), random.randint(1, 6)
    # Other draws than those above and below, which stay what they were for each seed.
    others = Random(f"{seed}/recurrent")
    blocks = [block for block in (2, 4, 8) if page_tokens % block == 0] if bounded else []
    block = others.choice([0, *blocks])
    model = replace(model, block=block)
    arrivals = _arrivals(random, model.vocab, page_tokens)
    longest = max(arrival.request.length_limit for arrival in arrivals)
    spare = random.choice([0, 1, 3, 10, 40])
    return Scenario(
        seed=seed,
        model=model,
        ledger=LedgerLimits(
            pages=-(-longest // page_tokens) + spare,
            slots=others.choice([rows, rows, max(1, rows - 2)]),
            points=random.choice([0, 1, 2, 4, 8]),
            page_tokens=page_tokens,
            bounded=bounded,
            point_every=random.choice([1, 2, 4, 16]),
            prefix_cache=random.random() < 0.8,
        ),
        scheduler=SchedulerLimits(
            max_rows=rows,
            max_step_tokens=rows + random.choice([0, 1, 4, 12, 40]),
            prefill_chunk=random.choice([1, 3, 8, 64]),
        ),
        drafter=random.choice(DRAFTERS),
        draft_tokens=min(random.randint(0, 6), block - 1 if block else 6),
        adaptive=random.random() < 0.3,
        arrivals=arrivals,
        failure_rate=random.choice([0, 0, 0, 0.02, 0.1]),
        abort_rate=random.choice([0, 0, 0.05, 0.2]),
        preempt_rate=random.choice([0, 0, 0.1, 0.3]),
    )


def make_request(number: int, prompt: list[int], params: SamplingParams, seed: int = 0) -> Request:
    """A request that ends at END_TOKEN, after max_tokens, or never otherwise.

    Args:
        number: its id; lower ones came earlier.
        prompt: token ids.
        params: max_tokens must be a number.
        seed: key of its noise.
    """
    assert params.max_tokens is not None, "a simulated request needs a limit"
    return Request(
        id=RequestId(number),
        tokens=list(prompt),
        prompt_length=len(prompt),
        params=params,
        seed=seed,
        length_limit=len(prompt) + params.max_tokens,
        end_tokens=frozenset() if params.ignore_eos else frozenset({END_TOKEN}),
    )


def _arrivals(random: Random, vocab: int, page_tokens: int) -> tuple[Arrival, ...]:
    stems = [[random.randrange(vocab) for _ in range(40)] for _ in range(2)]
    step, arrivals = 0, []
    for number in range(random.randint(1, 7)):
        step += random.choice([0, 0, 0, 1, 2, 10])
        stem = random.choice(stems)[: random.choice([0, 0, 2 * page_tokens, 12, 30, 40])]
        own = [random.randrange(vocab) for _ in range(random.choice([1, 1, 2, 5, 12]))]
        most = random.choice([1, 1, 2, 5, 12, 20])
        params = SamplingParams(
            max_tokens=most,
            min_tokens=random.choice([0, 0, min(3, most), most]),
            ignore_eos=random.random() < 0.3,
            speculate=random.random() < 0.9,
        )
        request = make_request(number, stem + own, params, random.choice([0, 0, number]))
        arrivals.append(Arrival(step, request))
    return tuple(arrivals)
