"""The tiled forms in float32: on CPUs they are what other element types take."""

from __future__ import annotations

import pytest

from surefoot.backend.blockwise.attention import BlockwiseRows
from surefoot.backend.blockwise.backend import BlockwiseBackend
from surefoot.backend.cpu import CpuBackend
from surefoot.backend.operands import RowLayout
from surefoot.backend.row_operators import RowOperators


class TiledBackend(CpuBackend):
    """The cpu backend, with tiled forms in the place of every kernel."""

    rms_norm = BlockwiseBackend.rms_norm
    rotary = BlockwiseBackend.rotary
    gate = BlockwiseBackend.gate
    gated_norm = BlockwiseBackend.gated_norm
    delta_gates = BlockwiseBackend.delta_gates
    fold_delta = BlockwiseBackend.fold_delta

    def rows(self, layout: RowLayout) -> RowOperators:
        return BlockwiseRows(layout, self._widths, self.device)


TILED = TiledBackend(bitwise=True)
"""One for all tests: it measures the least width of a tile once for each shape."""

KERNELS = CpuBackend(bitwise=True)

on_both = pytest.mark.parametrize("backend", [KERNELS, TILED], ids=["kernels", "tiled"])
"""For what holds in either form."""
