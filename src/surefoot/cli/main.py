"""The command `surefoot`: which commands there are, and how it ends.

Commands are named by import path and loaded when they are run, so that --help stays quick.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    ValidationError,
)

from surefoot import __version__
from surefoot.cli.settings_file import apply_settings_file
from surefoot.errors import SurefootError

USER_ERROR = 2
INTERRUPTED = 130

_COMMANDS = {
    "generate": "Continue prompts, or answer them.",
    "chat": "Talk with a model.",
    "serve": "Serve a model over HTTP, to OpenAI's clients and others.",
    "check": "Prove on your own weights that speculation changes nothing but speed.",
    "bench": "Measure speed by batch, drafter and depth.",
    "inspect": "Show what a model needs and keeps; reads only its config.",
}


def make_app() -> App:
    """The parser with all commands, none of which is loaded yet."""
    app = App(
        name="surefoot",
        help="An LLM inference engine in which speculation changes nothing but speed.",
        version=f"surefoot {__version__}",
        config=apply_settings_file,
        help_format="plaintext",
        suppress_keyboard_interrupt=False,
    )
    for name, about in _COMMANDS.items():
        app.command(f"surefoot.cli.{name}:{name}", name=name, help=about)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: the command line; None takes the process's own.

    Returns:
        0; 1 if the command found something wrong; 2 after a mistake of the user, which is
        explained in one line on stderr; 130 if interrupted.
    """
    tokens = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may write what the terminal cannot show; that is no reason to stop.
        sys.stdout.reconfigure(errors="replace")
    try:
        status = make_app()(
            tokens, exit_on_error=False, print_error=False, result_action="return_value"
        )
    except CycloptsError as error:
        return _complain(_wording(error))
    except SurefootError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Who read stdout has had enough; flushing at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status if isinstance(status, int) else 0


def _complain(reason: str) -> int:
    line = " ".join(reason.split())
    print(f"surefoot: error: {line}", file=sys.stderr)
    return USER_ERROR


def _wording(error: CycloptsError) -> str:
    """What was wrong with the command line, in the form of the other errors: name, then reason."""
    cause = error.__cause__
    if isinstance(cause, SurefootError):
        return str(cause)
    name = "" if error.argument is None else _field(error.argument.name)
    match error:
        case CoercionError(msg=reason) if name and reason is not None:
            return f"{name}: {reason}"
        case CoercionError(token=token) if name and token is not None:
            return f"{name}: {token.value!r} cannot be understood"
        case ValidationError(exception_message=reason) if name:
            return f"{name}: {reason}"
        case MissingArgumentError() if name:
            return f"{name}: a value must follow it"
        case RepeatArgumentError(token=token):
            return f"{_field(token.keyword or token.value)}: was given more than once"
        case UnknownOptionError(token=token):
            hint = str(error).partition(". ")[2]
            return f"{_field(token.keyword or token.value)}: there is no such option. {hint}"
        case UnknownCommandError(unused_tokens=[token, *_]):
            return f"command: {token!r} is unknown; known are {', '.join(_COMMANDS)}"
    return str(error)


def _field(flag: str) -> str:
    """A flag's name as errors spell it everywhere."""
    return flag.lstrip("-").split("=")[0].replace("-", "_")
