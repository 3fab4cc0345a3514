"""Running jobs with something to look at: text as it grows, or a bar and then everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from surefoot.cli.show import Screen

if TYPE_CHECKING:
    from surefoot.cli.session import Job, Run, Session, Watch
    from surefoot.engine.rows import Emission
    from surefoot.results import Completion


def answer(session: Session, jobs: Sequence[Job], screen: Screen, quiet: bool) -> Run:
    """Do the jobs and print what comes, unless `quiet`.

    A single text is shown while it grows; several show a bar and are printed in the end.
    """
    if not quiet and len(jobs) == 1 and jobs[0].params.n == 1:
        run = session.run(jobs, typing(session, screen))
        screen.text("\n")
        return run
    run = run_counting(session, jobs, screen, "generating")
    if not quiet:
        _print_all(session, run, screen)
    return run


def run_counting(session: Session, jobs: Sequence[Job], screen: Screen, what: str) -> Run:
    """Do the jobs behind a bar that counts the samples that are done."""
    done = tokens = 0
    with screen.counting(what, sum(job.params.n for job in jobs)) as report:

        def count(emissions: Sequence[Emission]) -> None:
            nonlocal done, tokens
            done += sum(emission.reason is not None for emission in emissions)
            tokens += sum(len(emission.token_ids) for emission in emissions)
            report(done, f"done, {tokens:,} tokens")

        return session.run(jobs, count)


def typing(session: Session, screen: Screen) -> Watch:
    """A watch that prints text as it comes; without a tokenizer, token ids."""
    has_text = session.engine.tokenizer is not None

    def show(emissions: Sequence[Emission]) -> None:
        for emission in emissions:
            screen.text(emission.text if has_text else _spelt(emission.token_ids))

    return show


def warn_of_failures(run: Run, screen: Screen) -> int:
    """Name what ended with an error; the number of such samples."""
    failed = [output for result in run.results for output in result.outputs if output.error]
    for output in failed:
        screen.warn(f"a request failed: {output.error}")
    return len(failed)


def _print_all(session: Session, run: Run, screen: Screen) -> None:
    has_text = session.engine.tokenizer is not None
    for number, result in enumerate(run.results, start=1):
        for output in result.outputs:
            sample = f".{output.index + 1}" if len(result.outputs) > 1 else ""
            screen.line(f"[{number}{sample}]", style="bold")
            screen.line(_text(output, has_text))


def _text(output: Completion, has_text: bool) -> str:
    return output.text if has_text else _spelt(output.token_ids)


def _spelt(token_ids: Sequence[int]) -> str:
    return "".join(f"{token} " for token in token_ids)
