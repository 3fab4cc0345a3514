"""Every backend computes what the reference computes, on the same random cases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from surefoot.backend import make_backend
from surefoot.backend.operands import RowLayout
from surefoot.backend.protocol import Backend
from surefoot.backend.reference import ReferenceBackend
from tests.unit.backend.conformance import (
    BACKENDS,
    GROUPED_OPERATORS,
    INT8_OPERATORS,
    OPERATORS,
    differing,
)
from tests.unit.backend.layouts import GARBAGE, HEADS, PAGE_TOKENS, SIZES, case_of

CASES = 48
DEEP_CASES = range(1000, 1240)
EIGHTS = {**INT8_OPERATORS, **GROUPED_OPERATORS}


@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("operator", OPERATORS)
def test_operator_conforms_to_the_reference(operator: str, seed: int) -> None:
    assert _failures(operator, seed) == {}


@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("operator", EIGHTS)
def test_int8_operator_conforms_to_the_reference(operator: str, seed: int) -> None:
    assert _failures(operator, seed) == {}


@pytest.mark.deep
@pytest.mark.parametrize("operator", [*OPERATORS, *EIGHTS])
def test_operator_conforms_to_the_reference_on_many_cases(operator: str) -> None:
    failures = {seed: _failures(operator, seed) for seed in DEEP_CASES}
    assert {seed: found for seed, found in failures.items() if found} == {}


def _failures(operator: str, seed: int) -> dict[str, list[str]]:
    """What is wrong, by backend."""
    run = OPERATORS.get(operator) or EIGHTS[operator]
    want = run(ReferenceBackend(), seed)
    backends = {name: make() for name, make in BACKENDS.items()}
    if operator in EIGHTS:
        backends = {name: each for name, each in backends.items() if each.capabilities.int8}
    found = {name: differing(run(each, seed), want) for name, each in backends.items()}
    return {name: faults for name, faults in found.items() if faults}


def test_the_cases_cover_what_matters() -> None:
    cases = [case_of(seed) for seed in range(CASES)]
    layouts = [case.layout for case in cases]
    rows = [
        (layout, row, layout.length(row)) for layout in layouts for row in range(len(layout.first))
    ]
    kinds = Counter(min(length, 10) for _, _, length in rows)
    assert kinds[0] > 0, "empty rows"
    assert kinds[1] > 50, "decode rows"
    assert sum(kinds[n] for n in range(2, 10)) > 50, "verify rows"
    assert kinds[10] > 20, "prefill rows"
    assert {len(layout.first) for layout in layouts} == set(range(10))
    assert {layout.page_tokens for layout in layouts} == set(PAGE_TOKENS)
    assert {(case.query_heads, case.key_heads) for case in cases} == set(HEADS)
    assert {case.size for case in cases} == set(SIZES)
    assert any(layout.first[row] % layout.page_tokens == 0 for layout, row, _ in rows)
    assert any((layout.first[row] + 1) % layout.page_tokens == 0 for layout, row, _ in rows)
    assert any(layout.visible_from[row] > 0 for layout, row, _ in rows)
    assert any(_shares(layout.tables) for layout in layouts)


def _shares(tables: Sequence[Sequence[int]]) -> bool:
    firsts = [table[0] for table in tables if table]
    return len(firsts) > len(set(firsts))


def test_the_cases_are_full_of_what_must_not_be_read() -> None:
    case = case_of(3)
    pool, ring = case.pool(), case.ring()
    assert pool[0].isnan().all()
    assert ring[0].isnan().all()
    assert (pool == GARBAGE).any()
    assert (ring == GARBAGE).any()


def test_the_reference_attends_as_written_down() -> None:
    """The truth itself, against one row worked out by hand: two keys, scores 0 and ln 3."""
    q = torch.tensor([[[1.0]]])
    own = torch.tensor([[[math.log(3.0)]]]), torch.tensor([[[8.0]]])
    layout = RowLayout(
        starts=(0, 1),
        first=(5,),
        tables=((2, 1),),
        slots=(1,),
        visible_from=(4,),
        settled=(5,),
        settles=(6,),
        page_tokens=4,
    )
    rows = ReferenceBackend().rows(layout)
    k_pool, v_pool = torch.zeros(3, 1, 4, 1), torch.full((3, 1, 4, 1), 4.0)
    rows.paged_write(k_pool, own[0])
    rows.paged_write(v_pool, own[1])
    assert k_pool[1, 0, 1, 0] == own[0]
    assert k_pool.count_nonzero() == 1
    paged = rows.paged_attention(q, k_pool, v_pool, 1.0)
    assert paged.item() == pytest.approx((4.0 + 3 * 8.0) / 4)
    rings = torch.zeros(2, 3, 1, 1), torch.full((2, 3, 1, 1), 4.0)
    seen = rows.window_attention(q, own, rings, 2, 1.0)
    assert seen.item() == pytest.approx((4.0 + 3 * 8.0) / 4)


@pytest.mark.parametrize("bitwise", [True, False])
def test_bfloat16_attention_stays_close(bitwise: bool) -> None:
    backend = make_backend("cpu", bitwise)
    for seed in range(1, 12):
        case = case_of(seed)
        q, k, v = (x.bfloat16() for x in (case.queries(), case.entries(), case.entries()))
        pools = [case.pool().bfloat16() for _ in range(2)]
        got = _attended(backend, seed, (q, k, v), pools)
        exact = [x.float() for x in (q, k, v)]
        want = _attended(
            ReferenceBackend(), seed, (exact[0], exact[1], exact[2]), [p.float() for p in pools]
        )
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def _attended(
    backend: Backend, seed: int, qkv: tuple[Tensor, Tensor, Tensor], pools: Sequence[Tensor]
) -> Tensor:
    rows = backend.rows(case_of(seed).layout)
    copies = [pool.clone() for pool in pools]
    for pool, entries in zip(copies, qkv[1:], strict=True):
        rows.paged_write(pool, entries)
    return rows.paged_attention(qkv[0], copies[0], copies[1], qkv[0].shape[-1] ** -0.5)


@pytest.mark.parametrize("bitwise", [True, False])
def test_bfloat16_keeps_its_type_and_stays_close(bitwise: bool) -> None:
    backend, reference = make_backend("cpu", bitwise), ReferenceBackend()
    draws = torch.Generator().manual_seed(1)
    case = case_of(5)
    x, gates = (torch.randn(case.tokens, 24, generator=draws).bfloat16() for _ in range(2))
    ring = torch.randn(case.slots, 8, 24, generator=draws).bfloat16()
    weight = torch.randn(24, 4, generator=draws).bfloat16()
    one = torch.ones(24)
    pairs = [
        (
            backend.rows(case.layout).causal_conv(x, ring, weight),
            reference.rows(case.layout).causal_conv(x.float(), ring.float(), weight.float()),
        ),
        (backend.gate(x, gates), reference.gate(x.float(), gates.float())),
        (
            backend.gated_norm(x, gates, one, 1e-6),
            reference.gated_norm(x.float(), gates.float(), one, 1e-6),
        ),
    ]
    for got, want in pairs:
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)
