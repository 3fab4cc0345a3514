"""Loops over rows, compiled: what a library of whole-tensor operators can only do in many calls.

Each loop computes one row after the other, in an order that depends on the row alone. So a row's
bits cannot depend on the rows beside it or on how the work was cut.
"""

from __future__ import annotations

from collections.abc import Callable

from surefoot.backend.cpu.kernels import (
    attention,
    choose,
    chosen,
    delta,
    dots,
    grouped,
    grouped_dots,
    halves,
    int8,
    latents,
    matrix_unit,
    pieces,
    rowwise,
    streams,
    writes,
)
from surefoot.backend.cpu.kernels.compile import Kernel

_EVERYWHERE = (attention, choose, chosen, delta, grouped, int8, latents, rowwise, streams, writes)
_WITH_VECTORS = (halves,) if halves.HAS_VECTORS else ()
_WITH_DOTS = (dots, grouped_dots) if dots.HAS_DOTS else ()
_ON_THE_UNIT = (pieces,) if matrix_unit.HAS_MATRIX_UNIT else ()
_MODULES = (*_EVERYWHERE, *_WITH_VECTORS, *_WITH_DOTS, *_ON_THE_UNIT)


def prepare_kernels(progress: Callable[[str], None]) -> None:
    """Compile all kernels, or take them from disk; says so where it takes time."""
    kernels = [
        value for module in _MODULES for value in vars(module).values() if isinstance(value, Kernel)
    ]
    for number, kernel in enumerate(kernels, start=1):
        if kernel.prepare():
            progress(f"compiling kernels, at the first start: {number} of {len(kernels)}")
