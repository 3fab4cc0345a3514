from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import (
    RELAXED,
    STRICT,
    EmulatedVendor,
    NotEmulatedError,
    RefusedError,
    SilentError,
)
from tests.unit.backend.ascend.broken import Arguments, Broken, broken_cases

VENDOR: Any = EmulatedVendor(RELAXED)
BF, HALF, F32 = torch.bfloat16, torch.float16, torch.float32


def draw(*shape: int, dtype: torch.dtype = BF, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_eight_bits(row: list[float]) -> tuple[list[int], float]:
    """One row in plain Python; round() takes halves to the even neighbour."""
    scale = float(torch.tensor(max(map(abs, row), default=0.0) / 127, dtype=F32))
    return [max(-128, min(127, round(x / scale))) if scale else 0 for x in row], scale


def same(came: tuple[Tensor, Tensor], rows: list[list[float]]) -> None:
    wanted = [in_eight_bits(row) for row in rows]
    y, scale = came
    assert (y.dtype, scale.dtype) == (torch.int8, F32)
    assert y.flatten(0, -2).tolist() == [row for row, _ in wanted]
    assert scale.flatten().tolist() == [scale for _, scale in wanted]


@pytest.mark.parametrize("dtype", [BF, HALF])
@pytest.mark.parametrize("shape", [(3, 8), (0, 8), (2, 3, 8), (1, 1)])
def test_dynamic_quant(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = draw(*shape, dtype=dtype) * 3
    y, scale = VENDOR.npu_dynamic_quant(x)
    assert y.shape == x.shape
    assert scale.shape == x.shape[:-1]
    same((y, scale), x.double().reshape(-1, shape[-1]).tolist())


def test_dynamic_quant_rounds_halves_to_even_and_keeps_zeros() -> None:
    x = torch.tensor([[127, 0.5, 1.5, -2.5], [0, 0, 0, 0]], dtype=HALF)
    y, scale = VENDOR.npu_dynamic_quant(x, dst_type=torch.int8)
    assert y.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]
    assert scale.tolist() == [1, 0]


def test_dynamic_quant_does_not_look_at_other_rows() -> None:
    x = draw(4, 8)
    before = VENDOR.npu_dynamic_quant(x)[0]
    x[2] = torch.nan
    y, scale = VENDOR.npu_dynamic_quant(x)
    assert bool(scale.isnan()[2])
    assert torch.equal(y[[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.parametrize("dtype", [BF, HALF])
def test_dynamic_quant_with_factors(dtype: torch.dtype) -> None:
    x, factors = draw(5, 8, dtype=dtype), draw(3, 8, dtype=dtype, seed=1)
    single = VENDOR.npu_dynamic_quant(x, smooth_scales=factors[0])
    same(single, (x.double() * factors[0].double()).tolist())
    groups = torch.tensor([2, 2, 5], dtype=torch.int32)
    spread = factors.double()[[0, 0, 2, 2, 2]]
    several = VENDOR.npu_dynamic_quant(x, smooth_scales=factors, group_index=groups)
    same(several, (x.double() * spread).tolist())


def grouped() -> Arguments:
    return {
        "input": draw(5, 8),
        "smooth_scales": draw(3, 8),
        "group_index": torch.tensor([2, 2, 5], dtype=torch.int32),
    }


def sums(*values: int) -> Arguments:
    return {"group_index": torch.tensor(values, dtype=torch.int32)}


@broken_cases(
    Broken("dst_type", {"dst_type": torch.quint4x2}, NotEmulatedError),
    Broken("quant_mode", {"quant_mode": "pertensor"}, NotEmulatedError),
    Broken("dst_type_max", {"dst_type_max": 1.0}, NotEmulatedError),
    Broken("dtype of input", {"input": draw(5, 8, dtype=F32)}),
    Broken("dimensions of input", {"input": draw(8)}),
    Broken("smooth_scales", {"smooth_scales": None}),
    Broken("dtype of smooth_scales", {"smooth_scales": draw(3, 8, dtype=HALF)}),
    Broken("dimensions of smooth_scales", {"smooth_scales": draw(8)}),
    Broken("shape of smooth_scales", {"smooth_scales": draw(3, 7)}),
    Broken("shape of smooth_scales", {"group_index": None}, label="without groups"),
    Broken("dtype of group_index", {"group_index": torch.tensor([2, 2, 5])}),
    Broken("shape of group_index", sums(2, 5)),
    Broken("group_index", sums(2, 1, 5), SilentError, label="falling"),
    Broken("group_index", sums(-1, 2, 5), SilentError, label="negative"),
    Broken("group_index", sums(2, 2, 4), SilentError, label="not all rows"),
    Broken(
        "groups",
        {
            "smooth_scales": draw(1025, 8),
            "group_index": torch.full((1025,), 5, dtype=torch.int32),
        },
        profile=STRICT,
    ),
)
def test_dynamic_quant_contract(case: Broken) -> None:
    case.check(EmulatedVendor(case.profile).npu_dynamic_quant, grouped())


@pytest.mark.parametrize("dtype", [F32, BF, HALF])
@pytest.mark.parametrize("axis", [-2, -1, 0, 1])
def test_quantize_by_factors(dtype: torch.dtype, axis: int) -> None:
    x = draw(3, 4, dtype=dtype)
    along = 0 if axis == -2 else 1
    scales, points = (draw(x.shape[along], dtype=dtype, seed=seed) * 40 for seed in (1, 2))
    y = VENDOR.npu_quantize(x, scales, points, torch.qint8, axis, False)
    assert y.dtype == torch.int8
    for i in range(3):
        for j in range(4):
            at = i if axis == -2 else j
            exact = x[i, j].double() * scales[at].double() + points[at].double()
            assert int(y[i, j]) == max(-128, min(127, round(float(exact))))
    one = VENDOR.npu_quantize(x, scales[:1], None, torch.int8, axis, False)
    assert torch.equal(one, (x.double() * scales[0].double()).round().clamp(-128, 127).char())


@pytest.mark.parametrize(
    ("dtype", "out"),
    [(torch.qint8, torch.int8), (torch.quint8, torch.uint8), (torch.int32, torch.int32)],
)
def test_quantize_by_divisors(dtype: torch.dtype, out: torch.dtype) -> None:
    x, scales = draw(3, 4, 2), draw(4, dtype=F32, seed=1).abs() + 0.01
    points = torch.tensor([1, 0, -3, 100], dtype=torch.int32)
    y = VENDOR.npu_quantize(x, scales, points, dtype, div_mode=True)
    exact = x.double() / scales.double()[:, None] + points.double()[:, None]
    limits = torch.iinfo(out)
    assert torch.equal(y, exact.round().clamp(limits.min, limits.max).to(out))
    spread = VENDOR.npu_quantize(x, scales[None, :, None], points[None, :, None], dtype)
    assert torch.equal(spread, y)


def factors(**changes: object) -> Arguments:
    good = {"scales": draw(4), "zero_points": draw(4), "dtype": torch.qint8, "axis": -1}
    return {"input": draw(3, 4)} | good | {"div_mode": False} | changes


@broken_cases(
    Broken("dtype", {"dtype": torch.quint4x2}, NotEmulatedError),
    Broken("dtype", {"dtype": torch.quint8}),
    Broken("dtype of input", {"input": draw(3, 4, dtype=torch.float64)}),
    Broken("dtype of scales", {"scales": draw(4, dtype=F32)}),
    Broken("dtype of zero_points", {"zero_points": draw(4, dtype=F32)}),
    Broken("shape of zero_points", {"zero_points": draw(1)}),
    Broken("shape of scales", {"scales": draw(3)}),
    Broken("shape of scales", {"scales": draw(3, 4)}, label="many"),
    Broken("dimensions of scales", {"scales": draw(1, 1, 4)}),
    Broken("axis", {"axis": -3}),
    Broken("axis", {"axis": 2}, label="beyond"),
)
def test_quantize_contract(case: Broken) -> None:
    case.check(VENDOR.npu_quantize, factors())


@broken_cases(
    Broken("dtype", {"dtype": torch.int8}),
    Broken("dtype of scales", {"scales": draw(4, dtype=HALF)}),
    Broken("dtype of zero_points", {"zero_points": draw(4, dtype=F32)}),
    Broken("axis", {"axis": 2}),
)
def test_quantize_contract_of_divisors(case: Broken) -> None:
    case.check(VENDOR.npu_quantize, factors(div_mode=True))


def swiglu(left: list[float], right: list[float]) -> list[float]:
    active = torch.tensor(left, dtype=torch.float64)
    return (active / (1 + torch.exp(-active)) * torch.tensor(right)).tolist()


COUNTS = torch.tensor([2, 0, 1])


def middle(**changes: object) -> Arguments:
    draws = torch.Generator().manual_seed(3)
    return {
        "x": torch.randint(-900, 900, (5, 12), generator=draws, dtype=torch.int32),
        "weight_scale": draw(3, 12, dtype=F32).abs() / 100,
        "activation_scale": draw(5, 1, dtype=F32, seed=1).abs(),
        "quant_scale": draw(3, 6, dtype=F32, seed=2),
        "group_index": COUNTS,
        "activate_left": True,
        "quant_mode": 1,
    } | changes


def test_dequant_swiglu_quant_in_groups() -> None:
    call = middle()
    y, scale = VENDOR.npu_dequant_swiglu_quant(**call)
    rows = []
    for row, group in ((0, 0), (1, 0), (2, 2)):
        x = call["x"][row].double() * call["weight_scale"][group].double()
        x = x * call["activation_scale"][row].double()
        out = torch.tensor(swiglu(x[:6].tolist(), x[6:].tolist())).double()
        rows.append((out * call["quant_scale"][group].double()).tolist())
    near = [in_eight_bits(row) for row in rows]
    assert (y[:3] - torch.tensor([row for row, _ in near])).abs().max() <= 1
    assert torch.allclose(scale[:3], torch.tensor([s for _, s in near]), rtol=1e-5)
    # Past the groups there is garbage.
    assert bool((y[3:] == -128).all())
    assert bool(scale[3:].isnan().all())


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    left, right = x.chunk(2, -1)
    return left, right


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_dequant_swiglu_quant_alone(mode: int, left: bool) -> None:
    x = draw(4, 8) * 4
    y, scale = VENDOR.npu_dequant_swiglu_quant(
        x,
        activate_left=left,
        quant_mode=1,
        swiglu_mode=mode,
        clamp_limit=2.0,
        glu_alpha=1.5,
        glu_bias=0.5,
    )
    values = x.double()
    first, second = (values[:, ::2], values[:, 1::2]) if mode == 1 else halves(values)
    active, linear = (first, second) if left or mode == 1 else (second, first)
    alpha, bias = (1.0, 0.0) if mode == 0 else (1.5, 0.5)
    if mode:
        active, linear = active.clamp(max=2), linear.clamp(-2, 2)
    out = active / (1 + torch.exp(-alpha * active)) * (linear + bias)
    same((y, scale), out.tolist())


@broken_cases(
    *(Broken(name, {name: torch.ones(1)}, NotEmulatedError) for name in ("bias", "quant_offset")),
    Broken("quant_mode", {"quant_mode": 0}, NotEmulatedError),
    Broken("dst_type", {"dst_type": torch.float16}, NotEmulatedError),
    Broken("round_mode", {"round_mode": 1}, NotEmulatedError),
    Broken("activate_dim", {"activate_dim": 0}, NotEmulatedError),
    Broken("swiglu_mode", {"swiglu_mode": 3}),
    Broken("dtype of x", {"x": draw(5, 12, dtype=HALF)}),
    Broken("dimensions of x", {"x": torch.zeros(5, 1, 12, dtype=torch.int32)}),
    Broken("last dimension of x", {"x": torch.zeros(5, 11, dtype=torch.int32)}),
    Broken("dtype of weight_scale", {"weight_scale": draw(3, 12)}),
    Broken("shape of weight_scale", {"weight_scale": draw(1, 12, dtype=F32)}),
    Broken("activation_scale", {"activation_scale": None}),
    Broken("activation_scale", {"x": draw(5, 12)}, label="not for bfloat16"),
    Broken("dtype of activation_scale", {"activation_scale": draw(5, 1)}),
    Broken("shape of activation_scale", {"activation_scale": draw(5, dtype=F32)}),
    Broken("dtype of quant_scale", {"quant_scale": draw(3, 6, dtype=torch.float64)}),
    Broken("shape of quant_scale", {"quant_scale": draw(3, 12, dtype=F32)}),
    Broken("dtype of group_index", {"group_index": COUNTS.int()}),
    Broken("dimensions of group_index", {"group_index": COUNTS[None]}),
    Broken("shape of group_index", {"group_index": COUNTS[:0]}),
    Broken("group_index", {"group_index": torch.tensor([2, 0, 4])}, SilentError),
    Broken("group_index", {"group_index": torch.tensor([2, -1, 1])}, SilentError, label="negative"),
)
def test_dequant_swiglu_quant_contract(case: Broken) -> None:
    case.check(VENDOR.npu_dequant_swiglu_quant, middle())


def test_dequant_swiglu_quant_has_fixed_sizes_with_groups() -> None:
    vendor: Any = EmulatedVendor(STRICT)
    with pytest.raises(RefusedError) as caught:
        vendor.npu_dequant_swiglu_quant(**middle())
    assert caught.value.rule == "half of the last dimension of x"


@pytest.mark.parametrize(
    "call",
    [
        lambda vendor, x: vendor.npu_dynamic_quant(x, dst_type=torch.int8),
        lambda vendor, x: vendor.npu_dynamic_quant(x, dst_type=1),
        lambda vendor, x: vendor.npu_dynamic_quant(x, dst_type=None),
    ],
)
def test_a_dtype_is_its_number(call: Callable[[Any, Tensor], tuple[Tensor, Tensor]]) -> None:
    x = draw(2, 8)
    assert torch.equal(call(VENDOR, x)[0], VENDOR.npu_dynamic_quant(x)[0])
