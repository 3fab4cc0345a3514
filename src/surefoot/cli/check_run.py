"""The model's side of `surefoot check`. Loads torch, so the command imports it when it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from surefoot.checking.cases import DRAFT_MODEL, PLAIN, TEST_DRAFTERS, Amount, Wanted
from surefoot.checking.engines import Models
from surefoot.checking.prompts import Prompt, fit, random_prompts, text_prompts
from surefoot.checking.report import CaseReport, Report
from surefoot.checking.run import Checker, Watch
from surefoot.cli.asks import read_asks
from surefoot.cli.show import Screen, amount
from surefoot.config import EngineConfig, make_config
from surefoot.engine.assemble import resolve_drafter
from surefoot.engine.models import LoadedModel, load, load_draft
from surefoot.errors import PromptError, SettingError


@dataclass(frozen=True)
class Ordered:
    """A check as the command line orders it.

    Attributes:
        model: what to load.
        config: settings that all cases share.
        wanted: what the cases shall range over.
        amount: how much is checked.
        prompts: JSONL file; None takes the built-in prompts.
        prompt_tokens: length of every prompt; None leaves them as they are.
    """

    model: str
    config: EngineConfig
    wanted: Wanted
    amount: Amount
    prompts: Path | None
    prompt_tokens: int | None


def run_check(ordered: Ordered, screen: Screen) -> Report:
    """Load the model and run all cases; progress goes to stderr.

    Raises:
        ModelError: the model cannot be loaded.
        SettingError: what was ordered does not suit it.
        PromptError: a prompt that cannot be served.
    """
    config = ordered.config
    with screen.loading(f"loading {ordered.model}") as progress:
        target = load(ordered.model, config, progress)
        draft = load_draft(target, config, progress) if config.draft_model is not None else None
    _refuse_absent(ordered.wanted.drafters, target)
    scope = ordered.wanted.over(_drafters(target, draft))
    prompts = _prompts(ordered, target)
    with _progress() as watch:
        checker = Checker(Models(target, draft), config, prompts, ordered.amount, watch)
        return checker.run(scope)


def _refuse_absent(drafters: Sequence[str], target: LoadedModel) -> None:
    for name in drafters:
        if name not in TEST_DRAFTERS and name != DRAFT_MODEL:
            resolve_drafter(target, make_config(drafter=name))


def _drafters(target: LoadedModel, draft: LoadedModel | None) -> list[str]:
    """Every drafter that the model can have, and those for tests."""
    own = [PLAIN, "ngram"]
    if draft is not None:
        own.append(DRAFT_MODEL)
    if target.model.description.draft_head is not None:
        own.append("mtp")
    return [*own, *TEST_DRAFTERS]


def _prompts(ordered: Ordered, target: LoadedModel) -> list[Prompt]:
    description, new_tokens = target.model.description, ordered.amount.new_tokens
    room = (ordered.config.max_model_len or description.max_positions) - new_tokens
    if room < 1:
        raise SettingError("new_tokens", f"{new_tokens} of them leave no room for a prompt")
    if ordered.prompts is not None:
        given = _read_prompts(ordered.prompts, target)
        # What the user brings is never cut in silence.
        return given if ordered.prompt_tokens is None else fit(given, room, ordered.prompt_tokens)
    if target.tokenizer is not None:
        built_in = text_prompts(target.tokenizer)
    else:
        built_in = random_prompts(description.vocab_size, ordered.amount.seed)
    return fit(built_in, room, ordered.prompt_tokens)


def _read_prompts(path: Path, target: LoadedModel) -> list[Prompt]:
    try:
        asks = read_asks(path)
    except SettingError as error:
        reason = str(error).removeprefix(f"{error.parameter}: ")
        raise SettingError("prompts", reason) from None
    prompts = []
    for number, ask in enumerate(asks, start=1):
        if ask.messages or ask.sampling:
            raise SettingError("prompts", f"{ask.place}: a check takes text or token ids only")
        prompts.append(Prompt(f"prompt {number}", _tokens(ask.prompt, ask.place, target)))
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


class _Shown(Watch):
    """Shows on stderr how far a check is: a bar on a terminal, else a line for each case."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("checking", total=None)

    def begins(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def expects(self, tokens: int) -> None:
        self._bar.update(self._task, total=tokens)

    def advances(self, tokens: int) -> None:
        self._bar.advance(self._task, tokens)

    def ends(self, report: CaseReport) -> None:
        if report.differences or self._bar.disable:
            found = f"{amount(report.tokens, 'token')}, {amount(report.differences, 'difference')}"
            self._bar.console.print(f"{report.case.name}: {found}")


@contextmanager
def _progress() -> Iterator[Watch]:
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    text = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(30), TimeElapsedColumn(), TimeRemainingColumn(), text)
    plain = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=plain) as bar:
        yield _Shown(bar)
