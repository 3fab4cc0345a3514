"""Each rule of fused attention, broken once."""

import pytest
import torch

from surefoot.backend.ascend.emulate import (
    RELAXED,
    STRICT,
    NotEmulatedError,
    SilentError,
)
from tests.unit.backend.ascend.attention_cases import BF, MASK, Requests, draw
from tests.unit.backend.ascend.broken import VENDORS, Arguments, Broken, broken_cases

BATCH = Requests((2, 1), (17, 5))


def clear(*shape: int) -> torch.Tensor:
    """A mask that hides nothing."""
    return torch.zeros(*shape, dtype=torch.bool)


ONE = torch.ones(1)
LENGTHS = "actual_seq_lengths"
KEYS = "actual_seq_lengths_kv"


def first(case: Broken, layout: str, form: str, batch: Requests = BATCH, **more: object) -> None:
    """Check a case against a call of the first version."""
    call = batch.call(layout, form) | more
    case.check(VENDORS[case.profile].npu_fused_infer_attention_score, call)


TENSORS = (
    "pse_shift",
    "dequant_scale1",
    "quant_scale1",
    "dequant_scale2",
    "quant_scale2",
    "quant_offset2",
    "antiquant_scale",
    "antiquant_offset",
    "key_antiquant_scale",
    "key_antiquant_offset",
    "value_antiquant_scale",
    "value_antiquant_offset",
    "query_padding_size",
    "kv_padding_size",
    "key_shared_prefix",
    "value_shared_prefix",
    "key_rope_antiquant_scale",
)


@broken_cases(
    *(Broken(name, {name: ONE}, NotEmulatedError) for name in TENSORS),
    Broken("actual_shared_prefix_len", {"actual_shared_prefix_len": [1]}, NotEmulatedError),
    *(
        Broken("antiquant modes", {name: 1}, NotEmulatedError, label=name)
        for name in ("antiquant_mode", "key_antiquant_mode", "value_antiquant_mode")
    ),
    Broken("inner_precise", {"inner_precise": 4}),
    Broken("query_rope and key_rope", {"query_rope": ONE}),
    Broken("query_rope and key_rope", {"key_rope": ONE}, label="key"),
    Broken("input_layout", {"input_layout": "NTD"}, NotEmulatedError),
    Broken("input_layout", {"input_layout": "DNT"}, label="unknown"),
    Broken("dimensions of query", {"query": draw(3, 64)}),
    Broken("dtype of query", lambda call: {"query": call["query"].float()}),
    Broken("dtype of key", lambda call: {"key": call["key"].half()}),
    Broken("dtype of value", lambda call: {"value": call["value"].half()}),
    Broken(
        "dtype of key",
        lambda call: {"key": call["key"].to(torch.int8)},
        NotEmulatedError,
        label="int8",
    ),
    Broken(
        "dtype of value",
        lambda call: {"value": call["value"].char()},
        NotEmulatedError,
        label="int8",
    ),
    Broken("query contiguous", {"query": draw(4, 3, 16).transpose(0, 1)}),
    Broken("key contiguous", lambda call: {"key": call["key"].mT}),
    Broken("value contiguous", lambda call: {"value": call["value"].mT}),
    Broken("number of query heads", {"num_heads": 0}),
    Broken("number of key heads", {"num_key_value_heads": 3}),
    Broken("number of key heads", {"num_key_value_heads": -2}, label="negative"),
    Broken("N of query", {"query": draw(3, 2, 16)}),
    Broken(LENGTHS, {LENGTHS: None}),
    Broken(LENGTHS, {LENGTHS: []}, label="empty"),
    Broken(LENGTHS, {LENGTHS: [4, 3]}, label="falling"),
    Broken(LENGTHS, {LENGTHS: [-1, 3]}, label="negative"),
    Broken(f"last of {LENGTHS}", {LENGTHS: [2, 4]}),
    Broken(f"last of {LENGTHS}", {LENGTHS: [1, 2]}, label="fewer than T"),
    Broken(f"length of {LENGTHS}", {LENGTHS: [3] * 4097}),
    Broken("rows of block_table", {LENGTHS: [0, 2, 3]}, label="a leading 0"),
    Broken("shape of key", lambda call: {"key": call["key"][:, :1].clone()}),
    Broken("shape of key", {"block_size": 8}, label="another block_size"),
    Broken("block_size", {"block_size": 0}),
    Broken("shape of value", lambda call: {"value": call["value"][1:]}),
    Broken("dimensions of key", lambda call: {"key": call["key"][0, 0]}),
    Broken("dimensions of value", lambda call: {"value": call["value"].flatten(2)}),
    Broken("dtype of block_table", lambda call: {"block_table": call["block_table"].long()}),
    Broken("dim num of block_table", lambda call: {"block_table": call["block_table"][0]}),
    Broken("rows of block_table", lambda call: {"block_table": call["block_table"][:1]}),
    Broken("block_table", {"block_table": torch.zeros(2, 0, dtype=torch.int32)}),
    Broken(
        "block_table",
        lambda call: {"block_table": call["block_table"].repeat(1, 2)[:, :3]},
        SilentError,
        label="strides",
    ),
    Broken(KEYS, {KEYS: None}),
    Broken(KEYS, {KEYS: []}, label="empty"),
    Broken(KEYS, {KEYS: [17, -1]}, label="negative"),
    Broken(KEYS, {KEYS: [17, 49]}, label="beyond the table"),
    Broken(f"length of {KEYS}", {KEYS: [17]}),
    Broken(f"length of {KEYS}", {KEYS: [17, 5, 5]}, label="longer"),
    Broken("pages in block_table", {KEYS: [17, 17]}, SilentError),
    Broken(
        "pages in block_table",
        {"block_table": torch.tensor([[1, 7], [2, 0]], dtype=torch.int32)},
        SilentError,
        label="beyond the pool",
    ),
    Broken("sparse_mode", {"sparse_mode": 5}),
    Broken("sparse_mode", {"sparse_mode": 2, "atten_mask": MASK}, NotEmulatedError, label="2"),
    Broken("atten_mask", {"atten_mask": MASK}),
    Broken("atten_mask", {"sparse_mode": 3}, label="none"),
    Broken("atten_mask", {"sparse_mode": 4}, label="none in a band"),
    Broken("dtype of atten_mask", {"sparse_mode": 3, "atten_mask": MASK.float()}),
    Broken("atten_mask contiguous", {"sparse_mode": 3, "atten_mask": MASK.T}),
    Broken("shape of atten_mask", {"sparse_mode": 3, "atten_mask": MASK[:512, :512].clone()}),
    Broken(
        "shape of atten_mask", {"sparse_mode": 3, "atten_mask": MASK[None]}, label="3 dimensions"
    ),
    Broken("content of atten_mask", {"sparse_mode": 3, "atten_mask": ~MASK}, SilentError),
    Broken("inner_precise", {"inner_precise": -1}, label="negative"),
)
def test_packed_pages(case: Broken) -> None:
    first(case, "TND", "head")


@broken_cases(
    Broken(KEYS, {KEYS: None}),
    Broken(KEYS, {KEYS: [22]}, label="one for two"),
    Broken(KEYS, {KEYS: [23, 22]}, label="falling"),
    Broken(f"last of {KEYS}", {KEYS: [17, 21]}),
    Broken("dimensions of key", lambda call: {"key": call["key"][None]}),
    Broken("shape of key", lambda call: {"key": call["key"][:, :1].clone()}),
    Broken("shape of value", lambda call: {"value": call["value"][:21].clone()}),
)
def test_packed_rows(case: Broken) -> None:
    first(case, "TND", "rows")


PLAIN = (
    Broken(LENGTHS, {LENGTHS: [2, 3]}),
    Broken(LENGTHS, {LENGTHS: [2, -1]}, label="negative"),
    Broken(f"length of {LENGTHS}", {LENGTHS: []}),
    Broken(f"length of {KEYS}", {KEYS: []}),
    Broken(KEYS, {KEYS: [17, 18]}, label="beyond the keys"),
    Broken("query contiguous", lambda call: {"query": call["query"].repeat(1, 1, 1, 2)[..., ::2]}),
    Broken("content of atten_mask", {"sparse_mode": 3, "atten_mask": ~MASK}, SilentError),
    Broken("shape of atten_mask", {"sparse_mode": 3, "atten_mask": MASK[None, None, None]}),
    Broken(
        "reach with a full mask",
        {"atten_mask": MASK[:2, :17].clone(), "pre_tokens": 9},
        NotEmulatedError,
    ),
    Broken(
        "shape of atten_mask",
        {"atten_mask": clear(3, 1, 2, 17)},
        label="3 requests",
    ),
    Broken(
        "shape of atten_mask",
        {"atten_mask": clear(2, 4, 2, 17)},
        label="heads",
    ),
    Broken(
        "shape of atten_mask",
        {"atten_mask": clear(3, 2, 17)},
        label="B = 3",
    ),
    Broken("S of atten_mask", {"atten_mask": clear(2, 1, 17)}),
    Broken("S of key in atten_mask", {"atten_mask": clear(2, 2, 16)}),
)


@broken_cases(
    *PLAIN,
    Broken("dimensions of query", lambda call: {"query": call["query"].flatten(2)}),
    Broken("D of value", lambda call: {"value": call["value"][..., :8].clone()}),
    Broken("shape of key", lambda call: {"key": call["key"].transpose(1, 2).contiguous()}),
    Broken("shape of key", lambda call: {"key": call["key"][:1]}, label="fewer requests"),
)
def test_rows_side_by_side(case: Broken) -> None:
    first(case, "BSND", "rows")


@broken_cases(
    *PLAIN[:2],
    Broken("H of query", lambda call: {"query": call["query"][..., :63].clone()}),
    Broken("shape of key", lambda call: {"key": call["key"][..., :31].clone()}),
)
def test_flat_rows_side_by_side(case: Broken) -> None:
    first(case, "BSH", "rows")


@broken_cases(
    Broken("N of query", lambda call: {"query": call["query"].transpose(1, 2).contiguous()}),
    Broken("shape of key", lambda call: {"key": call["key"].transpose(1, 2).contiguous()}),
)
def test_heads_before_rows(case: Broken) -> None:
    first(case, "BNSD", "rows")


@broken_cases(
    Broken("shape of key", {"block_size": 32}),
    Broken("shape of key", lambda call: {"key": call["key"][..., :16].clone()}, label="heads"),
    Broken("shape of value", lambda call: {"value": call["value"][1:]}),
)
def test_flat_pages(case: Broken) -> None:
    first(case, "BSH", "flat")


@pytest.mark.parametrize("layout", ["BSND", "BSH"])
def test_pages_by_head_go_with_some_layouts_only(layout: str) -> None:
    by_head = BATCH.call("BNSD", "head")
    change = {"key": by_head["key"], "value": by_head["value"]}
    first(Broken("pages [pages, N, size, D]", change), layout, "flat")


def test_a_full_mask_covers_all_columns_of_the_table() -> None:
    mask = clear(2, 2, 48)
    case = Broken("S of key in atten_mask", {"atten_mask": mask[..., :32].clone()})
    first(case, "BSND", "flat", atten_mask=mask)


@pytest.mark.parametrize("mode", [0, 3])
def test_with_one_query_a_window_would_be_ignored(mode: int) -> None:
    batch = Requests((1, 1), (17, 5))
    good = {
        "sparse_mode": mode,
        "atten_mask": MASK if mode else None,
        "pre_tokens": 4,
        "next_tokens": 0,
    }
    case = Broken("pre_tokens", {"sparse_mode": 4, "atten_mask": MASK}, SilentError)
    first(case, "BSND", "flat", batch, **good)
    wide: Arguments = batch.call("BSND", "flat") | good
    wide |= {"sparse_mode": 4, "atten_mask": MASK, "pre_tokens": 16}
    VENDORS[RELAXED].npu_fused_infer_attention_score(**wide)


def test_with_one_query_the_query_lengths_are_ignored() -> None:
    batch = Requests((1, 1), (17, 5))
    call = batch.call("BSND", "flat")
    vendor = VENDORS[RELAXED]
    out = vendor.npu_fused_infer_attention_score(**call)[0]
    call[LENGTHS] = [0, 7]
    assert torch.equal(vendor.npu_fused_infer_attention_score(**call)[0], out)


BIG = Requests((2, 1), (130, 5), size=128, block=128)


def resized(rule: str, layout: str = "TND", **sizes: object) -> Broken:
    """A call of other sizes in place of the good one."""
    batch = Requests(**{**vars(BIG), **sizes})
    form = "head" if layout == "TND" else "flat"
    return Broken(rule, batch.call(layout, form), profile=STRICT)


@pytest.mark.parametrize(
    "case",
    [
        resized("D", size=24),
        resized("D and D of value", size=64),
        resized("D and D of value", size=256),
        resized("form of pages", heads=(2, 2)),
        resized("block_size", block=24),
        resized("block_size", block=1040),
        resized("heads for each key head", heads=(65, 1)),
        resized("number of query heads", heads=(260, 10)),
        resized("D", "BSND", size=528),
        resized("block_size", "BSND", block=64),
        resized("block_size", "BSND", block=1024),
        resized("block_size", "BSH", queries=(1, 1), block=24),
        resized("block_size", "BSH", queries=(1, 1), block=528),
    ],
    ids=str,
)
def test_sizes(case: Broken) -> None:
    first(case, "TND", "head", BIG)
    assert not callable(case.change)
    other: Arguments = dict(case.change)
    VENDORS[RELAXED].npu_fused_infer_attention_score(**other)


@pytest.mark.parametrize(
    ("batch", "layout", "change"),
    [
        (Requests((1, 1), (17, 5)), "BSND", {"inner_precise": 2}),
        (Requests((2, 1), (17, 5), heads=(4, 4)), "TND", {"inner_precise": 1}),
    ],
    ids=["one query", "as many key heads"],
)
def test_some_forms_have_fewer_precisions(batch: Requests, layout: str, change: Arguments) -> None:
    first(Broken("inner_precise", change), layout, "rows", batch)
    first(Broken("inner_precise", {"inner_precise": 4}), layout, "rows", BATCH, inner_precise=3)


def test_float16_may_prefer_speed_with_as_many_key_heads() -> None:
    call = Requests((2, 1), (17, 5), heads=(4, 4)).call("TND", "rows")
    halves: Arguments = call | {name: call[name].half() for name in ("query", "key", "value")}
    case = Broken("inner_precise", {"inner_precise": 2})
    case.check(VENDORS[RELAXED].npu_fused_infer_attention_score, halves | {"inner_precise": 1})


def test_one_query_has_so_many_keys_at_most() -> None:
    batch = Requests((1,), (5,), size=128, block=128)
    table = torch.ones(1, 2049, dtype=torch.int32)
    change = {KEYS: [262145], "block_table": table}
    first(Broken("keys for one query", change, profile=STRICT), "BSH", "flat", batch)


def test_keys_of_a_page_fit_sixteen_bits() -> None:
    key = torch.zeros(1, 16, 65536, dtype=BF)
    call = {
        "query": torch.zeros(1, 4096, 16, dtype=BF),
        "num_heads": 4096,
        "num_key_value_heads": 4096,
        "key": key,
        "value": key,
        LENGTHS: [1],
        KEYS: [1],
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
    }
    first(Broken("H of key", call), "TND", "flat")
