from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import (
    RELAXED,
    STRICT,
    EmulatedVendor,
    NotEmulatedError,
    SilentError,
)
from surefoot.backend.ascend.emulate.products import GROUPED_KINDS, MATMUL_KINDS, Kind
from tests.unit.backend.ascend.broken import Arguments, Broken, broken_cases

VENDOR: Any = EmulatedVendor(RELAXED)
BF, HALF, F32, INT8, INT32 = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int8,
    torch.int32,
)


def ints(*shape: int, seed: int = 0, bits: int = 8, dtype: torch.dtype = INT8) -> Tensor:
    most = 2 ** (bits - 1)
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most, shape, generator=draws).to(dtype)


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(came: Tensor, wanted: Tensor) -> None:
    """Equal but for the last bit."""
    step = torch.finfo(came.dtype).eps * wanted.abs() + torch.finfo(came.dtype).smallest_normal
    assert ((came.double() - wanted).abs() <= step).all()


def summed(x1: Tensor, x2: Tensor) -> Tensor:
    """Products of integers in 64 bits, one sum at a time."""
    rows = x1.long().reshape(-1, x1.shape[-1])
    sums = torch.stack([(rows * column).sum(-1) for column in x2.long().t()], -1)
    return sums.view(*x1.shape[:-1], -1)


@pytest.mark.parametrize("lead", [(3,), (1,), (2, 3)])
@pytest.mark.parametrize("kind", MATMUL_KINDS, ids=str)
def test_quant_matmul(kind: Kind, lead: tuple[int, ...]) -> None:
    x1, x2 = ints(*lead, 16), ints(5, 16, seed=1).t()
    tokens = draw(lead[-1], seed=2) if kind.per_token else None
    for number, dtype in enumerate([None, *kind.bias]):
        for scale in (draw(5, dtype=kind.scale[-1], seed=3), draw(1, dtype=kind.scale[0], seed=3)):
            bias = None
            if dtype is not None:
                bias = ints(5, bits=12, dtype=dtype) if dtype == INT32 else draw(5, dtype=dtype)
            came = VENDOR.npu_quant_matmul(
                x1,
                x2,
                scale,
                bias=bias,
                pertoken_scale=tokens,
                output_dtype=None if kind.out == INT8 and number else kind.out,
            )
            exact = summed(x1, x2)
            if bias is not None and dtype == INT32:
                exact = exact + bias.long()
            assert came.dtype == kind.out
            if kind.out == INT32:
                assert torch.equal(came.long(), exact)
                continue
            exact = exact.double() * scale.double()
            exact = exact if tokens is None else exact * tokens.double()[:, None]
            exact = exact if bias is None or dtype == INT32 else exact + bias.double()
            if kind.out == INT8:
                assert torch.equal(came, exact.round().clamp(-128, 127).char())
            else:
                close(came, exact)


def test_quant_matmul_is_exact_at_the_widest() -> None:
    x1, x2 = torch.full((1, 65535), -128, dtype=INT8), torch.full((65535, 1), -128, dtype=INT8)
    came = EmulatedVendor(STRICT).npu_quant_matmul(x1, x2, torch.ones(1), output_dtype=3)
    assert came.tolist() == [[128 * 128 * 65535]]


def test_quant_matmul_adds_an_offset_before_it_rounds() -> None:
    x1, x2 = ints(2, 4), ints(4, 3, seed=1)
    scale, offset = draw(3).abs() / 500, draw(3, seed=2)
    came = VENDOR.npu_quant_matmul(x1, x2, scale, offset=offset)
    wanted = summed(x1, x2) * scale.double() + offset.double()
    assert torch.equal(came, wanted.round().clamp(-128, 127).char())


def good(**changes: object) -> Arguments:
    return {
        "x1": ints(3, 8),
        "x2": ints(8, 4),
        "scale": draw(4),
        "pertoken_scale": draw(3),
        "bias": draw(4),
        "output_dtype": BF,
    } | changes


@broken_cases(
    *(
        Broken(name, {name: value}, NotEmulatedError)
        for name, value in {
            "x1_dtype": 1,
            "x2_dtype": 1,
            "pertoken_scale_dtype": 6,
            "scale_dtype": 6,
            "group_sizes": [1, 1, 128],
            "y_scale": torch.ones(1),
        }.items()
    ),
    Broken("dtype of x1", {"x1": ints(3, 8, dtype=INT32)}, NotEmulatedError),
    Broken("dtype of x2", {"x2": ints(8, 4, dtype=torch.uint8)}),
    Broken("dimensions of x1", {"x1": ints(8)}),
    Broken("x1 not empty", {"x1": ints(0, 8), "pertoken_scale": draw(0)}),
    Broken("x2 not empty", {"x2": ints(8, 0), "bias": draw(0), "scale": draw(1)}),
    Broken("dimensions of x2", {"x2": ints(1, 8, 4)}, NotEmulatedError),
    Broken("k dim of x1 and x2", {"x2": ints(7, 4)}),
    Broken("output_dtype", {"output_dtype": F32}),
    Broken("scale per token", {"output_dtype": None, "bias": None}, label="for int8"),
    Broken("scale per token", {"output_dtype": INT32, "bias": None}, label="for int32"),
    Broken("dtype of scale", {"scale": draw(4, dtype=HALF)}),
    Broken("dtype of scale", {"scale": torch.ones(4).long()}, NotEmulatedError),
    Broken("dtype of scale", {"scale": draw(4, dtype=BF), "output_dtype": HALF}, label="bf16"),
    Broken("dtype of bias", {"bias": draw(4, dtype=HALF)}),
    Broken("dtype of bias", {"bias": draw(4, dtype=BF), "output_dtype": HALF}, label="bf16"),
    Broken("dtype of scale per token", {"pertoken_scale": draw(3, dtype=BF)}),
    Broken("shape of scale", {"scale": draw(3)}),
    Broken("dimensions of scale", {"scale": draw(1, 4)}),
    Broken("shape of bias", {"bias": draw(1)}),
    Broken("shape of pertoken_scale", {"pertoken_scale": draw(3, 1)}),
    Broken("offset", {"offset": draw(4)}),
    Broken(
        "dtype of offset",
        {"offset": ints(4), "output_dtype": None, "pertoken_scale": None, "bias": None},
    ),
    Broken(
        "shape of offset",
        {"offset": draw(3), "output_dtype": None, "pertoken_scale": None, "bias": None},
    ),
    Broken(
        "last dimension of x1",
        {"x1": ints(3, 65536), "x2": ints(65536, 4)},
        profile=STRICT,
    ),
    Broken("range of sums", {"bias": torch.tensor([2**31 - 1, 0, 0, 0], dtype=INT32)}, SilentError),
)
def test_quant_matmul_contract(case: Broken) -> None:
    call = good(x1=ints(3, 8).abs().clamp(1), x2=ints(8, 4).abs().clamp(1))
    case.check(EmulatedVendor(case.profile).npu_quant_matmul, call)


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0], [5, 0, 0], [1, 1, 1], [0, 0, 7]])
@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("dtype", [F32, HALF, BF])
def test_grouped_matmul(dtype: torch.dtype, form: int, counts: list[int]) -> None:
    x, weight = draw(7, 6, dtype=dtype), draw(3, 4, 6, dtype=dtype, seed=1).mT
    bias = draw(3, 4, dtype=F32 if dtype == BF else dtype, seed=2)
    groups = torch.tensor(counts) if form else torch.tensor(counts).cumsum(0)
    for own in (None, [bias]):
        (y,) = VENDOR.npu_grouped_matmul(
            [x],
            [weight],
            bias=own,
            group_list=groups,
            group_type=0,
            group_list_type=form,
            split_item=2,
        )
        assert (tuple(y.shape), y.dtype) == ((7, 4), dtype)
        row = 0
        for group, count in enumerate(counts):
            for _ in range(count):
                exact = (x[row].double()[:, None] * weight[group].double()).sum(0)
                close(y[row], exact if own is None else exact + bias[group].double())
                row += 1
        assert bool(y[row:].isnan().all())


@pytest.mark.parametrize("kind", GROUPED_KINDS, ids=str)
def test_grouped_matmul_of_eight_bits(kind: Kind) -> None:
    x, weight = ints(5, 16), ints(2, 16, 3, seed=1)
    scale = draw(2, 3, dtype=kind.scale[0], seed=2)
    bias = ints(2, 3, bits=14, dtype=INT32, seed=3)
    tokens = draw(5, seed=4) if kind.per_token else None
    (y,) = VENDOR.npu_grouped_matmul(
        [x],
        [weight],
        bias=[bias],
        scale=[scale],
        per_token_scale=None if tokens is None else [tokens],
        group_list=torch.tensor([1, 4]),
        group_type=0,
        group_list_type=0,
        split_item=3,
        output_dtype=kind.out,
    )
    for row, group in enumerate([0, 1, 1, 1]):
        exact = summed(x[row], weight[group]) + bias[group].long()
        exact = exact.double() * scale[group].double()
        close(y[row], exact if tokens is None else exact * tokens[row].double())
    assert bool(y[4].isnan().all())


def groups(**changes: object) -> Arguments:
    return {
        "x": [ints(5, 8)],
        "weight": [ints(3, 8, 4, seed=1)],
        "scale": [draw(3, 4, dtype=BF)],
        "per_token_scale": [draw(5)],
        "bias": [ints(3, 4, bits=9, dtype=INT32)],
        "group_list": torch.tensor([2, 2, 5]),
        "group_type": 0,
        "split_item": 2,
        "output_dtype": BF,
    } | changes


COUNTS: Arguments = {"group_list_type": 1}


@broken_cases(
    *(
        Broken(name, {name: [torch.ones(1)]}, NotEmulatedError)
        for name in (
            "offset",
            "antiquant_scale",
            "antiquant_offset",
            "activation_input",
            "activation_quant_scale",
            "activation_quant_offset",
        )
    ),
    Broken("tuning_config", {"tuning_config": [1]}, NotEmulatedError),
    *(
        Broken(name, {name: 1}, NotEmulatedError)
        for name in ("x_dtype", "weight_dtype", "scale_dtype", "per_token_scale_dtype", "act_type")
    ),
    Broken("group_type", {"group_type": None}),
    Broken("group_type", {"group_type": 2}, NotEmulatedError),
    Broken("split_item", {"split_item": 0}, NotEmulatedError),
    Broken("count of x", {"x": [ints(2, 8), ints(3, 8)]}, NotEmulatedError),
    Broken("count of weight", {"weight": [ints(8, 4)] * 3}, NotEmulatedError),
    Broken("count of scale", {"scale": []}, NotEmulatedError),
    Broken("dtype of x", {"x": [ints(5, 8, dtype=torch.int16)]}),
    Broken("dimensions of x", {"x": [ints(5, 1, 8)]}),
    Broken("x contiguous", {"x": [ints(8, 5).t()]}),
    Broken("dimensions of weight", {"weight": [ints(8, 4)]}, NotEmulatedError),
    Broken("dtype of weight", {"weight": [draw(3, 8, 4)]}),
    Broken("shape of weight", {"weight": [ints(3, 7, 4)]}),
    Broken("scale", {"scale": None}),
    Broken("output_dtype", {"output_dtype": None}),
    Broken("dtype of scale", {"scale": [draw(3, 4)]}),
    Broken("dtype of scale", {"scale": [torch.ones(3, 4).long()]}, NotEmulatedError),
    Broken("dtype of scale per token", {"per_token_scale": [draw(5, dtype=BF)]}),
    Broken("dtype of bias", {"bias": [draw(3, 4)]}),
    Broken("shape of bias", {"bias": [ints(4, dtype=INT32)]}),
    Broken("shape of scale", {"scale": [draw(4, dtype=BF)]}),
    Broken("shape of per_token_scale", {"per_token_scale": [draw(5, 1)]}),
    Broken("group_list", {"group_list": None}),
    Broken("group_list_type", {"group_list_type": 3}),
    Broken("group_list_type", {"group_list_type": 2}, NotEmulatedError),
    Broken("dtype of group_list", {"group_list": torch.tensor([2, 2, 5], dtype=INT32)}),
    Broken("shape of group_list", {"group_list": torch.tensor([2, 5])}),
    Broken("group_list", {"group_list": torch.tensor([2, 1, 5])}, SilentError, label="falling"),
    Broken("group_list", {"group_list": torch.tensor([2, 2, 6])}, SilentError, label="too many"),
    Broken("group_list", COUNTS, SilentError, label="counts"),
    Broken(
        "group_list",
        COUNTS | {"group_list": torch.tensor([2, -1, 3])},
        SilentError,
        label="negative",
    ),
    Broken(
        "one group",
        COUNTS
        | {
            "weight": [ints(1, 8, 4)],
            "scale": [draw(1, 4, dtype=BF)],
            "bias": None,
            "group_list": torch.tensor([2]),
        },
    ),
    Broken("sides of weight", {"weight": [ints(3, 8, 65536)]}, profile=STRICT),
    Broken(
        "range of sums",
        {"bias": [torch.full((3, 4), 2**31 - 1, dtype=INT32)], "x": [ints(5, 8).abs().clamp(1)]},
        SilentError,
    ),
)
def test_grouped_matmul_contract(case: Broken) -> None:
    weight = ints(3, 8, 4, seed=1).abs().clamp(1)
    case.check(EmulatedVendor(case.profile).npu_grouped_matmul, groups(weight=[weight]))


@broken_cases(
    Broken("scale", {"scale": [draw(3, 4)]}),
    Broken("scale per token", {"per_token_scale": [draw(5)]}),
    Broken("output_dtype", {"output_dtype": F32}),
    Broken("dtype of bias", {"bias": [draw(3, 4, dtype=BF)]}),
)
def test_grouped_matmul_contract_of_floats(case: Broken) -> None:
    floats = {"x": [draw(5, 8, dtype=BF)], "weight": [draw(3, 8, 4, dtype=BF)]}
    plain = {"scale": None, "per_token_scale": None, "bias": [draw(3, 4)]}
    case.check(VENDOR.npu_grouped_matmul, groups(**floats, **plain))
