from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import RELAXED, STRICT, EmulatedVendor, NotEmulatedError
from tests.unit.backend.ascend.broken import Arguments, Broken, broken_cases

VENDOR: Any = EmulatedVendor(RELAXED)
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(came: Tensor, wanted: list[float]) -> None:
    exact = torch.tensor(wanted, dtype=torch.float64)
    assert ((came.double() - exact).abs() <= torch.finfo(came.dtype).eps * exact.abs()).all()


def best(scores: dict[int, float], count: int) -> list[int]:
    """The greatest, the lowest index among equals."""
    return sorted(scores, key=lambda at: (-scores[at], at))[:count]


def normed_row(row: list[float], kind: int) -> list[float]:
    exact = torch.tensor(row, dtype=torch.float64)
    if kind == 1:
        return (1 / (1 + torch.exp(-exact))).tolist()
    return (torch.exp(exact) / torch.exp(exact).sum()).tolist()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize(("groups", "open_groups", "k"), [(1, 1, 3), (4, 2, 5), (4, 4, 16)])
def test_gating_top_k(
    dtype: torch.dtype, kind: int, mode: int, groups: int, open_groups: int, k: int
) -> None:
    x, bias = draw(12, 16, dtype=dtype), draw(16, dtype=dtype, seed=1) / 8
    weights, experts, normed = VENDOR.npu_moe_gating_top_k(
        x,
        k,
        bias=bias,
        k_group=open_groups,
        group_count=groups,
        group_select_mode=mode,
        norm_type=kind,
        out_flag=True,
        routed_scaling_factor=2.5,
        eps=1e-3,
    )
    size = 16 // groups
    for token in range(12):
        own = normed_row(x[token].double().tolist(), kind)
        biased = {e: own[e] + float(bias[e]) for e in range(16)}
        worth = {}
        for group in range(groups):
            scores = sorted(biased[e] for e in range(group * size, group * size + size))
            worth[group] = sum(scores[-2:]) if mode else scores[-1]
        opened = best(worth, open_groups)
        chosen = best({e: biased[e] for e in biased if e // size in opened}, k)
        assert experts[token].tolist() == chosen
        whole = sum(own[e] for e in chosen) + 1e-3 if kind else 1.0
        near(weights[token], [own[e] / whole * 2.5 for e in chosen])
        near(normed[token], own)
    assert (weights.dtype, experts.dtype, normed.dtype) == (dtype, torch.int32, torch.float32)


def test_gating_top_k_of_equals_and_of_nothing() -> None:
    _, experts, normed = VENDOR.npu_moe_gating_top_k(torch.zeros(2, 8), 3)
    assert experts.tolist() == [[0, 1, 2]] * 2
    assert bool(normed.isnan().all())
    assert VENDOR.npu_moe_gating_top_k(torch.zeros(0, 8), 3)[1].shape == (0, 3)


def choice(**changes: object) -> Arguments:
    return {
        "x": draw(5, 16),
        "k": 4,
        "bias": draw(16),
        "group_count": 4,
        "k_group": 2,
        "norm_type": 1,
    } | changes


@broken_cases(
    Broken("input_ids", {"input_ids": torch.zeros(5).long()}, NotEmulatedError),
    Broken("tid2eid", {"tid2eid": torch.zeros(9, 4).long()}, NotEmulatedError),
    Broken("dtype of x", {"x": draw(5, 16).double()}),
    Broken("dimensions of x", {"x": draw(1, 5, 16)}),
    Broken("dtype of bias", {"bias": draw(16).half()}),
    Broken("shape of bias", {"bias": draw(15)}),
    Broken("renorm", {"renorm": 1}),
    Broken("norm_type", {"norm_type": 2}),
    Broken("group_select_mode", {"group_select_mode": 2}),
    Broken("group_count", {"group_count": 3}),
    Broken("group_count", {"group_count": 0}, label="none"),
    Broken("experts of a group", {"group_count": 8}),
    Broken("k_group", {"k_group": 5}),
    Broken("k_group", {"k_group": 0}, label="none"),
    Broken("k", {"k": 9}),
    Broken("k", {"k": 0}, label="none"),
    Broken("experts", {"x": draw(1, 4096), "bias": None}, profile=STRICT),
    Broken(
        "padded experts", {"x": draw(1, 1024), "bias": None, "group_count": 128}, profile=STRICT
    ),
    Broken("host or device", {"renorm": True}, label="a bool"),
)
def test_gating_top_k_contract(case: Broken) -> None:
    case.check(EmulatedVendor(case.profile).npu_moe_gating_top_k, choice())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "k"), [(3, 1), (3, 4), (1, 8), (0, 2)])
def test_gating_top_k_softmax(dtype: torch.dtype, tokens: int, k: int) -> None:
    x = draw(tokens, 8, dtype=dtype)
    y, experts, rows = VENDOR.npu_moe_gating_top_k_softmax(x, k=k)
    for token in range(tokens):
        shares = normed_row(x[token].double().tolist(), 0)
        chosen = best(dict(enumerate(shares)), k)
        assert experts[token].tolist() == chosen
        near(y[token], [shares[e] for e in chosen])
        assert rows[token].tolist() == [j * tokens + token for j in range(k)]
    assert (y.dtype, experts.dtype, rows.dtype) == (dtype, torch.int32, torch.int32)


@broken_cases(
    Broken("finished", {"finished": torch.zeros(3, dtype=torch.bool)}, NotEmulatedError),
    Broken("dtype of x", {"x": draw(3, 8).double()}),
    Broken("dimensions of x", {"x": draw(8)}),
    Broken("dimensions of x", {"x": draw(1, 3, 8)}, NotEmulatedError),
    Broken("k", {"k": 9}),
    Broken("k", {"k": 0}, label="none"),
    Broken("k", {"x": draw(1, 2000), "k": 1025}, profile=STRICT, label="too many"),
)
def test_gating_top_k_softmax_contract(case: Broken) -> None:
    call = {"x": draw(3, 8), "k": 2}
    case.check(EmulatedVendor(case.profile).npu_moe_gating_top_k_softmax, call)
