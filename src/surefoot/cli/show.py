"""What a user sees: results on stdout, everything else on stderr, colours on a terminal only."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

_PAPER_WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""
_PERCENT = re.compile(r"(.*): (\d+)%")
_NUMBER = re.compile(r"[\d,.]*")


class Screen:
    """The two streams of a command."""

    def __init__(self) -> None:
        """Write to the process's own streams as they are now."""
        width = None if sys.stdout.isatty() else _PAPER_WIDTH
        self._out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)
        self._err = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def text(self, piece: str) -> None:
        """Write a piece of a result as it is, at once."""
        sys.stdout.write(piece)
        sys.stdout.flush()

    def line(self, line: str, style: str | None = None) -> None:
        """Write a line of a result."""
        self._out.print(line, style=style)

    def note(self, line: str, style: str | None = "dim") -> None:
        """Say something about the run."""
        self._err.print(line, style=style)

    def warn(self, line: str) -> None:
        """Say that something went wrong."""
        self._err.print(f"surefoot: {line}", style="red")

    def json(self, content: Mapping[str, object]) -> None:
        """Write the one JSON object of a command."""
        self.text(json.dumps(content) + "\n")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Write a table; columns of numbers are set to the right.

        Args:
            title: above it; may be empty.
            columns: their heads.
            rows: as many cells each as there are columns; floats are rounded for reading. In a
                column of numbers a cell may be empty, or a number as it is to be read.
        """
        table = Table(
            title=title or None,
            title_justify="left",
            title_style="bold",
            box=SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for index, head in enumerate(columns):
            numeric = all(_is_number(row[index]) for row in rows)
            table.add_column(head, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(_cell(value) for value in row))
        self._out.print(table, soft_wrap=False)

    @contextmanager
    def loading(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show progress while something is fetched and read; nothing where stderr is no terminal.

        Yields:
            What takes the lines of the loader; a line that ends in percent moves the bar.
        """
        with self._bar() as bar:
            task = bar.add_task(what, total=None)

            def report(line: str) -> None:
                percent = _PERCENT.fullmatch(line)
                if percent is None:
                    bar.update(task, description=f"{what}: {line}", total=None)
                else:
                    done = int(percent[2])
                    bar.update(task, description=percent[1], completed=done, total=100)

            yield report

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[int, str], None]]:
        """Show how much of a long run is done; nothing where stderr is no terminal.

        Yields:
            What takes the count so far and a word on it.
        """
        with self._bar() as bar:
            task = bar.add_task(what, total=total)

            def report(done: int, word: str) -> None:
                bar.update(task, completed=done, description=f"{what}: {done}/{total} {word}")

            yield report

    def _bar(self) -> Progress:
        columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}", markup=False))
        quiet = not self._err.is_terminal
        return Progress(*columns, console=self._err, transient=True, disable=quiet)


def amount(count: int, unit: str) -> str:
    """A count with its unit: "1 token", "2 tokens"."""
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


def bytes_text(count: int) -> str:
    """A number of bytes for reading: "512.0 MiB"."""
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{count} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return _NUMBER.fullmatch(value) is not None
    return isinstance(value, int | float)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
