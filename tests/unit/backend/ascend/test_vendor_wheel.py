"""Shapes and dtypes of the emulation against the vendor's own functions for them.

The vendor's wheel is only read, never installed: installed, it breaks `import torch` on a machine
without its device. SUREFOOT_VENDOR_WHEEL names the wheel, or a folder: one that holds it, or any
other, and then pip fetches the wheel into a folder of the test.
"""

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.backend.ascend.emulate.schemas import SCHEMAS
from tests.unit.backend.ascend.vendor_cases import cases

VARIABLE = "SUREFOOT_VENDOR_WHEEL"
REQUIREMENT = "torch-npu==2.13.0"
REGISTRATIONS = "torch_npu/op_plugin/meta/_meta_registrations.py"
LIBRARY = "torch_npu/lib/libtorch_npu.so"


def test_every_operator_has_a_call_to_compare() -> None:
    assert {name for name, _ in cases()} == SCHEMAS.keys()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} names no wheel of {REQUIREMENT}")
    place = Path(named)
    if place.is_dir():
        found = sorted(place.glob("torch_npu-2.13.0-*.whl"))
        place = found[0] if found else fetched(tmp_path_factory.mktemp("wheel"))
    with zipfile.ZipFile(place) as opened:
        yield opened


def fetched(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", REQUIREMENT]
    subprocess.run([*pip, "--dest", folder], check=True)
    return next(folder.glob("*.whl"))


def test_the_schemas_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    library = wheel.read(LIBRARY)
    assert [
        name for name, schema in SCHEMAS.items() if schema.encode() + b"\0" not in library
    ] == []


def test_shapes_and_dtypes_are_the_vendors(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.backend.ascend.vendor_meta"]
    done = subprocess.run(
        [*command, wheel.extract(REGISTRATIONS, tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
