import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import surefoot as package
from surefoot.cli import main as entry
from surefoot.errors import PromptError
from tests.unit.cli.commands import Run

SOURCE = Path(__file__).parents[3] / "src"


def test_version(surefoot: Run) -> None:
    done = surefoot("--version")
    assert (done.status, done.out) == (0, f"surefoot {package.__version__}\n")


def test_help_lists_every_command(surefoot: Run) -> None:
    done = surefoot("--help")
    assert done.status == 0
    for name in ("generate", "chat", "serve", "check", "bench", "inspect"):
        assert f" {name} " in done.out


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench", "inspect"])
def test_help_of_a_command_shows_the_engine_flags(surefoot: Run, command: str) -> None:
    done = surefoot(command, "--help")
    assert done.status == 0
    for flag in ("--drafter", "--draft-tokens", "--memory", "--bitwise", "--config"):
        assert flag in done.out
    assert "--trust-remote-code" not in done.out
    assert "--speculative-accept" not in done.out


def test_commands_import_nothing_heavy_before_they_run() -> None:
    names = ("generate", "chat", "serve", "bench", "inspect")
    modules = ", ".join(f"surefoot.cli.{name}" for name in names)
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    environment = {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("frobnicate", "command: 'frobnicate' is unknown; known are generate"),
        ("generate m x --bogus", "bogus: there is no such option"),
        ("generate m x --max-rws 3", "max_rws: there is no such option. Did you mean --max-rows?"),
        ("generate m x --max-rows many", "max_rows: must be a whole number, not 'many'"),
        ("generate m x --max-rows", "max_rows: a value must follow it"),
        ("generate m x --max-rows 3 --max-num-seqs 4", "max_num_seqs: was given more than once"),
        ("generate m x --max-rows 0", "max_rows: must be a whole number"),
        ("generate m x --seed 1.5", "seed: must be a whole number, not '1.5'"),
        ("generate m x --memory 3XB", "memory: must be a number of bytes"),
        ("generate m x --bitwise=perhaps", "bitwise: 'perhaps' cannot be understood"),
        ("generate m x --trust-remote-code", "trust_remote_code: not offered"),
        ("generate m x --speculative-accept-threshold-single 0.9", "speculative_accept_thre"),
        ("generate no/such/model x --top-p 7", "top_p: must be a number above 0"),
        ("chat no/such/model --seed -1", "seed: must be a whole number from 0"),
        ("generate no/such/model x", "model: 'no/such/model' is no folder"),
        ("chat no/such/model", "model: "),
        ("bench no/such/model", "model: "),
        ("inspect no/such/model", "model: "),
        ("inspect m --drafter bogus", "drafter: 'bogus' is unknown"),
    ],
)
def test_a_mistake_is_one_line_that_begins_with_its_name(
    surefoot: Run, arguments: str, line: str
) -> None:
    assert surefoot(*arguments.split()).error.startswith(line)


@pytest.mark.parametrize("command", ["generate", "bench", "inspect"])
def test_with_json_too_a_mistake_goes_to_stderr(surefoot: Run, command: str) -> None:
    words = ["x"] if command == "generate" else []
    assert surefoot(command, "no/such/model", *words, "--json").error.startswith("model: ")


def ending(error: BaseException) -> Callable[[], Callable[..., None]]:
    def make() -> Callable[..., None]:
        def app(*_: object, **__: object) -> None:
            raise error

        return app

    return make


def test_ctrl_c_is_quiet(surefoot: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "make_app", ending(KeyboardInterrupt()))
    done = surefoot("generate")
    assert (done.status, done.out, done.err) == (130, "", "")


def test_a_message_of_many_lines_becomes_one(
    surefoot: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "make_app", ending(PromptError("is\n  long")))
    assert surefoot("generate").error == "prompt: is long"


def test_a_bug_of_ours_is_not_dressed_up(surefoot: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "make_app", ending(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        surefoot("generate")


def test_the_handler_of_ctrl_c_is_left_alone(surefoot: Run, tiny: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    surefoot("generate", tiny, "abc", "--max-tokens", 2)
    assert signal.getsignal(signal.SIGINT) is before
