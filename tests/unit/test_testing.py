"""The tools of the tests are themselves right."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from surefoot.backend.protocol import UNCHOSEN
from surefoot.config import make_config
from surefoot.engine.models import load
from surefoot.engine.rows import PlannedRow
from surefoot.params import SamplingParams
from surefoot.request import FinishReason, Request
from surefoot.state.ledger import Ledger, LedgerLimits
from surefoot.testing.fakes import Failures, FakeClock, HashModel, HashRunner, InjectedFailure
from surefoot.testing.scenarios import make_request, make_scenario
from surefoot.testing.strategies import missing_pairs, pairwise
from surefoot.testing.tiny_models import ARCHITECTURES, END, LEAST_TEXT_VOCAB, write_tiny
from surefoot.weights.load import open_checkpoint

LIMITS = LedgerLimits(pages=8, slots=2, points=2, page_tokens=4, bounded=True)
MODEL = HashModel(vocab=1000, window=3)


def test_pairwise_holds_every_pair_in_few_choices() -> None:
    factors: dict[str, Sequence[object]] = {
        "a": range(6),
        "b": "xyz",
        "c": (True, False),
        "d": range(4),
    }
    chosen = pairwise(factors, seed=1)
    assert missing_pairs(factors, chosen) == []
    # 24 pairs of a and d need 24 choices; all combinations would be 144.
    assert 24 <= len(chosen) <= 34
    assert pairwise(factors, seed=1) == chosen
    assert len(pairwise(factors, seed=1, at_least=50)) == 50


def test_pairwise_leaves_out_what_is_not_allowed() -> None:
    factors: dict[str, Sequence[object]] = {"a": range(3), "b": range(3), "c": range(3)}
    chosen = pairwise(factors, allowed=lambda choice: choice["a"] != choice["b"], at_least=20)
    assert all(choice["a"] != choice["b"] for choice in chosen)
    assert missing_pairs(factors, chosen) == [(("a", i), ("b", i)) for i in range(3)]


def test_a_clock_stands_still_or_ticks() -> None:
    clock = FakeClock()
    clock.advance(2.5)
    assert (clock(), clock()) == (2.5, 2.5)
    ticking = FakeClock(tick=1.0)
    assert (ticking(), ticking()) == (1.0, 2.0)


def test_failures_come_at_the_calls_named() -> None:
    failures = Failures(at={1})
    failures.strike("first")
    with pytest.raises(InjectedFailure, match="second, call 1"):
        failures.strike("second")
    failures.strike("third")
    assert (failures.calls, failures.raised) == (3, 1)


def planned(runner: HashRunner) -> tuple[Request, PlannedRow]:
    """A request of ten tokens, eight of them computed, and the row of the other two."""
    ledger = Ledger(LIMITS)
    request = make_request(1, list(range(10)), SamplingParams(max_tokens=5))
    lease = ledger.admit(request.tokens, 10)
    assert lease is not None
    runner.prepare(ledger.take_work())
    runner.run([PlannedRow(request, lease, 0, 8, final=False)])
    ledger.commit(lease, 8)
    return request, PlannedRow(request, lease, 8, 2, final=True, drafts=[5, 6])


def test_the_hash_runner_says_what_the_model_says() -> None:
    runner = HashRunner(MODEL, LIMITS, draft_tokens=4)
    request, row = planned(runner)
    [result] = runner.run([row]).rows
    texts = [request.tokens, [*request.tokens, 5], [*request.tokens, 5, 6]]
    assert result.chosen == [MODEL.follow(request, text) for text in texts]
    assert runner.complaints == []


@pytest.mark.parametrize("mistake", ["page", "order", "slot", "cleared"])
def test_any_mix_up_changes_what_the_hash_runner_says(mistake: str) -> None:
    runner = HashRunner(MODEL, LIMITS, draft_tokens=4)
    _, row = planned(runner)
    [right] = runner.run([row]).rows
    if mistake == "page":
        row.lease.pages[0] = row.lease.pages[1]
    elif mistake == "order":
        row.lease.pages[:2] = reversed(row.lease.pages[:2])
    elif mistake == "slot":
        row.lease.slot = row.lease.slot.__class__(2)
    else:
        runner._pages[row.lease.pages[0]] = [0] * 4
    [wrong] = runner.run([row]).rows
    assert wrong.chosen[0] != right.chosen[0]


def test_the_hash_runner_complains_of_two_writers() -> None:
    runner = HashRunner(MODEL, LIMITS, draft_tokens=4)
    request, row = planned(runner)
    other = make_request(2, request.tokens, request.params)
    runner.run([row, PlannedRow(other, row.lease, 8, 2, final=True)])
    assert "may not write page" in runner.complaints[0]


def test_a_hash_models_answer_ends_as_a_request_does() -> None:
    reasons = set()
    model = HashModel(vocab=8, broken_one_in=60)
    for seed in range(60):
        request = make_request(1, [1, 2], SamplingParams(max_tokens=20, min_tokens=4), seed)
        tokens, reason = model.answer(request)
        reasons.add(reason)
        assert 0 not in tokens[:-1]
        assert UNCHOSEN not in tokens
        assert (reason is FinishReason.STOP) == (tokens[-1:] == [0] and len(tokens) > 4)
        assert (reason is FinishReason.LENGTH) == (len(tokens) == 20 and tokens[-1] != 0)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR}


def test_scenarios_are_functions_of_their_seeds() -> None:
    assert repr(make_scenario(5)) == repr(make_scenario(5)) != repr(make_scenario(6))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_models_load_and_repeat(architecture: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "same", "drifted")]
    for folder, drift in zip(folders, (0.0, 0.0, 0.1), strict=True):
        write_tiny(folder, architecture, drift=drift)
        assert load(str(folder), make_config(device="cpu")).tokenizer is None
    one, same, drifted = (open_checkpoint(folder) for folder in folders)
    assert set(one.names()) == set(drifted.names())
    for name in one.names():
        assert torch.equal(one.read(name), same.read(name))
    name = "model.layers.1.mlp.down_proj.weight"
    distance = (one.read(name) - drifted.read(name)).norm() / one.read(name).norm()
    assert 0.08 < float(distance) < 0.12


def test_a_tiny_tokenizer_spells_bytes(tmp_path: Path) -> None:
    write_tiny(tmp_path, "LlamaForCausalLM", tokenizer=True, vocab=300)
    model = load(str(tmp_path), make_config(device="cpu"))
    tokenizer = model.tokenizer
    assert tokenizer is not None
    text = "h\u00e9llo \u65e5\u672c\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode(END) == [256]
    assert tokenizer.end_ids == {256}
    assert (tokenizer.vocab_size, model.model.description.vocab_size) == (300, 300)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 300
    write_tiny(tmp_path / "least", "LlamaForCausalLM", tokenizer=True)
    least = json.loads((tmp_path / "least" / "config.json").read_text())
    assert least["vocab_size"] == LEAST_TEXT_VOCAB
