"""`surefoot chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from surefoot.cli.answers import typing, warn_of_failures
from surefoot.cli.asks import Ask
from surefoot.cli.flags import flag
from surefoot.cli.options import (
    DEFAULT_MODEL,
    ENGINE_DEFAULTS,
    SAMPLING_DEFAULTS,
    EngineOptions,
    ModelName,
    SamplingOptions,
    json_object,
)
from surefoot.cli.report import summary
from surefoot.cli.show import Screen
from surefoot.errors import SettingError, SurefootError, TokenizerError
from surefoot.params import SamplingParams
from surefoot.text.messages import Message

if TYPE_CHECKING:
    from surefoot.cli.session import Session
    from surefoot.engine.rows import Emission

MAX_TOKENS = 1024
HELP = "/exit ends, /reset forgets the conversation, /system TEXT sets the system message"


def chat(
    model: ModelName = DEFAULT_MODEL,
    *,
    system: Annotated[str | None, flag("What the system message says.")] = None,
    chat_template_kwargs: Annotated[
        str | None, flag("Further variables for the chat template.", metavar="JSON")
    ] = None,
    sampling: SamplingOptions = SAMPLING_DEFAULTS,
    engine: EngineOptions = ENGINE_DEFAULTS,
) -> int:
    """Talk with a model. Ctrl-C stops an answer; at the prompt it ends the conversation.

    An answer has at most 1,024 tokens, unless --max-tokens says otherwise.
    """
    screen = Screen()
    options = json_object("chat_template_kwargs", chat_template_kwargs or "{}")
    config = engine.single()
    # Values out of range shall not wait until the model is loaded.
    sampling.over(SamplingParams(max_tokens=MAX_TOKENS))
    # The model's side loads torch, which --help and a mistyped flag need not wait for.
    from surefoot.cli.session import opened

    with opened(model, config, screen) as session:
        defaults = replace(session.llm.default_params(), max_tokens=MAX_TOKENS)
        talk = Talk(session, screen, sampling.over(defaults), options, system)
        screen.note(HELP)
        talk.go(_line_reader())
    return 0


class Talk:
    """A conversation: what was said, and how the next line is handled."""

    def __init__(
        self,
        session: Session,
        screen: Screen,
        params: SamplingParams,
        options: dict[str, object],
        system: str | None,
    ) -> None:
        """Begin with nothing said.

        Raises:
            SettingError: more than one sample is asked for.
        """
        if params.n != 1:
            raise SettingError("n", f"must be 1 in a conversation, not {params.n}")
        self._session, self._screen = session, screen
        self._params, self._options = params, options
        self._system = system
        self._said: list[Message] = []

    def go(self, read: Callable[[], str]) -> None:
        """Take lines from `read` until /exit or the end of input."""
        while True:
            try:
                line = read().strip()
            except EOFError:
                return
            if line in ("/exit", "/quit"):
                return
            if line:
                self.take(line)

    def take(self, line: str) -> None:
        """Obey a command, or answer; what cannot be served is explained, and the talk goes on."""
        command, _, rest = line.partition(" ")
        if command == "/reset":
            self._said.clear()
            self._screen.note("forgotten")
        elif command == "/system":
            self._system = rest.strip() or None
            self._screen.note("set" if self._system else "removed")
        elif command.startswith("/"):
            self._screen.note(f"{command} is unknown; {HELP}")
        else:
            self._reply(line)

    def _reply(self, line: str) -> None:
        self._said.append({"role": "user", "content": line})
        try:
            text = self._answer()
        except TokenizerError:
            raise
        except SurefootError as error:
            self._said.pop()
            self._screen.warn(f"{error} (/reset forgets the conversation)")
        else:
            self._said.append({"role": "assistant", "content": text})

    def _answer(self) -> str:
        """Stream an answer; what was said until Ctrl-C counts as said."""
        ask = Ask(messages=self._said).as_chat(self._system)
        job = self._session.job(ask, self._params, self._options)
        show, said = typing(self._session, self._screen), list[str]()
        with stopping() as stopped:

            def watch(emissions: Sequence[Emission]) -> None:
                show(emissions)
                said.extend(emission.text for emission in emissions)
                if stopped():
                    raise KeyboardInterrupt

            try:
                run = self._session.run([job], watch)
            except KeyboardInterrupt:
                self._screen.text("\n")
                self._screen.note("stopped")
                return "".join(said)
        self._screen.text("\n")
        self._screen.note(summary(run.results, run.tokens_per_s))
        warn_of_failures(run, self._screen)
        return run.results[0].outputs[0].text


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Hold the first Ctrl-C back, so that a step is never torn apart; a second one acts at once.

    Yields:
        What says whether Ctrl-C was pressed.
    """
    pressed = False

    def press(_number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _line_reader() -> Callable[[], str]:
    """What reads a line of the user; there is a prompt only where somebody sees it."""
    if not sys.stdin.isatty():
        return input
    with suppress(ImportError):
        # Loading it is enough for input() to let lines be edited.
        import_module("readline")
    return lambda: input("> ")
