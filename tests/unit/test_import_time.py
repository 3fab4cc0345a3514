"""`import surefoot` and `surefoot --help` start fast because they load nothing heavy."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import surefoot

SOURCE = Path(__file__).parents[2] / "src"
HEAVY = {
    "torch",
    "numpy",
    "tokenizers",
    "transformers",
    "safetensors",
    "gguf",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
}
YARDSTICK = "import argparse, asyncio, email.mime, http.server, multiprocessing, pydoc, unittest"
"""Work of the same kind that does not change with surefoot."""
YARDSTICK_S = 0.12
"""What it takes on the machine that half a second is meant for."""
BARE = (
    "surefoot.ids",
    "surefoot.errors",
    "surefoot.params",
    "surefoot.request",
    "surefoot.config",
    "surefoot.state.spec",
    "surefoot.state.plan",
    "surefoot.state.ledger",
    "surefoot.state.prefix",
    "surefoot.engine.scheduler",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    here = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=here
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def loaded(*arguments: str) -> set[str]:
    """Top-level names of all modules that this command imports."""
    report = run("-X", "importtime", *arguments).stderr
    return set(re.findall(r"^import time:.*\| +(\w+)", report, re.MULTILINE))


def cpu_seconds(*arguments: str) -> float:
    """Processor time of the command; waiting for a busy machine is not counted."""
    before = os.times()
    run(*arguments)
    after = os.times()
    user = after.children_user - before.children_user
    return user + after.children_system - before.children_system


def test_the_probe_sees_a_heavy_import() -> None:
    assert "numpy" in loaded("-c", "import numpy")


def test_import_loads_nothing_heavy() -> None:
    names = loaded("-c", "import surefoot")
    assert "surefoot" in names
    assert not names & HEAVY


def test_help_loads_nothing_heavy() -> None:
    names = loaded("-m", "surefoot", "--help")
    assert "surefoot" in names
    assert not names & HEAVY


def test_help_takes_at_most_half_a_second() -> None:
    """Or as much longer as the machine is slower at the moment; best of three, in turns."""
    times = [(cpu_seconds("-m", "surefoot", "--help"), cpu_seconds("-c", YARDSTICK)) for _ in "123"]
    taken, yardstick = map(min, zip(*times, strict=True))
    assert taken <= 0.5 * max(1.0, yardstick / YARDSTICK_S)


def test_sampling_params_do_not_bring_torch() -> None:
    assert "torch" not in loaded("-c", "from surefoot import SamplingParams; SamplingParams()")


@pytest.mark.parametrize("module", BARE)
def test_bookkeeping_does_not_bring_torch(module: str) -> None:
    assert "torch" not in loaded("-c", f"import {module}")


def test_every_public_name_can_be_had() -> None:
    for name in surefoot.__all__:
        assert getattr(surefoot, name) is not None
    assert set(surefoot.__all__) <= set(dir(surefoot))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLm'"):
        _ = surefoot.LLm
