"""Runs commands within this process, on tiny models with random weights."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.cli.main import main
from surefoot.testing.tiny_models import write_tiny
from tests.unit.cli.commands import Done, Run


@pytest.fixture(autouse=True)
def _no_calibration(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing steps takes longer than all the rest; only the deep tests need it."""
    if request.node.get_closest_marker("deep") is None:
        costs = {1: 0.001, 64: 0.002}
        monkeypatch.setattr("surefoot.engine.assemble.measure_steps", lambda *_: costs)


@pytest.fixture
def surefoot(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*arguments: object, stdin: str = "") -> Done:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Done(status, out, err)

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_tiny(folder, "LlamaForCausalLM", tokenizer=True)


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Guesses what `tiny` says, right now and then."""
    folder = tmp_path_factory.mktemp("models") / "draft"
    return write_tiny(folder, "LlamaForCausalLM", tokenizer=True, drift=0.1)


@pytest.fixture(scope="session")
def tiny_ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without tokenizer; every second layer sees a window only."""
    folder = tmp_path_factory.mktemp("models") / "ids"
    return write_tiny(folder, "MistralForCausalLM", mixed=True)


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    """Writes a JSONL file of these values."""

    def write(*values: object) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
        return path

    return write
