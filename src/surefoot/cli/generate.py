"""`surefoot generate`: continue prompts and print what comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from surefoot.cli.answers import answer, run_counting, warn_of_failures
from surefoot.cli.asks import ASK_DEFAULTS, Ask, AskOptions
from surefoot.cli.options import (
    DEFAULT_MODEL,
    ENGINE_DEFAULTS,
    SAMPLING_DEFAULTS,
    EngineOptions,
    JsonOutput,
    ModelName,
    SamplingOptions,
)
from surefoot.cli.prompts import CLASS
from surefoot.cli.report import Comparison, result_entries, summary
from surefoot.cli.show import Screen
from surefoot.errors import PromptError, SettingError
from surefoot.params import SamplingParams

if TYPE_CHECKING:
    from surefoot.cli.session import Job, Run, Session

# `--compare` does jobs again up to so many runs, while less than this has been spent.
_RUNS = 9
_REPEATED_S = 4.0


def generate(
    model: ModelName = DEFAULT_MODEL,
    *prompts: Annotated[str, Parameter(help="Texts to continue; else standard input is one.")],
    asking: AskOptions = ASK_DEFAULTS,
    sampling: SamplingOptions = SAMPLING_DEFAULTS,
    engine: EngineOptions = ENGINE_DEFAULTS,
    compare: Annotated[
        bool,
        Parameter(
            help="Do the same without drafter, and show both speeds and whether the tokens are "
            "the same; exit status 1 if not. Has a prompt of its own if none is given.",
            negative=(),
            show_default=False,
        ),
    ] = False,
    json: JsonOutput = False,
) -> int:
    """Continue prompts, or answer them, and print what comes.

    One prompt is shown while it grows; several are shown together in the end.
    """
    screen = Screen()
    asks = asking.gather(prompts)
    if not asks and compare:
        asks = [Ask(prompt=CLASS)]
        screen.note(f"No prompt was given. This one is continued:\n\n{CLASS}\n[continuation]")
    if not asks:
        raise PromptError("none was given; name one behind the model, or use --prompt or --file")
    options, config = asking.template_options(), engine.single()
    for ask in asks:
        # Values out of range shall not wait until the model is loaded.
        ask.params(sampling.over(SamplingParams()))
    # The model's side loads torch, which --help and a mistyped flag need not wait for.
    from surefoot.cli.session import opened

    with opened(model, config, screen) as session:
        defaults = sampling.over(session.llm.default_params())
        jobs = [session.job(ask, defaults, options) for ask in asks]
        return (_compared if compare else _generated)(session, jobs, screen, json)


def _generated(session: Session, jobs: Sequence[Job], screen: Screen, json: bool) -> int:
    run = answer(session, jobs, screen, quiet=json)
    if json:
        screen.json({"results": result_entries(run.results)})
    else:
        screen.note(summary(run.results, run.tokens_per_s))
    return 1 if warn_of_failures(run, screen) else 0


def _compared(session: Session, jobs: Sequence[Job], screen: Screen, json: bool) -> int:
    """Run with the drafter and without, both warm, on the same weights and with the same seeds."""
    from surefoot.cli.session import opened_plain

    if session.drafter == "none":
        raise SettingError("compare", "compares a drafter with none; name another drafter")
    jobs = [_seeded(job) for job in jobs]
    with opened_plain(session) as plain:
        session.warm_up()
        plain.warm_up()
        runs, bases = _in_turn(session, plain, jobs, screen, quiet=json)
    run, base = runs[0], bases[0]
    comparison = Comparison.of(runs, bases)
    if json:
        entries = result_entries(run.results)
        screen.json({"results": entries, "comparison": comparison.entry()})
    else:
        for line in comparison.lines():
            screen.note(line, style=None)
    failed = warn_of_failures(run, screen) + warn_of_failures(base, screen)
    return 0 if comparison.identical and not failed else 1


def _in_turn(
    session: Session, plain: Session, jobs: Sequence[Job], screen: Screen, quiet: bool
) -> tuple[list[Run], list[Run]]:
    """Runs of both in turn. Short ones are repeated: one alone would time the machine's moods."""
    end = perf_counter() + _REPEATED_S
    runs = [answer(session, jobs, screen, quiet)]
    bases = [run_counting(plain, jobs, screen, "the same without drafter")]
    while len(runs) < _RUNS and perf_counter() < end:
        runs.append(run_counting(session, jobs, screen, "again"))
        bases.append(run_counting(plain, jobs, screen, "again without drafter"))
    return runs, bases


def _seeded(job: Job) -> Job:
    """The same job with a seed, so that it can be done twice alike."""
    from surefoot.sample.seeds import fresh_seed

    if job.params.seed is not None:
        return job
    return replace(job, params=replace(job.params, seed=fresh_seed()))
