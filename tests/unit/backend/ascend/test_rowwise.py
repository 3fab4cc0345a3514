"""Norms, rotations and activations."""

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import (
    RELAXED,
    STRICT,
    NotEmulatedError,
    SilentError,
)
from tests.unit.backend.ascend.broken import VENDORS, Arguments, Broken, broken_cases

VENDOR = VENDORS[RELAXED]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(came: Tensor, wanted: Tensor) -> None:
    """Equal but for the last bit, which a formula in float64 may tip."""
    steps = torch.finfo(came.dtype).eps * wanted.abs() + torch.finfo(came.dtype).smallest_normal
    assert ((came.double() - wanted).abs() <= steps).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5,), (0, 5), (3, 5), (2, 3, 5), (2, 3, 5, 4)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    normed = shape[-2:] if len(shape) == 4 else shape[-1:]
    x, gamma = draw(*shape, dtype=dtype), draw(*normed, dtype=dtype, seed=1)
    dims = list(range(len(shape) - len(normed), len(shape)))
    root = (x.double().pow(2).mean(dims, keepdim=True) + 1e-3).sqrt()
    y, rstd = VENDOR.npu_rms_norm(x, gamma, epsilon=1e-3)
    close(y, x.double() / root * gamma.double())
    close(rstd, 1 / root)
    y, rstd = VENDOR.npu_gemma_rms_norm(x, gamma, 1e-3)
    close(y, x.double() / root * (1 + gamma.double()))
    close(rstd, 1 / root)
    y, _ = VENDOR.npu_rms_norm(x, gamma.float(), epsilon=1e-3)
    close(y, x.double() / root * gamma.double())


@pytest.mark.parametrize("dtype", FLOATS)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    a, b, gamma = (
        draw(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(4, 6)] * 2 + [(6,)])
    )
    total = (a.double() + b.double()).to(dtype)
    y, rstd, summed = VENDOR.npu_add_rms_norm(a, b, gamma)
    again, rstd_again = VENDOR.npu_rms_norm(summed, gamma)
    close(summed, total.double())
    assert torch.equal(y, again)
    assert torch.equal(rstd, rstd_again)


def test_a_norm_keeps_rows_apart() -> None:
    x, gamma = draw(4, 64), draw(64, seed=1)
    whole = VENDOR.npu_rms_norm(x, gamma)[0]
    x[1] = float("nan")
    spoilt = VENDOR.npu_rms_norm(x, gamma)[0]
    assert spoilt[1].isnan().all()
    assert torch.equal(spoilt[[0, 2, 3]], whole[[0, 2, 3]])


def norm() -> Arguments:
    return {"input": draw(3, 8, dtype=torch.bfloat16), "gamma": draw(8, dtype=torch.bfloat16)}


NORM_CASES = [
    Broken("dtype of input", {"input": torch.zeros(3, 8, dtype=torch.float64)}),
    Broken("dimensions of input", {"input": torch.zeros(())}),
    Broken("dimensions of gamma", {"gamma": torch.zeros(1, 1, 8, dtype=torch.bfloat16)}),
    Broken("dimensions of gamma", {"gamma": torch.zeros(())}, label="none"),
    Broken("shape of gamma", {"gamma": torch.zeros(7, dtype=torch.bfloat16)}),
]


@broken_cases(
    *NORM_CASES,
    Broken("dtype of gamma", {"gamma": torch.zeros(8, dtype=torch.float16)}),
    Broken(
        "dtype of gamma",
        {"input": draw(3, 8), "gamma": draw(8, dtype=torch.bfloat16)},
        label="narrower than input",
    ),
)
def test_rms_norm_contract(case: Broken) -> None:
    case.check(VENDOR.npu_rms_norm, norm())


@broken_cases(
    *NORM_CASES,
    Broken("dtype of gamma", {"gamma": draw(8)}),
)
def test_gemma_rms_norm_contract(case: Broken) -> None:
    case.check(VENDOR.npu_gemma_rms_norm, norm())


@broken_cases(
    Broken("dtype of input", {"x1": torch.zeros(3, 8, dtype=torch.float64)}),
    Broken("shape of x2", {"x2": torch.zeros(1, 8)}),
    Broken("dtype of x2", {"x2": torch.zeros(3, 8, dtype=torch.bfloat16)}),
    Broken("dtype of gamma", {"gamma": torch.zeros(8, dtype=torch.bfloat16)}),
    Broken("shape of gamma", {"gamma": torch.zeros(3)}),
)
def test_add_rms_norm_contract(case: Broken) -> None:
    case.check(VENDOR.npu_add_rms_norm, {"x1": draw(3, 8), "x2": draw(3, 8), "gamma": draw(8)})


def turn(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """Pairs as complex numbers, one at a time."""
    half = x.shape[-1] // 2
    x, cos, sin = x.double(), cos.double().expand(x.shape), sin.double().expand(x.shape)
    out = torch.empty_like(x)
    for at in range(half):
        a, b = (2 * at, 2 * at + 1) if neighbours else (at, at + half)
        out[..., a] = x[..., a] * cos[..., a] - x[..., b] * sin[..., a]
        out[..., b] = x[..., b] * cos[..., b] + x[..., a] * sin[..., b]
    return out


def angles(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    turned = draw(*shape, seed=4)
    return turned.cos().to(dtype), turned.sin().to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize(
    ("shape", "spread"),
    [
        ((5, 3, 8), (5, 1, 8)),
        ((0, 3, 8), (0, 1, 8)),
        ((2, 3, 5, 8), (1, 1, 5, 8)),
        ((2, 5, 3, 8), (1, 5, 1, 8)),
        ((5, 2, 3, 8), (5, 1, 1, 8)),
    ],
)
def test_rotary_mul(
    dtype: torch.dtype, mode: str, shape: tuple[int, ...], spread: tuple[int, ...]
) -> None:
    x = draw(*shape, dtype=dtype)
    cos, sin = angles(*spread, dtype=dtype)
    came = VENDOR.npu_rotary_mul(x, cos, sin, mode)
    wanted = turn(x, cos, sin, mode == "interleave")
    scale = torch.finfo(dtype).eps * (x.double().abs().max() if x.numel() else 1)
    assert came.dtype == dtype
    assert ((came.double() - wanted).abs() <= scale).all()


@pytest.mark.parametrize("spread", [(5, 3, 8), (2, 1, 5, 8), (2, 5, 1, 8), (2, 3, 5, 8)])
def test_halves_allow_angles_of_their_own_for_each_row(spread: tuple[int, ...]) -> None:
    x = draw(5, 3, 8) if len(spread) == 3 else draw(2, 5, 5, 8)[:, : max(spread[1], 3)]
    if spread == (2, 5, 1, 8):
        x = draw(2, 5, 3, 8)
    cos, sin = angles(*spread)
    came = VENDOR.npu_rotary_mul(x, cos, sin)
    assert (came - turn(x, cos, sin, False)).abs().max() < 1e-6


COS, SIN = angles(5, 1, 8)
ROTARY: Arguments = {"input": draw(5, 3, 8), "r1": COS, "r2": SIN}
BIG = draw(5, 3, 896)


@broken_cases(
    Broken("rotate", {"rotate": torch.eye(8)}, NotEmulatedError),
    Broken("dtype of input", {"input": torch.zeros(5, 3, 8, dtype=torch.int32)}),
    Broken("dimensions of input", {"input": torch.zeros(5, 8)}),
    Broken("D of input", {"input": torch.zeros(5, 3, 7)}),
    Broken("D of input", {"input": BIG}, profile=STRICT, label="big"),
    Broken("rotary_mode", {"rotary_mode": "quarter"}),
    Broken("dtype of r1", {"r1": torch.zeros(5, 1, 8, dtype=torch.bfloat16)}),
    Broken("dimensions of r1", {"r1": torch.zeros(5, 8)}),
    Broken("D of r1", {"r1": torch.zeros(5, 1, 4)}),
    Broken("shape of r1", {"r1": torch.zeros(1, 1, 8)}),
    Broken("shape of r1", {"r1": torch.zeros(4, 1, 8)}, label="another T"),
    Broken(
        "shape of r1",
        {"rotary_mode": "interleave", "r1": torch.zeros(5, 3, 8), "r2": torch.zeros(5, 3, 8)},
        label="interleave",
    ),
    Broken("dtype of r2", {"r2": torch.zeros(5, 1, 8, dtype=torch.bfloat16)}),
    Broken("shape of r2", {"r2": torch.zeros(5, 3, 8)}),
    Broken("values of r1", {"r1": torch.full((5, 1, 8), 1.25)}, SilentError),
    Broken("values of r2", {"r2": torch.full((5, 1, 8), -1.25)}, SilentError),
)
def test_rotary_mul_contract(case: Broken) -> None:
    case.check(VENDORS[case.profile].npu_rotary_mul, ROTARY)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 3])
def test_interleave_rope(dtype: torch.dtype, length: int) -> None:
    x = draw(2, 3, 3, 64, dtype=dtype)
    cos, sin = angles(2, 1, length, 64, dtype=dtype)
    came = VENDORS[STRICT].npu_interleave_rope(x, cos, sin)
    # As halves the pairs are (x0, x1), (x2, x3), ...: the first of each, then the second.
    firsts, seconds = x[..., 0::2], x[..., 1::2]
    wanted = turn(torch.cat([firsts, seconds], -1), cos, sin, False)
    assert ((came.double() - wanted).abs() <= torch.finfo(dtype).eps * 4).all()


HALF = torch.zeros(2, 3, 5, 64, dtype=torch.float16)
ANGLE = torch.zeros(2, 1, 5, 64, dtype=torch.float16)


@broken_cases(
    Broken("dtype of x", {"x": HALF.float()}),
    Broken("dimensions of x", {"x": HALF[0]}),
    Broken("x contiguous", {"x": HALF.transpose(1, 2)}),
    Broken("cos contiguous", {"cos": ANGLE.expand(2, 3, 5, 64)}),
    Broken("sin contiguous", {"sin": ANGLE.mT}),
    Broken("D of x", {"x": torch.zeros(2, 3, 5, 32, dtype=torch.float16)}),
    Broken("D of x", {"x": torch.zeros(2, 3, 5, 7, dtype=torch.float16)}, label="odd"),
    Broken("dtype of cos", {"cos": ANGLE.bfloat16()}),
    Broken("dimensions of cos", {"cos": ANGLE[0]}),
    Broken("S of cos", {"cos": ANGLE[:, :, :2].clone()}),
    Broken("shape of cos", {"cos": HALF}),
    Broken("dtype of sin", {"sin": ANGLE.bfloat16()}),
    Broken("S of sin", {"sin": ANGLE[:, :, :2].clone()}),
    Broken("shape of sin", {"sin": ANGLE[:, :, :1].clone()}),
)
def test_interleave_rope_contract(case: Broken) -> None:
    case.check(VENDORS[STRICT].npu_interleave_rope, {"x": HALF, "cos": ANGLE, "sin": ANGLE})


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "dim"), [((3, 8), -1), ((0, 8), -1), ((4, 3), 0), ((2, 6, 3), 1)]
)
def test_swiglu(dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    x = draw(*shape, dtype=dtype)
    half = shape[dim] // 2
    gate, up = x.double().narrow(dim, 0, half), x.double().narrow(dim, half, half)
    close(VENDOR.npu_swiglu(x, dim), gate / (1 + (-gate).exp()) * up)


@broken_cases(
    Broken("dtype of input", {"input": torch.zeros(3, 8, dtype=torch.int8)}),
    Broken("dimensions of input", {"input": torch.zeros(())}),
    Broken("dim", {"dim": 2}),
    Broken("size along dim", {"dim": 0}),
)
def test_swiglu_contract(case: Broken) -> None:
    case.check(VENDOR.npu_swiglu, {"input": torch.zeros(3, 8)})
