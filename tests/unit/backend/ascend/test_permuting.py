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
from tests.unit.backend.ascend.broken import Arguments, Broken, broken_cases

VENDOR: Any = EmulatedVendor(RELAXED)
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
INT32 = torch.int32


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chosen(tokens: int, k: int, experts: int, seed: int = 0) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(experts, generator=draws)[:k] for _ in range(tokens)]
    return torch.stack(rows).to(INT32) if rows else torch.zeros(0, k, dtype=INT32)


def places(experts: Tensor, first: int, stop: int) -> list[int]:
    """Choices in the order of their rows."""
    flat = experts.flatten().tolist()
    return [at for e in range(first, stop) for at, own in enumerate(flat) if own == e]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8])
@pytest.mark.parametrize(("first", "stop"), [(0, 6), (0, 5), (2, 4)])
@pytest.mark.parametrize("tokens", [4, 1, 0])
def test_init_routing(tokens: int, first: int, stop: int, dtype: torch.dtype) -> None:
    x, experts, along = draw(tokens, 3).mul(50).to(dtype), chosen(tokens, 2, 6), draw(tokens)
    order = places(experts, first, stop)
    call = {"scale": along, "expert_num": 6, "expert_tokens_num_flag": True}
    if (first, stop) != (0, 6):
        call["active_expert_range"] = [first, stop]
    expanded, gather, sums, scales = VENDOR.npu_moe_init_routing_v2(x, experts, **call)
    assert expanded.shape == (tokens * 2, 3)
    assert gather.tolist() == [order.index(at) if at in order else -1 for at in range(tokens * 2)]
    counts = [experts.flatten().tolist().count(e) for e in range(first, stop)]
    assert sums.tolist() == torch.tensor(counts).cumsum(0).tolist()
    for row, at in enumerate(order):
        assert torch.equal(expanded[row], x[at // 2])
        assert scales[row] == along[at // 2]
    undefined = expanded[len(order) :]
    assert bool((undefined == -128).all() if dtype == torch.int8 else undefined.isnan().all())
    assert bool(scales[len(order) :].isnan().all())
    _, scatter, plain, _ = VENDOR.npu_moe_init_routing_v2(
        x, experts, **call | {"row_idx_type": 1, "expert_tokens_num_type": 1}
    )
    assert scatter[: len(order)].tolist() == order
    assert bool((scatter[len(order) :] == torch.iinfo(INT32).min).all())
    assert plain.tolist() == counts


def test_init_routing_leaves_out_what_is_not_asked_for() -> None:
    _, _, sums, scales = VENDOR.npu_moe_init_routing_v2(draw(2, 3), chosen(2, 2, 4), expert_num=4)
    assert (sums.shape, int(sums)) == ((), torch.iinfo(torch.int64).min)
    assert bool(scales.isnan().all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [None, 1, 3])
def test_init_routing_to_eight_bits(rows: int | None, dtype: torch.dtype) -> None:
    x, experts = draw(4, 8, dtype=dtype), chosen(4, 2, 5)
    smooth = None if rows is None else draw(rows, 8, seed=2)
    expanded, _, _, scales = VENDOR.npu_moe_init_routing_v2(
        x, experts, scale=smooth, expert_num=5, quant_mode=1, active_expert_range=[1, 4]
    )
    order = places(experts, 1, 4)
    assert expanded.dtype == torch.int8
    for row, at in enumerate(order):
        factor = torch.ones(8)
        if smooth is not None:
            factor = smooth[int(experts.flatten()[at]) - 1 if rows == 3 else 0]
        exact = x[at // 2].double() * factor.double()
        assert scales[row] == (exact.abs().max() / 127).float()
        assert torch.equal(expanded[row], (exact / scales[row].double()).round().char())
    assert bool((expanded[len(order) :] == -128).all())
    assert bool(scales[len(order) :].isnan().all())


def routed(**changes: object) -> Arguments:
    return {
        "x": draw(4, 3),
        "expert_idx": chosen(4, 2, 6),
        "scale": draw(4),
        "expert_num": 6,
        "active_num": 8,
        "active_expert_range": [1, 5],
        "expert_tokens_num_flag": True,
    } | changes


def with_expert(number: int) -> Arguments:
    experts = chosen(4, 2, 6)
    experts[1, 1] = number
    return {"expert_idx": experts}


@broken_cases(
    Broken("offset", {"offset": torch.ones(1)}, NotEmulatedError),
    Broken("x_dtype", {"x_dtype": 1}, NotEmulatedError),
    Broken("drop_pad_mode", {"drop_pad_mode": 1}, NotEmulatedError),
    Broken("quant_mode", {"quant_mode": 0}, NotEmulatedError),
    Broken("expert_tokens_num_type", {"expert_tokens_num_type": 2}, NotEmulatedError),
    Broken("row_idx_type", {"row_idx_type": 2}),
    Broken("expert_num", {"expert_num": -1}),
    Broken("expert_num", {"expert_num": 10241}, profile=STRICT, label="too many"),
    Broken("active_expert_range", {"active_expert_range": [1, 7]}),
    Broken("active_expert_range", {"active_expert_range": [3, 3]}, label="empty"),
    Broken("active_expert_range", {"active_expert_range": [-1, 3]}, label="negative"),
    Broken("active_expert_range", {"active_expert_range": [1]}, label="one number"),
    Broken("dtype of x", {"x": draw(4, 3).double()}),
    Broken("dtype of x", {"x": draw(4, 3).char(), "quant_mode": 1, "scale": None}, label="int8"),
    Broken("dimensions of x", {"x": draw(4, 1, 3)}),
    Broken("dtype of expert_idx", {"expert_idx": chosen(4, 2, 6).long()}),
    Broken("dimensions of expert_idx", {"expert_idx": chosen(4, 2, 6).flatten()}),
    Broken("rows of expert_idx", {"expert_idx": chosen(5, 2, 6)}),
    Broken("active_num", {"active_num": 7}),
    Broken("active_num", {"active_num": 0}, label="none"),
    Broken("dtype of scale", {"scale": draw(4).half()}),
    Broken("shape of scale", {"scale": draw(8)}),
    Broken("shape of scale", {"scale": draw(3, 3), "quant_mode": 1}, label="of experts"),
    Broken("dimensions of scale", {"scale": draw(4), "quant_mode": 1}),
    Broken("range of expert_idx", with_expert(6), SilentError),
    Broken("range of expert_idx", with_expert(-1), SilentError, label="-1"),
)
def test_init_routing_contract(case: Broken) -> None:
    case.check(EmulatedVendor(case.profile).npu_moe_init_routing_v2, routed())


def near(came: Tensor, wanted: Tensor) -> None:
    eps = torch.finfo(came.dtype).eps
    assert ((came.double() - wanted).abs() <= eps * wanted.abs() + 1e-12).all()


def shuffled(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(5)).to(INT32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weigh", [None, *FLOATS])
@pytest.mark.parametrize("tokens", [4, 0])
def test_token_unpermute(tokens: int, weigh: torch.dtype | None, dtype: torch.dtype) -> None:
    k = 1 if weigh is None else 3
    rows, order = draw(tokens * k, 5, dtype=dtype), shuffled(tokens * k)
    probs = None if weigh is None else draw(tokens, k, dtype=weigh, seed=1)
    out = VENDOR.npu_moe_token_unpermute(rows, order, probs)
    assert (tuple(out.shape), out.dtype) == ((tokens, 5), dtype)
    for token in range(tokens):
        wanted = torch.zeros(5, dtype=torch.float64)
        for j in range(k):
            weight = 1.0 if probs is None else float(probs[token, j])
            wanted += rows[int(order[token * k + j])].double() * weight
        near(out[token], wanted)


def test_garbage_stays_in_the_token_that_it_belongs_to() -> None:
    rows, order = draw(6, 5), shuffled(6)
    rows[2] = torch.nan
    out = VENDOR.npu_moe_token_unpermute(rows, order, torch.zeros(3, 2))
    owner = order.tolist().index(2) // 2
    assert out.isnan().any(1).tolist() == [token == owner for token in range(3)]


def with_row(at: int, row: int) -> Tensor:
    order = shuffled(8)
    order[at] = row
    return order


@broken_cases(
    Broken("padded_mode", {"padded_mode": True}, NotEmulatedError),
    Broken("restore_shape", {"restore_shape": [4, 5]}, NotEmulatedError),
    Broken("dtype of permuted_tokens", {"permuted_tokens": draw(8, 5).double()}),
    Broken("dimensions of permuted_tokens", {"permuted_tokens": draw(8, 1, 5)}),
    Broken("dtype of sorted_indices", {"sorted_indices": shuffled(8).long()}),
    Broken("shape of sorted_indices", {"sorted_indices": shuffled(7)}),
    Broken("dtype of probs", {"probs": draw(4, 2).double()}),
    Broken("dimensions of probs", {"probs": draw(8)}),
    Broken("shape of probs", {"probs": draw(3, 2)}),
    Broken(
        "choices of a token",
        {"permuted_tokens": draw(513, 5), "sorted_indices": shuffled(513), "probs": draw(1, 513)},
        profile=STRICT,
    ),
    Broken("range of sorted_indices", {"sorted_indices": with_row(0, 8)}, SilentError),
    Broken("range of sorted_indices", {"sorted_indices": with_row(0, -1)}, SilentError, label="-1"),
    Broken(
        "repeats in sorted_indices",
        {"sorted_indices": with_row(0, int(shuffled(8)[1]))},
        SilentError,
    ),
)
def test_token_unpermute_contract(case: Broken) -> None:
    call = {"permuted_tokens": draw(8, 5), "sorted_indices": shuffled(8), "probs": draw(4, 2)}
    case.check(EmulatedVendor(case.profile).npu_moe_token_unpermute, call)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", [0, 2])
@pytest.mark.parametrize("extras", ["all", "none", "skip1"])
def test_finalize_routing(extras: str, mode: int, dtype: torch.dtype) -> None:
    tokens, k, experts = 4, 3, 5
    rows, order = draw(tokens * k, 6, dtype=dtype), shuffled(tokens * k)
    ids = chosen(tokens, k, experts)
    skip1 = None if extras == "none" else draw(tokens, 6, dtype=dtype, seed=1)
    skip2, bias, scales = (
        draw(*shape, dtype=dtype, seed=2 + at) if extras == "all" else None
        for at, shape in enumerate([(tokens, 6), (experts, 6), (tokens, k)])
    )
    out = VENDOR.npu_moe_finalize_routing(
        rows, skip1, skip2, bias, scales, order, ids, drop_pad_mode=mode, k=k
    )
    assert out.dtype == dtype
    for token in range(tokens):
        wanted = torch.zeros(6, dtype=torch.float64)
        for skip in (skip1, skip2):
            wanted += 0 if skip is None else skip[token].double()
        for j in range(k):
            at = token + j * tokens if mode == 0 else token * k + j
            row = rows[int(order[at])].double()
            row = row if bias is None else row + bias[int(ids[token, j])].double()
            wanted += row * (1.0 if scales is None else float(scales[token, j]))
        near(out[token], wanted)


def final(**changes: object) -> Arguments:
    names = ("skip1", "skip2", "bias", "scales")
    shapes = [(4, 5), (4, 5), (6, 5), (4, 2)]
    floats = {name: draw(*shape) for name, shape in zip(names, shapes, strict=True)}
    order = {"expanded_src_to_dst_row": shuffled(8), "export_for_source_row": chosen(4, 2, 6)}
    return {"expanded_permuted_rows": draw(8, 5)} | floats | order | changes


@broken_cases(
    Broken("drop_pad_mode", {"drop_pad_mode": 4}),
    Broken("drop_pad_mode", {"drop_pad_mode": 3}, NotEmulatedError),
    Broken("dtype of rows", {"expanded_permuted_rows": draw(8, 5).double()}),
    Broken("dimensions of rows", {"expanded_permuted_rows": draw(2, 4, 5)}),
    Broken("dtype of expanded_src_to_dst_row", {"expanded_src_to_dst_row": shuffled(8).long()}),
    Broken("shape of expanded_src_to_dst_row", {"expanded_src_to_dst_row": shuffled(7)}),
    Broken("choices of a token", {"scales": None, "k": 3}),
    Broken("choices of a token", {"scales": None, "k": None}, label="unknown"),
    *(
        Broken(f"dtype of {name}", {name: draw(4, size).half()})
        for name, size in (("skip1", 5), ("skip2", 5), ("bias", 5), ("scales", 2))
    ),
    *(
        Broken(f"shape of {name}", {name: draw(3, size)})
        for name, size in (("skip1", 5), ("skip2", 5), ("bias", 4), ("scales", 2))
    ),
    Broken("skip1", {"skip1": None}),
    Broken(
        "range of expanded_src_to_dst_row", {"expanded_src_to_dst_row": with_row(0, 8)}, SilentError
    ),
    Broken(
        "range of expanded_src_to_dst_row",
        {"expanded_src_to_dst_row": with_row(0, -1)},
        SilentError,
        label="-1",
    ),
    Broken("export_for_source_row", {"export_for_source_row": None}),
    Broken("dtype of export_for_source_row", {"export_for_source_row": chosen(4, 2, 6).long()}),
    Broken("shape of export_for_source_row", {"export_for_source_row": chosen(3, 2, 6)}),
    Broken(
        "range of export_for_source_row",
        {"export_for_source_row": torch.full((4, 2), 6, dtype=INT32)},
        SilentError,
    ),
)
def test_finalize_routing_contract(case: Broken) -> None:
    case.check(VENDOR.npu_moe_finalize_routing, final())


def test_an_expert_of_its_own_takes_padding_aside() -> None:
    """Routing, products and the way back, with a padded token."""
    x, weight = draw(3, 4), draw(2, 4, 4, seed=1)
    experts = torch.tensor([[0, 1], [1, 0], [2, 2]], dtype=INT32)
    rows, order, counts, _ = VENDOR.npu_moe_init_routing_v2(
        x, experts, expert_num=3, expert_tokens_num_flag=True, expert_tokens_num_type=1
    )
    (y,) = VENDOR.npu_grouped_matmul(
        [rows], [weight], group_list=counts[:2], group_type=0, group_list_type=1, split_item=2
    )
    out = VENDOR.npu_moe_token_unpermute(y, order, torch.full((3, 2), 0.5))
    wanted = (x[:2, None, None].double() @ weight.double()).sum((1, 2)) / 2
    near(out[:2], wanted)
    assert bool(out[2].isnan().all())
