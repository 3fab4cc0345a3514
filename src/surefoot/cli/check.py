"""`surefoot check`: does speculation change nothing but speed, on these weights, here?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from surefoot.checking.cases import DRAFT_MODEL, TEST_DRAFTERS, Amount, Wanted
from surefoot.checking.report import Report
from surefoot.cli.flags import flag, whole
from surefoot.cli.options import (
    AUTO,
    DEFAULT_MODEL,
    ENGINE_DEFAULTS,
    EngineOptions,
    JsonOutput,
    ModelName,
    comma_list,
    read_depth,
    whole_list,
)
from surefoot.cli.show import Screen
from surefoot.config import EngineConfig, make_config
from surefoot.errors import SettingError
from surefoot.params import MAX_SEED

_SET_BY_CASES = {"max_rows": "use batch", "max_step_tokens": "the cases set it themselves"}
_USUAL = Amount()


@Parameter(name="*", group=Group("Cases", sort_key=5))
@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What is compared and how much of it. `drafter` and `draft_tokens` take comma lists too."""

    batch: Annotated[
        str | None, flag("Comma list: most requests computed at once.", "1,4,8", metavar="N,N")
    ] = None
    prompts: Annotated[
        Path | None,
        flag("JSONL: on each line a text, a list of token ids, or an object with prompt."),
    ] = None
    prompt_tokens: Annotated[
        int | None, flag("Repeat and cut each prompt to this many tokens.", convert=whole)
    ] = None
    new_tokens: Annotated[
        int | None,
        flag(
            "Most new tokens of each request but the long ones.", _USUAL.new_tokens, convert=whole
        ),
    ] = None
    long_tokens: Annotated[
        int | None,
        flag(
            "New tokens of the few long answers, 0 for none. By default a model that joins tokens "
            "to entries makes 12 of its largest ones, and others answer nothing at length.",
            convert=whole,
        ),
    ] = None
    tokens: Annotated[
        int | None,
        flag("Compare at least this many tokens, not just one round of cases.", convert=whole),
    ] = None
    seed: Annotated[
        int | None,
        flag("Decides cases, noise and moments of pre-emption.", _USUAL.seed, convert=whole),
    ] = None

    def amount(self) -> Amount:
        """How much is checked.

        Raises:
            SettingError: a number is out of range.
        """
        for name in ("prompt_tokens", "new_tokens", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(name, f"must be at least 1, not {value}")
        seed = _USUAL.seed if self.seed is None else self.seed
        if not 0 <= seed <= MAX_SEED:
            raise SettingError("seed", f"must be from 0 to {MAX_SEED}, not {seed}")
        if self.long_tokens is not None and self.long_tokens < 0:
            raise SettingError("long_tokens", f"must be at least 0, not {self.long_tokens}")
        return Amount(self.new_tokens or _USUAL.new_tokens, self.tokens, seed, self.long_tokens)


_CHECK_DEFAULTS = CheckOptions()


def check(
    model: ModelName = DEFAULT_MODEL,
    *,
    options: CheckOptions = _CHECK_DEFAULTS,
    engine: EngineOptions = ENGINE_DEFAULTS,
    json: JsonOutput = False,
) -> int:
    """Prove on your own weights that speculation changes nothing but speed.

    Runs requests plainly and with drafters, in other batches, chunks and depths, from the prefix
    cache and after pre-emption, and compares the token ids. Besides the model's own drafters two
    test drafters are used: replay, which is right most of the time, and wrong, which never is.

    Returns:
        0 if all tokens are the same, 1 if not.
    """
    screen, amount = Screen(), options.amount()
    wanted, config = read_wanted(options, engine)
    # The model's side loads torch, which --help and a mistyped flag need not wait for.
    from surefoot.cli.check_run import Ordered, run_check

    ordered = Ordered(model, config, wanted, amount, options.prompts, options.prompt_tokens)
    report = run_check(ordered, screen)
    if json:
        screen.json(report.as_json())
    else:
        _show(screen, report)
    return 0 if report.passed else 1


def read_wanted(options: CheckOptions, engine: EngineOptions) -> tuple[Wanted, EngineConfig]:
    """What the cases shall range over, and the settings that all of them share.

    Raises:
        SettingError: a flag has no use in a check, or a value that no case could have.
    """
    settings = engine.settings()
    for name, reason in _SET_BY_CASES.items():
        if name in settings:
            raise SettingError(name, f"has no use in a check: {reason}")
    depths = settings.pop("draft_tokens", None)
    drafters = comma_list("drafter", str(settings.pop("drafter", AUTO)))
    cache, chunk = settings.pop("prefix_cache", None), settings.pop("prefill_chunk", None)
    wanted = Wanted(
        drafters=() if drafters == [AUTO] else drafters,
        depths=() if depths is None else _depths(str(depths)),
        batches=() if options.batch is None else whole_list("batch", options.batch),
        caches=[cache] if isinstance(cache, bool) else (),
        chunks=[chunk] if isinstance(chunk, int) else (),
    )
    _refuse_impossible(wanted, settings)
    return wanted, make_config(**settings)


def _depths(text: str) -> list[int | None]:
    return [read_depth(depth) for depth in comma_list("draft_tokens", text)]


def _refuse_impossible(wanted: Wanted, settings: Mapping[str, object]) -> None:
    """Refuse what no config could have, before anything is loaded."""
    rest = {name: value for name, value in settings.items() if name != "draft_model"}
    for name in wanted.drafters:
        if name not in TEST_DRAFTERS:
            make_config(**(settings if name == DRAFT_MODEL else rest), drafter=name)
    for depth in wanted.depths:
        make_config(**rest, draft_tokens=depth)
    for batch in wanted.batches:
        make_config(**rest, max_rows=batch, max_step_tokens=batch)
    for chunk in wanted.chunks:
        make_config(**rest, prefill_chunk=chunk)
    if wanted.drafters and "draft_model" in settings and DRAFT_MODEL not in wanted.drafters:
        raise SettingError("draft_model", f"has no use without the drafter {DRAFT_MODEL}")


def _show(screen: Screen, report: Report) -> None:
    columns = ("case", "tokens", "partial", "cached", "pre-empted", "near ties", "differences")
    rows = [
        (
            case.case.name,
            case.tokens,
            case.partial_accepts,
            case.cache_hits,
            case.preemptions,
            case.near_ties,
            case.differences,
        )
        for case in report.cases
    ]
    screen.table("", columns, rows)
    for case in report.cases:
        if case.first_difference is not None:
            screen.line(f"{case.case.name}: {case.first_difference.sentence()}")
    screen.line(report.verdict(), style="green" if report.passed else "red")
