"""`surefoot serve`: mistakes are one line, and Ctrl-C ends it in order."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from surefoot.cli.serve import ServerOptions, greeting
from tests.unit.cli.commands import Run

SOURCE = Path(__file__).parents[3] / "src"
PATIENCE_S = 60
"""A busy machine may take its time; what waits longer than this hangs."""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--port 65536", "port: must be from 0 to 65535, not 65536"),
        ("--port many", "port: must be a whole number, not 'many'"),
        ("--host 192.0.2.1", "port: "),
        ("--host no-such-host.invalid", "host: 'no-such-host.invalid' is no address"),
        ("--api-key=", "api_key: must not be empty"),
        ("--max-rows 0", "max_rows: must be a whole number"),
        ("--port 0", "model: 'no/such/model' is no folder"),
        ("--bogus", "bogus: there is no such option"),
    ],
)
def test_a_mistake_is_one_line(surefoot: Run, arguments: str, line: str) -> None:
    assert surefoot("serve", "no/such/model", *arguments.split()).error.startswith(line)


def test_a_taken_port_is_named_before_the_model_is_loaded(surefoot: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = surefoot("serve", "no/such/model", "--port", port).error
    assert error.startswith(f"port: {port} cannot be had on 127.0.0.1 (Address already in use)")
    assert "--port" in error


@pytest.mark.parametrize("absent", ["fastapi", "uvicorn"])
def test_without_the_extra_it_says_how_to_get_it(
    surefoot: Run, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    monkeypatch.setattr(
        "surefoot.cli.serve.find_spec", lambda name: None if name == absent else object()
    )
    error = surefoot("serve", "no/such/model").error
    assert error == f"serve: needs {absent}; get them by: pip install 'surefoot[serve]'"


def test_the_greeting_can_be_pasted_into_a_shell() -> None:
    lines = greeting("http://127.0.0.1:8000", "it's/a model", ServerOptions(api_key="secret"))
    words = shlex.split(lines[1])
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's/a model"
    assert "Authorization: Bearer KEY" in words
    assert "secret" not in " ".join(lines)


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_an_open_door_is_mentioned(host: str, warned: bool) -> None:
    lines = greeting(f"http://{host}:8000", "m", ServerOptions(host=host))
    assert (len(lines) == 3) is warned


@contextmanager
def serving(model: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and where it serves."""
    command = [sys.executable, "-m", "surefoot", "serve", str(model), "--port", "0", *arguments]
    here = {**os.environ, "PYTHONPATH": str(SOURCE)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=here)
    assert process.stderr is not None
    try:
        yield process, process.stderr.readline().split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_ctrl_c_ends_it_in_order_while_it_streams(tiny: Path) -> None:
    arguments = ("--served-model-name", "small", "--draft-tokens", "4", "--max-step-tokens", "32")
    with serving(tiny, *arguments) as (process, address):
        assert process.stderr is not None
        assert process.stderr.readline().startswith("curl ")
        body = {"model": "small", "prompt": "a", "max_tokens": 500, "ignore_eos": True}
        with httpx2.stream(
            *("POST", f"{address}/v1/completions"),
            json={**body, "stream": True},
            timeout=PATIENCE_S,
        ) as reply:
            events = reply.iter_lines()
            assert next(events).startswith("data: ")
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0
        assert process.stderr.read() == "stopped\n"
