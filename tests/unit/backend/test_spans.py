"""Attention that leaves pages where they lie: what it must not read as truth."""

from __future__ import annotations

import pytest
import torch

from surefoot.backend.cpu import CpuBackend
from surefoot.step import Row, Step
from tests.unit.backend.tiled import KERNELS, on_both

PAGE, HEADS, SIZE = 8, 2, 8


def attended(
    backend: CpuBackend, tables: list[list[int]], padded: bool, sink: float
) -> torch.Tensor:
    """One decode row for each table, in its last page."""
    draws = torch.Generator().manual_seed(1)
    pools = [torch.randn(12, HEADS, PAGE, SIZE, generator=draws) for _ in range(2)]
    q = torch.randn(len(tables), 2 * HEADS, SIZE, generator=draws)
    for pool in pools:
        pool[0] = sink
    rows = [_decoding(table, slot) for slot, table in enumerate(tables, 1)]
    step = Step.of(rows, PAGE)
    if padded:
        step = step.pad(len(rows) + 1, step.token_count + 1)
        q = torch.cat((q, q[:1]))
    operators = step.build(backend).rows
    return operators.paged_attention(q, pools[0], pools[1], 0.3)[: len(tables)]


def _decoding(table: list[int], slot: int) -> Row:
    first = (len(table) - 1) * PAGE + 3
    return Row([1], first, 1, table, slot, 0, 0, first)


@on_both
@pytest.mark.parametrize("tables", [[[3, 1], [2, 4, 5]], [[1], [2]], [[2], [1]]], ids=str)
def test_a_damaged_sink_beside_short_rows_is_never_read(
    tables: list[list[int]], backend: CpuBackend
) -> None:
    want = attended(backend, tables, padded=False, sink=0.0)
    assert torch.equal(attended(backend, tables, padded=True, sink=float("nan")), want)


def test_a_page_table_that_is_too_short_is_noticed() -> None:
    """Kernels do not look; the next row's table lies behind."""
    rows = [Row([1], 3 * PAGE, 1, [1], 1, 0, 0, 3 * PAGE), Row([1], 0, 1, [2], 2, 0, 0, 0)]
    operators = Step.of(rows, PAGE).build(KERNELS).rows
    with pytest.raises(AssertionError, match="row 0 outgrows its page table"):
        operators.paged_write(torch.zeros(4, HEADS, PAGE, SIZE), torch.zeros(2, HEADS, SIZE))
