"""Compiles kernels, and keeps the machine code on disk for the next start."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

from numba import njit

P = ParamSpec("P")
R = TypeVar("R")

_CONTRACT = {"contract"}  # a product and a sum may be one instruction
_REORDER = {"contract", "reassoc"}  # and a sum may be made in lanes
_COMPARE = {"nnan", "nsz", "reassoc"}  # comparisons may be made in lanes


def digest(folder: Path) -> str:
    """Changes with any file of a folder: a kernel's code depends on parts from other files."""
    hashed = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


_VERSION = digest(Path(__file__).parent)


def kernel(signature: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile for this one signature, or take what an earlier run has compiled.

    One signature means one machine code, which treats equal rows alike. Where nothing can be
    written to disk, every start compiles anew.
    """

    def compiled(function: Callable[P, R]) -> Callable[P, R]:
        function.__qualname__ = f"{function.__name__}_{_VERSION}"  # the key on disk
        try:
            made = njit(signature, cache=True, nogil=True, error_model="numpy", fastmath=_CONTRACT)(
                function
            )
        except (RuntimeError, OSError):  # no folder to keep it in, or no room there
            made = njit(signature, nogil=True, error_model="numpy", fastmath=_CONTRACT)(function)
        return cast(Callable[P, R], made)

    return compiled


def part(function: Callable[P, R]) -> Callable[P, R]:
    """A part of kernels: its sums are made in the order that is written."""
    made = njit(nogil=True, error_model="numpy", fastmath=_CONTRACT)(function)
    return cast(Callable[P, R], made)


def lanes(function: Callable[P, R]) -> Callable[P, R]:
    """A part of kernels: a sum over a row may be made in lanes, always the same for its length."""
    made = njit(nogil=True, error_model="numpy", fastmath=_REORDER)(function)
    return cast(Callable[P, R], made)


def extremes(function: Callable[P, R]) -> Callable[P, R]:
    """A part of kernels that compares numbers, in any order."""
    made = njit(nogil=True, error_model="numpy", fastmath=_COMPARE)(function)
    return cast(Callable[P, R], made)
