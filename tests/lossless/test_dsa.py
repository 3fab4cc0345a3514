"""Positions chosen by every layer or by some: the tokens are those of a plain run.

And drafts are the row's own: they depend on no other row and on no padding.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from surefoot import LLM, SamplingParams
from surefoot.draft.drafter import DraftRow
from surefoot.draft.guesses import Guessed
from surefoot.draft.mtp import MtpDrafter
from surefoot.testing.tiny_dsa import DEEPSEEK, GLM, TinyDsaSizes, write_tiny_dsa
from tests.lossless.chosen import CHOSEN
from tests.lossless.harness import SAMPLING, VOCAB, Bench, Case, Run, next_turns
from tests.lossless.test_capture import RecordedBench
from tests.lossless.test_hybrids import ALL_FACTORS, FACTORS, make_cases, run_all
from tests.unit.backend.cuts import (
    PADS,
    Pad,
    Script,
    Setting,
    one_by_one,
    rejecting,
    sequences_of,
    shuffled,
)
from tests.unit.model.settling import differing as settled_differently

OWN = {
    **FACTORS,
    "model": tuple(CHOSEN),
    "depth": (1, 4),
    "sampling": ("greedy", "penalties", "logprobs"),
    "page": (16,),
}
CASES = make_cases(OWN, seed=5, at_least=0)


def test_tokens_and_logprobs_equal_the_plain_run(bench: Bench) -> None:
    counts = run_all(bench, CASES)
    # What is not exercised is not tested.
    assert counts.accepted > 100
    assert counts.partial > 5
    assert counts.cached > 1
    assert counts.preemptions > 5


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4))
def test_every_depth_meets_every_other_choice(seed: int, bench: Bench) -> None:
    factors = {**ALL_FACTORS, "model": tuple(CHOSEN), "sampling": tuple(SAMPLING)}
    run_all(bench, make_cases(factors, seed=seed, at_least=0))


TWO = Setting(sequences_of(2, VOCAB, (44, 39)), page_tokens=16, depth=4)
SCRIPTS: Mapping[str, Script] = {
    "one by one": one_by_one(TWO.lengths),
    "rejecting": rejecting(TWO.lengths, TWO.depth),
    **{f"mix {n}": shuffled(TWO.lengths, TWO.depth, random.Random(n)) for n in range(3)},
}


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("pad", PADS)
def test_logits_and_caches_are_those_of_an_uncut_run(name: str, pad: Pad, bench: Bench) -> None:
    target = bench.target(name)
    assert settled_differently(target.model, target.backend, TWO, SCRIPTS, pad) == []


def test_the_next_turn_is_answered_as_without_a_cache(bench: Bench) -> None:
    assert next_turns(bench, Case("chosen once", "mtp", 5, page=4)) == []


LONG: Mapping[str, TinyDsaSizes] = {
    "deepseek": TinyDsaSizes(architecture=DEEPSEEK, yarn=True, positions=4096),
    "glm": TinyDsaSizes(architecture=GLM, every=2, one_choice=True, positions=4096),
}


@pytest.mark.parametrize("size", LONG.values(), ids=LONG)
@pytest.mark.parametrize("count", [150, pytest.param(1600, marks=pytest.mark.deep)])
def test_long_answers_of_which_few_positions_are_chosen_equal_the_plain_one(
    size: TinyDsaSizes, count: int, tmp_path: Path
) -> None:
    folder = write_tiny_dsa(tmp_path, size, dial=0.5)
    prompt = list(range(1, 60)) * 3
    assert len(prompt) > 8 * size.index_chosen
    params = SamplingParams(max_tokens=count, temperature=0.8, seed=3, ignore_eos=True)
    answers = {}
    for drafter, depth in (("none", 1), ("mtp", 3), ("ngram", 4)):
        with LLM(
            str(folder), drafter=drafter, draft_tokens=depth, max_rows=2, memory=1 << 23
        ) as llm:
            result = llm.generate([prompt], params)[0]
        answers[drafter, depth] = result.outputs[0].token_ids
        if drafter == "mtp":
            assert 1.2 < result.speculation.accept_length < depth
    plain = answers.pop(("none", 1))
    assert len(plain) == count
    assert len(set(plain)) > 30
    assert all(answer == plain for answer in answers.values())


Key = tuple[int, int, int]
DRAFTED = Case(model="chosen once", drafter="mtp", depth=4, batch=1, cache=False)


def logits_of_drafts(bench: Bench, case: Case) -> dict[Key, Tensor]:
    """Of every drafted token, by prompt, positions computed before, and place in the draft."""
    seen: dict[Key, Tensor] = {}
    choose = MtpDrafter._choose
    run = Run(bench, case)

    def noted(
        self: MtpDrafter, rows: Sequence[DraftRow], drafts: Sequence[Guessed], logits: Tensor
    ) -> None:
        order = {request.id: prompt for prompt, request in enumerate(run.requests)}
        for row, draft, own in zip(rows, drafts, logits, strict=True):
            seen[order[row.request.id], row.lease.computed, len(draft)] = own.clone()
        choose(self, rows, drafts, logits)

    with patch.object(MtpDrafter, "_choose", noted):
        assert run.finish() == []
    return seen


def differing(got: Mapping[Key, Tensor], want: Mapping[Key, Tensor]) -> list[Key]:
    """What both have and is not the same to the last bit."""
    both = got.keys() & want.keys()
    assert len(both) > 40
    assert {depth for _, _, depth in both} == set(range(4))
    return sorted(key for key in both if not torch.equal(got[key], want[key]))


@pytest.fixture(scope="module")
def alone(bench: Bench) -> dict[Key, Tensor]:
    return logits_of_drafts(bench, DRAFTED)


@pytest.fixture(scope="module")
def recorded(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> RecordedBench:
    return RecordedBench(tmp_path_factory.mktemp("recorded"), eager=bench)


OTHERS = {
    "with other rows": replace(DRAFTED, batch=3),
    "in chunks": replace(DRAFTED, chunk=3),
    "both": replace(DRAFTED, batch=3, chunk=16),
}


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_a_draft_is_the_rows_own(case: Case, bench: Bench, alone: dict[Key, Tensor]) -> None:
    assert differing(logits_of_drafts(bench, case), alone) == []


@pytest.mark.parametrize("batch", [1, 3])
def test_a_draft_of_padded_steps_is_the_same(
    batch: int, recorded: RecordedBench, alone: dict[Key, Tensor]
) -> None:
    """Recorded for one row, two and three, so that padding comes and goes as rows do."""
    assert differing(logits_of_drafts(recorded, replace(DRAFTED, batch=batch)), alone) == []
    replays = [r.replays for backend in recorded.backends for r in backend.recordings]
    assert sum(replays) > 50
