"""`surefoot check`: does speculation change nothing but speed, on these weights, here?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

from cyclopts import Group, Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from surefoot.checking.cases import Scope
from surefoot.checking.drafters import TEST_DRAFTERS
from surefoot.checking.engines import Models
from surefoot.checking.prompts import Prompt, fit, random_prompts, text_prompts
from surefoot.checking.report import CaseReport, Report
from surefoot.checking.run import Amount, Checker, Watch
from surefoot.cli.asks import read_asks
from surefoot.cli.flags import flag, whole
from surefoot.cli.options import (
    AUTO,
    DEFAULT_MODEL,
    EngineOptions,
    JsonOutput,
    ModelName,
    comma_list,
    read_depth,
    whole_list,
)
from surefoot.cli.show import Screen
from surefoot.config import EngineConfig, make_config
from surefoot.engine.assemble import resolve_drafter
from surefoot.engine.models import LoadedModel, load, load_draft
from surefoot.errors import PromptError, SettingError
from surefoot.params import MAX_SEED

_DRAFT_MODEL = "draft-model"
_PLAIN = "none"
_SET_BY_CASES = {"max_rows": "use batch", "max_step_tokens": "the cases set it themselves"}
_AMOUNT = Amount()


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
        flag("Most new tokens of each request.", _AMOUNT.new_tokens, convert=whole),
    ] = None
    tokens: Annotated[
        int | None,
        flag("Compare at least this many tokens, not just one round of cases.", convert=whole),
    ] = None
    seed: Annotated[
        int | None,
        flag("Decides cases, noise and moments of pre-emption.", _AMOUNT.seed, convert=whole),
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
        seed = _AMOUNT.seed if self.seed is None else self.seed
        if not 0 <= seed <= MAX_SEED:
            raise SettingError("seed", f"must be from 0 to {MAX_SEED}, not {seed}")
        return Amount(self.new_tokens or _AMOUNT.new_tokens, self.tokens, seed)


_ENGINE, _OPTIONS = EngineOptions(), CheckOptions()


def check(
    model: ModelName = DEFAULT_MODEL,
    *,
    options: CheckOptions = _OPTIONS,
    engine: EngineOptions = _ENGINE,
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
    config, wanted = _configured(engine, options)
    with screen.loading(f"loading {model}") as progress:
        target = load(model, config, progress)
        draft = load_draft(target, config, progress) if config.draft_model is not None else None
    scope = _scope(wanted, target, draft is not None)
    prompts = _prompts(options, amount, config, target)
    with _Bar() as bar:
        report = Checker(Models(target, draft), config, prompts, amount, bar).run(scope)
    if json:
        screen.json(report.as_json())
    else:
        _show(screen, report)
    return 0 if report.passed else 1


@dataclass(frozen=True)
class _Wanted:
    """What the cases shall range over; None where nothing was said."""

    drafters: Sequence[str] | None
    depths: Sequence[int | None] | None
    batches: Sequence[int] | None
    prefix_cache: bool | None
    chunk: int | None


def _configured(engine: EngineOptions, options: CheckOptions) -> tuple[EngineConfig, _Wanted]:
    """The settings that all cases share, and what the cases range over."""
    settings = engine.settings()
    for name, reason in _SET_BY_CASES.items():
        if name in settings:
            raise SettingError(name, f"has no use in a check: {reason}")
    drafters = comma_list("drafter", str(settings.pop("drafter", AUTO)))
    depths = comma_list("draft_tokens", str(settings.pop("draft_tokens", AUTO)))
    given = engine.settings()
    cache, chunk = settings.pop("prefix_cache", None), settings.pop("prefill_chunk", None)
    wanted = _Wanted(
        drafters=None if drafters == [AUTO] else drafters,
        depths=[read_depth(depth) for depth in depths] if "draft_tokens" in given else None,
        batches=None if options.batch is None else whole_list("batch", options.batch),
        prefix_cache=cache if isinstance(cache, bool) else None,
        chunk=chunk if isinstance(chunk, int) else None,
    )
    config = make_config(**settings)
    _check_drafting(wanted, settings)
    return config, wanted


def _check_drafting(wanted: _Wanted, settings: Mapping[str, object]) -> None:
    """Refuse drafters and depths that no config could have, before anything is loaded."""
    rest = {name: value for name, value in settings.items() if name != "draft_model"}
    names = wanted.drafters or ()
    for name in names:
        if name not in TEST_DRAFTERS:
            make_config(**(settings if name == _DRAFT_MODEL else rest), drafter=name)
    for depth in wanted.depths or ():
        make_config(**rest, draft_tokens=depth)
    for batch in wanted.batches or ():
        make_config(**rest, max_rows=batch, max_step_tokens=4 * batch)
    if names and "draft_model" in settings and _DRAFT_MODEL not in names:
        raise SettingError("draft_model", f"has no use without the drafter {_DRAFT_MODEL}")


def _scope(wanted: _Wanted, target: LoadedModel, has_draft: bool) -> Scope:
    """What the cases range over; by default every drafter that the model has, and the tests'."""
    usual = Scope(_usual_drafters(target, has_draft))
    for name in wanted.drafters or ():
        if name not in (*TEST_DRAFTERS, _DRAFT_MODEL):
            resolve_drafter(target, make_config(drafter=name))
    return Scope(
        drafters=wanted.drafters or usual.drafters,
        depths=wanted.depths or usual.depths,
        batches=wanted.batches or usual.batches,
        caches=usual.caches if wanted.prefix_cache is None else [wanted.prefix_cache],
        chunks=usual.chunks if wanted.chunk is None else [wanted.chunk],
    )


def _usual_drafters(target: LoadedModel, has_draft: bool) -> list[str]:
    head = target.model.description.draft_head is not None
    own = [*["mtp"][:head], *[_DRAFT_MODEL][:has_draft]]
    return [_PLAIN, "ngram", *own, *TEST_DRAFTERS]


def _prompts(
    options: CheckOptions, amount: Amount, config: EngineConfig, target: LoadedModel
) -> list[Prompt]:
    description = target.model.description
    room = (config.max_model_len or description.max_positions) - amount.new_tokens
    if room < 1:
        raise SettingError("new_tokens", f"{amount.new_tokens} leave no room for a prompt")
    if options.prompts is not None:
        given = _read_prompts(options.prompts, target)
        return given if options.prompt_tokens is None else fit(given, room, options.prompt_tokens)
    if target.tokenizer is not None:
        return fit(text_prompts(target.tokenizer), room, options.prompt_tokens)
    return fit(random_prompts(description.vocab_size, amount.seed), room, options.prompt_tokens)


def _read_prompts(path: Path, target: LoadedModel) -> list[Prompt]:
    prompts = []
    try:
        asks = read_asks(path)
    except SettingError as error:
        reason = str(error).removeprefix(f"{error.parameter}: ")
        raise SettingError("prompts", reason) from None
    for number, ask in enumerate(asks, start=1):
        label = f"prompt {number}"
        if ask.messages or ask.sampling:
            raise SettingError("prompts", f"{ask.place}: a check takes text or token ids only")
        prompts.append(Prompt(label, _tokens(ask.prompt, ask.place, target)))
    return prompts


def _tokens(prompt: str | Sequence[int], place: str, target: LoadedModel) -> Sequence[int]:
    if not isinstance(prompt, str):
        tokens = prompt
    elif target.tokenizer is None:
        raise PromptError(f"is text, but the checkpoint has no tokenizer; give token ids ({place})")
    else:
        tokens = target.tokenizer.encode(prompt)
    if not tokens:
        raise PromptError(f"is empty; give at least one token ({place})")
    return tokens


class _Bar(Watch):
    """Shows on stderr how far a check is: a bar on a terminal, else a line for each case."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        columns = (
            BarColumn(30),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._lines = not console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=self._lines)
        self._task = self._bar.add_task("checking", total=None)
        self._console = console

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begins(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def expects(self, tokens: int) -> None:
        self._bar.update(self._task, total=tokens)

    def advances(self, tokens: int) -> None:
        self._bar.advance(self._task, tokens)

    def ends(self, report: CaseReport) -> None:
        if self._lines or report.differences:
            found = f"{report.tokens} tokens, {report.differences} differences"
            self._console.print(f"{report.case.name}: {found}")


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
