"""Machine code on disk: never that of an earlier version, and not needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.backend.cpu import kernels
from surefoot.backend.cpu.kernels.compile import digest

FOLDER = Path(kernels.__file__).parent
FILES = sorted(path.name for path in FOLDER.glob("*.py"))

PARTS = """
from small.compile import part

@part
def more(x):
    return x + 1
"""
KERNELS = """
from small.compile import kernel
from small.parts import more

@kernel("f4(f4)")
def count(x):
    return more(x)
"""
LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
"""
ANSWER = "from small.kernels import count; print(count(3.0))"


@pytest.mark.parametrize("name", FILES)
def test_every_file_of_the_kernels_counts(name: str, tmp_path: Path) -> None:
    copy = shutil.copytree(FOLDER, tmp_path / "kernels", ignore=shutil.ignore_patterns("__py*"))
    assert digest(copy) == digest(FOLDER)
    with (copy / name).open("a") as file:
        file.write("#\n")
    assert digest(copy) != digest(FOLDER)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A package with one kernel, compiled as ours are."""
    package = tmp_path / "small"
    package.mkdir()
    shutil.copy(FOLDER / "compile.py", package)
    (package / "parts.py").write_text(PARTS)
    (package / "kernels.py").write_text(KERNELS)
    return package


def answered(package: Path, before: str = "", **environment: str) -> float:
    """What the kernel gives in a process of its own."""
    known = {name: value for name, value in os.environ.items() if "NUMBA" not in name}
    ran = subprocess.run(
        [sys.executable, "-B", "-c", before + ANSWER],
        cwd=package.parent,
        env=known | {"PYTHONPATH": str(package.parent)} | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return float(ran.stdout)


def test_code_of_an_earlier_part_is_not_taken_from_disk(small: Path, tmp_path: Path) -> None:
    """The file of the kernel itself stays as it is."""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert answered(small, **cache) == 4
    kept = list((tmp_path / "cache").rglob("*.nbc"))
    assert len(kept) == 1
    (small / "parts.py").write_text(PARTS.replace("x + 1", "x + 2"))
    assert answered(small, **cache) == 5
    assert len(list((tmp_path / "cache").rglob("*.nbc"))) == 2


def test_kernels_compile_where_no_folder_can_be_made(small: Path) -> None:
    (small / "__pycache__").write_text("in the way")
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME"), os.devnull)
    assert answered(small, **nowhere) == 4


def test_kernels_compile_where_nothing_can_be_written(small: Path, tmp_path: Path) -> None:
    """As on a full disk."""
    assert answered(small, LIMITED, NUMBA_CACHE_DIR=str(tmp_path / "cache")) == 4


@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc"])
def test_kernels_compile_where_what_is_kept_is_damaged(
    kind: str, small: Path, tmp_path: Path
) -> None:
    """As after a loss of power."""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert answered(small, **cache) == 4
    kept = list((tmp_path / "cache").rglob(kind))
    assert kept
    for path in kept:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert answered(small, **cache) == 4
    for path in kept:
        path.write_bytes(b"")
    assert answered(small, **cache) == 4
