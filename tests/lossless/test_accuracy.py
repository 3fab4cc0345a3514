"""Scores against answers known from outside: right, and equal with speculation on and off."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen3_5ForCausalLM

from surefoot.config import make_config
from surefoot.engine.models import LoadedModel, load
from surefoot.testing.accuracy import (
    TURNS,
    Recital,
    Score,
    Setting,
    Turn,
    agree,
    carry_on,
    recite,
    write_on,
)
from surefoot.testing.faults import planted
from surefoot.testing.reciter import write_reciter
from surefoot.weights.locate import locate
from tests.parity.oracle import logits_of

PLAIN = Setting()
# Each drafter and depth, and each way to cut, resume and reuse the work.
SETTINGS = (
    Setting(chunk=16, preempt=7),
    Setting("ngram", 4, cache=False, chunk=16),
    Setting("mtp", 1, preempt=5),
    Setting("mtp", 3, cache=False, batch=1, chunk=16),
    Setting("mtp", 8, preempt=3),
)
SHORT = (Turn(64), Turn(24), Turn(64, change=True), Turn(24))
WARM, CERTAIN = 1.2, 0.6
"""A temperature at which sampled recital errs now and then, and what it scores at least."""
NEAR = 1e-3
"""What float32 summed in another order may make of a log-probability: ten times the tolerance of
tests/parity, as trained logits are larger. Damaged states put it off a hundred times as far."""


@pytest.fixture(scope="module")
def reciter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reciter(tmp_path_factory.mktemp("reciter"))


@pytest.fixture(scope="module")
def reciter(reciter_folder: Path) -> LoadedModel:
    return load(str(reciter_folder), make_config(device="cpu"))


@pytest.fixture(scope="module")
def trained_folder() -> Path:
    return locate("tiny-hybrid", revision=None, progress=lambda line: None)


@pytest.fixture(scope="module")
def trained() -> LoadedModel:
    return load("tiny-hybrid", make_config(device="cpu"))


@pytest.fixture(scope="module")
def peer(trained_folder: Path) -> PreTrainedModel:
    """The same weights in transformers."""
    return transformers_model(trained_folder)


@pytest.fixture(scope="module")
def texts(trained: LoadedModel, trained_folder: Path) -> list[list[int]]:
    """Text that the trained model never saw."""
    tokenizer = trained.tokenizer
    assert tokenizer is not None
    entries = json.loads((trained_folder / "held_out.json").read_text())[:6]
    return [tokenizer.encode(entry["prompt"] + entry["continuation"]) for entry in entries]


def transformers_model(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


def accepted(score: Score) -> tuple[int, int]:
    """Tokens that were drafted, and kept."""
    counts = [request.speculation for request in score.requests]
    return sum(count.drafted for count in counts), sum(count.accepted for count in counts)


def cached(score: Score) -> int:
    return sum(request.cached_tokens for request in score.requests)


def preemptions(score: Score) -> int:
    return sum(request.preemptions for request in score.requests)


def check_exercised(setting: Setting, score: Score) -> None:
    """What is not exercised is not tested."""
    drafted, kept = accepted(score)
    assert (0 < kept < drafted) == (setting.drafter == "mtp") or setting.drafter == "ngram"
    assert (kept > score.asked // 4) == (setting.drafter != "none")
    assert (cached(score) > 0) == setting.cache
    assert (preemptions(score) > 20) == (setting.preempt > 0)


@pytest.mark.parametrize("temperature", [0.0, WARM])
def test_lists_are_recited_as_well_whoever_drafts_and_however_it_runs(
    reciter: LoadedModel, temperature: float
) -> None:
    plain = recite(reciter, replace(PLAIN, temperature=temperature), 3, SHORT)
    # Greedy recital makes no mistake; sampled recital makes a few, always the same.
    assert CERTAIN < plain.share < 1 if temperature else plain.share == 1
    for setting in SETTINGS:
        score = recite(reciter, replace(setting, temperature=temperature), 3, SHORT)
        assert score == plain, setting
        check_exercised(setting, score)


def test_eight_long_recitals_go_as_well_with_the_draft_head(reciter: LoadedModel) -> None:
    once, head = (Turn(512),), Setting("mtp", 3)
    assert recite(reciter, head, 8, once).share == 1
    plain = recite(reciter, Setting(temperature=WARM), 8, once)
    assert recite(reciter, replace(head, temperature=WARM), 8, once) == plain
    assert CERTAIN < plain.share < 1


@pytest.mark.deep
@pytest.mark.parametrize("temperature", [0.0, WARM])
def test_long_recitals_go_as_well_in_every_setting(
    reciter: LoadedModel, temperature: float
) -> None:
    drafters = (("none", 0), ("ngram", 4), ("mtp", 1), ("mtp", 3), ("mtp", 8))
    plain = recite(reciter, Setting(temperature=temperature), 3, TURNS)
    # Small chunks of long prompts, pre-empted again and again, would never come to an end.
    cuts = ((16, 0), (256, 0), (256, 11))
    for (drafter, depth), cache, batch, (chunk, preempt) in product(
        drafters, (True, False), (1, 8), cuts
    ):
        setting = Setting(drafter, depth, cache, batch, chunk, preempt, temperature)
        assert recite(reciter, setting, 3, TURNS) == plain, setting


@pytest.mark.parametrize(
    ("fault", "setting"),
    [
        ("fold forgotten", Setting("mtp", 3)),
        ("fold done twice", Setting("mtp", 3)),
        ("wrong draft kept", Setting("mtp", 3)),
        ("points without checkpoints", PLAIN),
        ("points without rings", replace(PLAIN, preempt=7)),
        ("commit off by one", replace(PLAIN, chunk=16)),
        ("padding on a live page", PLAIN),
    ],
)
def test_a_planted_fault_costs_points(reciter: LoadedModel, fault: str, setting: Setting) -> None:
    with planted(fault):
        assert recite(reciter, setting, 3, SHORT).share < 1


@pytest.mark.parametrize(
    ("fault", "preempt"), [("points without checkpoints", 0), ("points without rings", 7)]
)
def test_a_fault_that_both_sides_have_costs_both_the_same_points(
    reciter: LoadedModel, fault: str, preempt: int
) -> None:
    """No comparison of the two would find it."""
    with planted(fault):
        plain = recite(reciter, replace(PLAIN, preempt=preempt), 3, SHORT)
        drafting = recite(reciter, Setting("mtp", 3, preempt=preempt), 3, SHORT)
    assert plain == drafting
    assert plain.share < 1


def test_transformers_recites_with_the_same_weights(reciter_folder: Path) -> None:
    model = transformers_model(reciter_folder)
    members = Recital([5, 40, 41, 9, 33, 12, 50, 30, 2]).said[:-1]
    best = logits_of(model, members * 4).argmax(1)[len(members) : -1].tolist()
    assert best == (members * 4)[len(members) + 1 :]


@pytest.mark.parametrize(
    "setting",
    [Setting("mtp", 3), Setting("mtp", 8, chunk=16, preempt=3, temperature=0.7)],
    ids=["greedy", "sampled"],
)
def test_held_out_text_is_guessed_as_well_with_the_draft_head(
    setting: Setting, trained: LoadedModel, texts: Sequence[Sequence[int]]
) -> None:
    plain = carry_on(trained, Setting(temperature=setting.temperature), texts, 32)
    score = carry_on(trained, setting, texts, 32)
    assert score == plain
    check_exercised(setting, score)
    # One token in seven or so, where chance would be one in 4096.
    assert 0.08 < plain.share < 0.5


def test_long_text_is_what_transformers_would_write(
    trained: LoadedModel, peer: PreTrainedModel, texts: Sequence[Sequence[int]]
) -> None:
    beginnings = [text[:64] for text in texts[:2]]
    plain = write_on(trained, PLAIN, beginnings, 512)
    drafting = write_on(trained, Setting("mtp", 3, preempt=40), beginnings, 512)
    assert [r.tokens for r in drafting] == [r.tokens for r in plain]
    assert [r.logprobs for r in drafting] == [r.logprobs for r in plain]
    agreement = agree(drafting, lambda tokens: logits_of(peer, tokens))
    assert agreement.score.asked == 1024
    assert agreement.shortfall < NEAR
    assert agreement.distance < NEAR


@pytest.mark.parametrize("fault", ["fold forgotten", "fold done twice"])
def test_transformers_finds_a_planted_fault(
    fault: str, trained: LoadedModel, peer: PreTrainedModel, texts: Sequence[Sequence[int]]
) -> None:
    beginnings = [text[:64] for text in texts[:2]]
    with planted(fault):
        written = write_on(trained, Setting("mtp", 3), beginnings, 96)
    agreement = agree(written, lambda tokens: logits_of(peer, tokens))
    assert agreement.distance > 100 * NEAR
