"""A check of a tiny model passes, and fails as soon as something is wrong."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.backend.operands import Fold
from surefoot.checking.cases import Amount, Scope
from surefoot.checking.engines import LONG_CHOICES, LONG_ENTRIES, Models
from surefoot.checking.prompts import Prompt
from surefoot.checking.report import CaseReport, Report
from surefoot.checking.run import Checker, Watch
from surefoot.config import make_config
from surefoot.engine.models import load
from surefoot.errors import PromptError, SettingError
from surefoot.model.model import Description, DraftHead, Model
from surefoot.state.pool import Pools
from surefoot.step import Batch
from surefoot.testing.faults import padded, planted
from surefoot.testing.tiny_dsa import TinyDsaSizes, write_tiny_dsa
from surefoot.testing.tiny_latents import TinyLatentSizes, write_tiny_latents
from tests.unit.checking.conftest import Check

ALL = Scope(
    ["none", "ngram", "draft-model", "replay", "wrong"],
    depths=[[4, None]],
    batches=[3, 1],
    caches=[True, False],
    chunks=[64, 5],
)
SMALL = Scope(["none", "replay"], depths=[[4]], batches=[4], caches=[True], chunks=[5])
GREEDY = replace(SMALL, samplings=["greedy"])


class Wobbly:
    """Logits tie often, and which of them is ahead depends on how many rows are computed."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @property
    def description(self) -> Description:
        return self._model.description

    @property
    def draft_head(self) -> DraftHead | None:
        return self._model.draft_head

    def fold(self, folds: Sequence[Fold], pools: Pools) -> None:
        self._model.fold(folds, pools)

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        return self._model.forward(batch, pools)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = (self._model.logits(hidden) * 2).round() / 2
        nudge = torch.arange(logits.shape[1]) * (1e-6 if len(hidden) > 1 else 0.0)
        return logits + nudge


def wobbly(models: Models) -> Models:
    return replace(models, target=replace(models.target, model=Wobbly(models.target.model)))


def test_a_round_of_everything_passes(check: Check, models: Models) -> None:
    report = check(models, ALL)
    assert report.passed, report.verdict()
    assert report.bitwise
    assert {case.case.drafter for case in report.cases} == set(ALL.drafters)
    assert min(report.hard.values()) > 10
    assert report.tokens_compared == sum(case.tokens for case in report.cases) > 300


def test_without_the_bitwise_mode_it_passes_too(check: Check, loose_models: Models) -> None:
    report = check(loose_models, SMALL)
    assert report.passed, report.verdict()
    assert not report.bitwise


def test_the_wanted_tokens_are_compared_and_no_more_cases_run(check: Check, models: Models) -> None:
    report = check(models, GREEDY, tokens=400)
    assert report.tokens_compared >= 400
    assert report.tokens_compared - report.cases[-1].tokens < 400
    assert report.cases[-1].case.round >= 1


def test_long_answers_are_compared_among_others(check: Check, models: Models) -> None:
    report = check(models, GREEDY, tokens=600, long_tokens=90)
    assert report.passed, report.verdict()
    assert report.longest == 90
    assert 0 < sum(case.longest == 90 for case in report.cases) < len(report.cases) / 2
    short = check(models, GREEDY, tokens=600)
    assert short.longest == 8


def test_answers_are_long_where_the_model_joins_tokens(tmp_path: Path) -> None:
    folder = write_tiny_latents(tmp_path, TinyLatentSizes(heavy_ratio=16))
    target = load(str(folder), make_config())
    prompts = [Prompt("one", [1, 2, 3]), Prompt("two", [4])]
    checker = Checker(Models(target), make_config(), prompts, Amount(new_tokens=4))
    report = checker.run(replace(GREEDY, batches=[1]))
    assert report.passed, report.verdict()
    assert report.longest == LONG_ENTRIES * 16


def test_answers_are_long_where_the_model_looks_at_some_positions(tmp_path: Path) -> None:
    folder = write_tiny_dsa(tmp_path, TinyDsaSizes(layers=1, index_chosen=6))
    prompts = [Prompt("one", [1, 2, 3]), Prompt("two", [4])]
    checker = Checker(Models(load(str(folder), make_config())), make_config(), prompts, Amount(4))
    report = checker.run(replace(GREEDY, batches=[1]))
    assert report.passed, report.verdict()
    assert report.longest == LONG_CHOICES * 6


def test_the_seed_decides_the_cases(check: Check, models: Models) -> None:
    first, again, other = (check(models, SMALL, tokens=100, seed=seed) for seed in (1, 1, 2))
    names = [[case.case.name for case in report.cases] for report in (first, again, other)]
    assert names[0] == names[1] != names[2]
    assert first.hard == again.hard


def test_forced_preemption_and_scarce_pages_both_preempt(check: Check, models: Models) -> None:
    for pressure in ("forced", "scarce"):
        report = check(models, replace(GREEDY, pressures=[pressure]))
        assert report.passed, report.verdict()
        assert report.hard["preemptions"] > 0, pressure
    assert check(models, replace(GREEDY, pressures=["calm"])).hard["preemptions"] == 0


def test_long_answers_do_not_spare_short_ones_pre_emption(check: Check, models: Models) -> None:
    report = check(models, replace(GREEDY, pressures=["scarce"]), tokens=600, long_tokens=90)
    assert report.passed, report.verdict()
    assert any(case.longest == 90 for case in report.cases)
    # The first case is one without a long answer, of one batch and more.
    assert all(case.preemptions for case in report.cases if case.longest == 8)


def test_without_prefix_cache_nothing_is_hit(check: Check, models: Models) -> None:
    assert check(models, GREEDY).hard["cache_hits"] > 0
    assert check(models, replace(GREEDY, caches=[False])).hard["cache_hits"] == 0


@pytest.mark.parametrize(
    ("fault", "sampling", "pressure"),
    [
        ("wrong draft kept", "greedy", "calm"),
        ("commit off by one", "greedy", "calm"),
        ("page published past the cursor", "greedy", "forced"),
        ("noise keyed by step", "sampled", "calm"),
        ("penalty counted once per step", "penalties", "calm"),
        ("history one short", "penalties", "calm"),
    ],
)
def test_a_planted_fault_makes_it_fail(
    check: Check,
    models: Models,
    fault: str,
    sampling: str,
    pressure: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("CRITICAL", logger="surefoot")
    scope = replace(SMALL, samplings=[sampling], pressures=[pressure])
    assert check(models, scope, tokens=400).passed
    with planted(fault):
        report = check(models, scope, tokens=400)
    assert not report.passed
    assert report.differences > 0
    assert report.verdict().startswith("FAIL: ")
    assert any(case.first_difference is not None for case in report.cases)


def test_padding_on_a_live_page_makes_it_fail(check: Check, models: Models) -> None:
    with padded():
        assert check(models, GREEDY).passed
    with planted("padding on a live page"):
        assert not check(models, GREEDY).passed


def test_a_kept_wrong_draft_is_no_near_tie(check: Check, loose_models: Models) -> None:
    with planted("wrong draft kept"):
        report = check(loose_models, GREEDY)
    assert report.differences > 10 * report.near_ties
    assert not report.passed


def test_near_ties_are_counted_without_the_bitwise_mode(check: Check, loose_models: Models) -> None:
    report = check(wobbly(loose_models), GREEDY)
    assert report.near_ties > 0
    assert report.differences == 0
    assert report.objections() == ["more than 1 near tie in 1,000 tokens"]


def test_near_ties_are_differences_in_the_bitwise_mode(check: Check, models: Models) -> None:
    report = check(wobbly(models), GREEDY)
    assert report.near_ties == 0
    assert report.differences > 0
    difference = next(c.first_difference for c in report.cases if c.differences)
    assert difference is not None
    assert difference.expected != difference.got


def test_what_follows_a_difference_is_not_compared(check: Check, models: Models) -> None:
    report = check(wobbly(models), GREEDY)
    full = check(models, GREEDY)
    assert report.tokens_compared < full.tokens_compared


def test_a_model_whose_logits_are_no_numbers_is_no_pass(check: Check, models: Models) -> None:
    class Broken(Wobbly):
        def logits(self, hidden: Tensor) -> Tensor:
            return torch.full_like(super().logits(hidden), torch.nan)

    broken = replace(models.target, model=Broken(models.target.model))
    report = check(replace(models, target=broken), GREEDY)
    assert not report.passed
    difference = report.cases[0].first_difference
    assert difference is not None
    assert "the plain run failed" in str(difference.error)


def test_whoever_watches_is_told(models: Models, prompts: list[Prompt]) -> None:
    class Told(Watch):
        def __init__(self) -> None:
            self.begun: list[str] = []
            self.expected = self.advanced = 0
            self.ended: list[CaseReport] = []

        def begins(self, what: str) -> None:
            self.begun.append(what)

        def expects(self, tokens: int) -> None:
            self.expected = tokens

        def advances(self, tokens: int) -> None:
            self.advanced += tokens

        def ends(self, report: CaseReport) -> None:
            self.ended.append(report)

    told = Told()
    amount = Amount(new_tokens=6)
    report: Report = Checker(models, make_config(), prompts, amount, told).run(GREEDY)
    assert told.ended == list(report.cases)
    assert told.expected == told.advanced == report.tokens_compared
    begun = dict.fromkeys(name for name in told.begun if not name.startswith("plain run"))
    assert list(begun) == [case.case.name for case in report.cases]


def test_plain_runs_are_made_once(models: Models, prompts: list[Prompt]) -> None:
    begun: list[str] = []

    class Told(Watch):
        def begins(self, what: str) -> None:
            begun.append(what)

    Checker(models, make_config(), prompts, Amount(new_tokens=3), Told()).run(GREEDY)
    told = [what.removeprefix("plain run of ") for what in begun if what.startswith("plain run")]
    plain = [label for labels in told for label in labels.split(", ")]
    turns = [label for label in plain if label.endswith("(next turn)")]
    assert len(plain) == len(set(plain)) == len(prompts) + len(turns)
    assert len(turns) >= 3
    # Some are made alone, the others together.
    assert 1 < len(told) < len(plain)


def test_prompts_are_needed(models: Models) -> None:
    with pytest.raises(PromptError, match="at least one"):
        Checker(models, make_config(), [], Amount())


def test_a_prompt_without_room_is_refused(models: Models, prompts: list[Prompt]) -> None:
    checker = Checker(models, make_config(max_model_len=20), prompts, Amount(new_tokens=3))
    with pytest.raises(PromptError, match="tokens, and the context holds 20"):
        checker.run(GREEDY)


def test_a_short_context_cuts_every_run_alike(models: Models, prompts: list[Prompt]) -> None:
    config = make_config(max_model_len=27, page_tokens=4)
    report = Checker(models, config, prompts, Amount(new_tokens=12)).run(GREEDY)
    assert report.passed, report.verdict()
    asked = sum(len(case.case.asks(len(prompts))) for case in report.cases)
    assert report.tokens_compared < 12 * asked


def test_a_depth_beyond_the_backend_is_refused(check: Check, models: Models) -> None:
    with pytest.raises(SettingError, match="draft_tokens"):
        check(models, replace(GREEDY, depths=[[99]]))
