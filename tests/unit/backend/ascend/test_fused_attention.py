"""Fused attention against one row at a time."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import RELAXED, STRICT
from tests.unit.backend.ascend.attention_cases import (
    BF,
    MASK,
    Requests,
    draw,
    near,
    one_row,
    second_version,
)
from tests.unit.backend.ascend.broken import VENDORS, Arguments

VENDOR = VENDORS[RELAXED]
# (query's layout, form of keys) as published.
PLACES = [
    ("TND", "rows"),
    ("TND", "flat"),
    ("TND", "head"),
    ("BSND", "rows"),
    ("BSND", "flat"),
    ("BNSD", "rows"),
    ("BNSD", "flat"),
    ("BNSD", "head"),
    ("BSH", "rows"),
    ("BSH", "flat"),
]
BATCHES = [
    Requests((3,), (3,), seed=1),
    Requests((2,), (17,), heads=(4, 4), seed=2),
    Requests((1, 3, 2), (16, 33, 2), seed=3),
    Requests((0, 5, 2, 1), (4, 32, 0, 31), heads=(4, 1), seed=4),
    Requests((1, 1, 1), (1, 48, 15), heads=(6, 2), seed=5),
]
Sees = Callable[[int, int, int, int], bool]


def everything(request: int, i: int, j: int, keys: int) -> bool:
    return True


def check(batch: Requests, layout: str, came: tuple[Tensor, Tensor], sees: Sees) -> None:
    """Every row of every request, and NaN where there is none."""
    out, lse = came
    owned = 0
    for at in range(batch.count):
        q, k, v, rows = batch.q(at), batch.k(at), batch.v(at), batch.rows(layout, out, at)
        assert rows.shape == q.shape
        for i in range(batch.queries[at]):
            shown = [j for j in range(batch.keys[at]) if sees(at, i, j, batch.keys[at])]
            owned += rows[i].numel()
            if not shown:
                assert not rows[i].any()
                continue
            wanted, log = one_row(q[i], k[shown], v[shown], batch.scale)
            assert near(rows[i], wanted)
            if lse.numel():
                start = sum(batch.queries[:at])
                spot = lse[start + i, :, 0] if layout == "TND" else lse[at, :, i, 0]
                assert (spot - log).abs().max() < 1e-5
    assert (~out.isnan()).sum() == owned


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize(("layout", "form"), PLACES)
def test_attention_over_all_keys(batch: Requests, layout: str, form: str) -> None:
    call = batch.call(layout, form)
    wants: Arguments = call | {"softmax_lse_flag": True}
    came = VENDOR.npu_fused_infer_attention_score(**wants)
    check(batch, layout, came, everything)
    again = VENDOR.npu_fused_infer_attention_score_v2(**second_version(wants))
    for a, b in zip(came, again, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    out, lse = VENDOR.npu_fused_infer_attention_score(**call)
    assert torch.equal(out.nan_to_num(), came[0].nan_to_num())
    assert (lse.shape, lse.dtype) == ((0,), torch.float32)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize(("layout", "form"), PLACES)
def test_causal_attention(batch: Requests, layout: str, form: str) -> None:
    def sees(at: int, i: int, j: int, keys: int) -> bool:
        return j <= keys - batch.queries[at] + i

    if layout != "TND" and len(set(batch.queries)) > 1:
        batch = Requests(**{**vars(batch), "queries": (3,) * batch.count})
    call = batch.call(layout, form) | {"sparse_mode": 3, "atten_mask": MASK}
    came = VENDOR.npu_fused_infer_attention_score(**call)
    check(batch, layout, came, sees)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize(("layout", "form"), [("TND", "head"), ("BNSD", "rows")])
@pytest.mark.parametrize("reach", [(4, 0), (20, 1), (2, 5)])
def test_banded_attention(batch: Requests, layout: str, form: str, reach: tuple[int, int]) -> None:
    before, after = reach

    def sees(at: int, i: int, j: int, keys: int) -> bool:
        own = keys - batch.queries[at] + i
        return own - before <= j <= own + after

    if layout != "TND":
        batch = Requests(**{**vars(batch), "queries": (3,) * batch.count})
    call = batch.call(layout, form) | {"sparse_mode": 4, "atten_mask": MASK}
    # Rows that see nothing come out zero where that can be asked for.
    call["inner_precise"] = 0 if layout == "TND" and batch.heads[0] == batch.heads[1] else 2
    came = VENDOR.npu_fused_infer_attention_score(**call, pre_tokens=before, next_tokens=after)
    check(batch, layout, came, sees)


@pytest.mark.parametrize(("layout", "form"), [each for each in PLACES if each[0] != "TND"])
@pytest.mark.parametrize("dims", ["B1SS", "11SS", "BSS", "1SS", "SS"])
@pytest.mark.parametrize("queries", [1, 3])
def test_attention_with_a_full_mask(layout: str, form: str, dims: str, queries: int) -> None:
    batch = Requests((queries, queries), (20, 33), seed=6)
    columns = batch.table().shape[1] * batch.block if form != "rows" else 33
    lead = {"B1SS": (2, 1), "11SS": (1, 1), "BSS": (2,), "1SS": (1,), "SS": ()}[dims]
    shape: tuple[int, ...] = (*lead, queries, columns)
    if dims == "SS" and queries == 1:
        shape = (2, columns)
    hidden = draw(*shape, seed=7) > 0.5
    hidden[..., 0] = False

    def sees(at: int, i: int, j: int, keys: int) -> bool:
        if dims == "SS":
            row = hidden[at] if queries == 1 else hidden[i]
        else:
            row = hidden.view(-1, queries, columns)[at if lead[0] > 1 else 0, i]
        return not row[j]

    for mask in (hidden, hidden.to(torch.int8)):
        call = batch.call(layout, form) | {"atten_mask": mask}
        check(batch, layout, VENDOR.npu_fused_infer_attention_score(**call), sees)


def test_rows_that_see_nothing_are_undefined_unless_corrected() -> None:
    batch = Requests((2,), (5,))
    call = batch.call("BSND", "rows")
    call["atten_mask"] = torch.tensor([[True] * 5, [False] * 5])
    out = VENDOR.npu_fused_infer_attention_score(**call)[0]
    assert out[0, 0].isnan().all()
    assert not out[0, 1].isnan().any()
    out = VENDOR.npu_fused_infer_attention_score(**call, inner_precise=2)[0]
    assert not out[0, 0].any()
    band = batch.call("TND", "rows") | {"sparse_mode": 4, "atten_mask": MASK}
    band |= {"pre_tokens": -6, "next_tokens": 9}
    assert VENDOR.npu_fused_infer_attention_score(**band)[0].isnan().all()


def test_a_request_without_keys_is_zero_and_its_lse_undefined() -> None:
    batch = Requests((2, 1), (0, 3))
    call = batch.call("TND", "head") | {"sparse_mode": 3, "atten_mask": MASK}
    out, lse = VENDOR.npu_fused_infer_attention_score(**call, softmax_lse_flag=True)
    assert not out[:2].any()
    assert lse[:2].isnan().all()
    assert lse[2:].isfinite().all()


def test_more_queries_than_keys_leave_causal_rows_zero() -> None:
    batch = Requests((4,), (2,))
    call = batch.call("TND", "rows") | {"sparse_mode": 3, "atten_mask": MASK}
    out = VENDOR.npu_fused_infer_attention_score(**call)[0]
    assert not out[:2].any()
    assert out[2:].any(-1).all()


@pytest.mark.parametrize("spoilt", ["key", "value"])
def test_nan_spreads_from_visible_keys_only(spoilt: str) -> None:
    batch = Requests((3, 2), (18, 4), seed=8)
    call = batch.call("TND", "head") | {"sparse_mode": 3, "atten_mask": MASK}
    whole = VENDOR.npu_fused_infer_attention_score(**call)[0]
    page = batch.table()[0, 1]
    # The last key of the first request, which its last query alone sees.
    call[spoilt][page, :, 1] = float("nan")
    out = VENDOR.npu_fused_infer_attention_score(**call)[0]
    assert out[2].isnan().all()
    kept = [0, 1, 3, 4]
    assert torch.equal(out[kept], whole[kept])


def test_masked_keys_never_win_however_low_the_others_score() -> None:
    batch = Requests((3,), (3,), heads=(1, 1))
    call = batch.call("TND", "rows") | {"sparse_mode": 3, "atten_mask": MASK, "scale": -1e6}
    # Row 0 sees one key, its own, with a score of some -10^7.
    call["query"] = call["key"]
    out = VENDOR.npu_fused_infer_attention_score(**call)[0]
    for i in range(3):
        k, v = (each[: 1 + i] for each in (batch.k(0), batch.v(0)))
        assert torch.equal(out[i], one_row(k[i], k, v, -1e6)[0].to(BF))


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    batch = Requests((3, 1, 2), (40, 17, 33), seed=9)
    call = batch.call("TND", "head") | {"sparse_mode": 3, "atten_mask": MASK}
    whole = VENDOR.npu_fused_infer_attention_score(**call)[0]
    alone = {
        "query": call["query"][3:4].clone(),
        "actual_seq_lengths": [1],
        "actual_seq_lengths_kv": [17],
        "block_table": call["block_table"][1:2],
    }
    out = VENDOR.npu_fused_infer_attention_score(**{**call, **alone})[0]
    assert torch.equal(out, whole[3:4])


@pytest.mark.parametrize("mode", [0, 3])
def test_a_sink_joins_the_denominator(mode: int) -> None:
    batch = Requests((2, 1), (19, 6), seed=10)
    sink = draw(4, seed=11)
    call = second_version(batch.call("TND", "head")) | {"learnable_sink": sink}
    call |= {"sparse_mode": mode, "atten_mask": MASK if mode else None}
    out = VENDOR.npu_fused_infer_attention_score_v2(**call)[0]
    for at in range(2):
        rows = batch.rows("TND", out, at)
        for i in range(batch.queries[at]):
            shown = batch.keys[at] - (batch.queries[at] - 1 - i if mode else 0)
            k, v = (each[:shown] for each in (batch.k(at), batch.v(at)))
            wanted, _ = one_row(batch.q(at)[i], k, v, batch.scale, sink)
            assert near(rows[i], wanted)


@pytest.mark.parametrize(("layout", "form"), PLACES)
def test_rotated_parts_are_as_good_as_longer_heads(layout: str, form: str) -> None:
    batch = Requests((2, 2), (5, 20), heads=(4, 1), size=24, seed=12)
    whole = batch.call(layout, form) | {"sparse_mode": 3, "atten_mask": MASK}
    wanted = VENDOR.npu_fused_infer_attention_score(**whole)[0]
    call = dict(whole)
    for name in ("query", "key"):
        tensor = whole[name]
        heads = 1 if tensor.shape[-1] == 24 else tensor.shape[-1] // 24
        parts = tensor.unflatten(-1, (heads, 24)).split([16, 8], -1)
        call[name], call[f"{name}_rope"] = (each.flatten(-2).contiguous() for each in parts)
    value = whole["value"].unflatten(-1, (-1, 24))[..., :16].flatten(-2).contiguous()
    out = VENDOR.npu_fused_infer_attention_score(**call | {"value": value})[0]
    wanted = wanted.unflatten(-1, (-1, 24))[..., :16].flatten(-2)
    assert torch.equal(out.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize(
    ("batch", "layout", "form"),
    [
        (Requests((1, 4), (128, 300), heads=(8, 2), size=128, block=128), "TND", "head"),
        (Requests((1, 4), (128, 300), heads=(2, 2), size=64, block=128), "TND", "flat"),
        (Requests((4, 4), (128, 300), heads=(2, 1), size=256, block=128), "BSND", "flat"),
        (Requests((1, 1), (128, 300), heads=(4, 1), size=256, block=128), "BSH", "flat"),
    ],
    ids=str,
)
def test_attention_at_published_sizes(batch: Requests, layout: str, form: str) -> None:
    call = batch.call(layout, form)
    out = VENDORS[STRICT].npu_fused_infer_attention_score(**call)[0]
    relaxed = VENDOR.npu_fused_infer_attention_score(**call)[0]
    assert torch.equal(out, relaxed)


def test_no_tokens_at_all() -> None:
    batch = Requests((0,), (3,))
    call: Arguments = batch.call("TND", "head")
    out, lse = VENDOR.npu_fused_infer_attention_score(**call, softmax_lse_flag=True)
    assert (out.shape, lse.shape) == ((0, 4, 16), (0, 4, 1))
