import random

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import (
    RELAXED,
    STRICT,
    NotEmulatedError,
    SilentError,
)
from tests.unit.backend.ascend.attention_cases import (
    BF,
    Requests,
    draw,
    nan,
    near,
    one_row,
)
from tests.unit.backend.ascend.broken import VENDORS, Arguments, Broken, broken_cases, gaps
from tests.unit.backend.ascend.selection_cases import (
    FAR,
    LAYOUTS,
    ints,
    keys_of,
    limit,
    row_of,
    selecting,
)

VENDOR = VENDORS[RELAXED]
ROTATED = 8
BATCHES = [
    Requests((1,), (1,), heads=(2, 1), seed=1),
    Requests((3, 1), (17, 40), heads=(4, 1), seed=2),
    Requests((2, 0, 4), (0, 3, 6), heads=(2, 1), seed=3),
    Requests((1, 1, 1), (16, 33, 5), heads=(1, 1), seed=4),
]


def rope(batch: Requests, at: int, keys: bool) -> Tensor:
    if keys:
        return draw(batch.keys[at], 1, ROTATED, seed=900 + at)
    return draw(batch.queries[at], batch.heads[0], ROTATED, seed=950 + at)


def call_of(
    batch: Requests, layouts: tuple[str, str] = ("TND", "PA_BSND"), width: int = 8, block: int = 1
) -> Arguments:
    """A call whose rows name some of the blocks they may see, in no order, then -1."""
    call = selecting(batch, layouts, "actual_seq_lengths_kv") | {"layout_kv": layouts[1]}
    every = range(batch.count)
    rotated = batch.padded(layouts[0], [rope(batch, at, False) for at in every])
    if layouts[0] == "TND":
        rotated = torch.cat([rotated, nan(2, *rotated.shape[1:])])
    call |= {"query_rope": rotated, "value": call["key"], "scale_value": batch.scale}
    call |= keys_of(batch, layouts[1], [rope(batch, at, True) for at in every], "key_rope")
    draws = random.Random(batch.seed)
    indices = torch.full((*rotated.shape[:-2], 1, width), -5, dtype=torch.int32)
    for at in every:
        for i in range(batch.queries[at]):
            shown = -(-limit(batch, 3, at, i) // block)
            named = draws.sample(range(shown), min(shown, draws.randint(0, width)))
            row = named + [-1] * (width - len(named))
            row_of(batch, layouts[0], indices, at, i)[0] = torch.tensor(row)
    return call | {"sparse_indices": indices, "sparse_block_size": block, "attention_mode": 2}


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize(("width", "block"), [(8, 1), (40, 1), (4, 4)])
def test_sparse_flash_attention(
    batch: Requests, layouts: tuple[str, str], mode: int, width: int, block: int
) -> None:
    call = call_of(batch, layouts, width, block)
    out, *rest = VENDOR.npu_sparse_flash_attention(**call, sparse_mode=mode)
    assert [(each.shape, each.dtype) for each in rest] == [((0,), torch.float32)] * 2
    assert (out.shape, out.dtype) == (call["query"].shape, BF)
    written = 0
    for at in range(batch.count):
        keys = torch.cat([batch.k(at), rope(batch, at, True)], -1)
        queries = torch.cat([batch.q(at), rope(batch, at, False)], -1)
        for i in range(batch.queries[at]):
            named = row_of(batch, layouts[0], call["sparse_indices"], at, i)[0].tolist()
            units = [range(block * unit, block * (unit + 1)) for unit in named if unit >= 0]
            shown = [j for unit in units for j in unit if j < limit(batch, mode, at, i)]
            row = row_of(batch, layouts[0], out, at, i)
            if not shown:
                assert row.isnan().all()
                continue
            written += row.numel()
            wanted, _ = one_row(queries[i], keys[shown], batch.k(at)[shown], batch.scale)
            assert near(row, wanted)
    assert (~out.isnan()).sum() == written


def test_entries_that_may_not_be_seen_are_skipped_and_use_up_the_walk() -> None:
    batch = Requests((3,), (3,), heads=(1, 1))
    call = call_of(batch, width=3)
    call["sparse_indices"] = torch.tensor([[2, 1, 0]] * 5, dtype=torch.int32)[:, None]
    out = VENDOR.npu_sparse_flash_attention(**call)[0]
    # Row 0 may see key 0 and walks one entry, which is key 2; row 1 walks two and sees key 1.
    assert out[0].isnan().all()
    assert torch.equal(out[1, 0], batch.k(0)[1, 0])
    assert out[2].isfinite().all()


def test_the_choice_of_the_indexer_can_be_attended_to() -> None:
    batch = Requests((2, 1), (30, 20), heads=(2, 1))
    call = call_of(batch)
    lengths = {"actual_seq_lengths_key": call["actual_seq_lengths_kv"]}
    shared = ("query", "key", "actual_seq_lengths_query", "block_table", "layout_query")
    chosen, _ = VENDOR.npu_lightning_indexer(
        **{name: call[name] for name in shared},
        **lengths,
        weights=draw(5, 2),
        layout_key="PA_BSND",
        sparse_count=12,
    )
    out = VENDOR.npu_sparse_flash_attention(**call | {"sparse_indices": chosen})[0]
    assert out[:3].isfinite().all()
    assert out[3:].isnan().all()


BATCH = Requests((2, 1), (17, 5), heads=(4, 1))
QUERY, KEY = "actual_seq_lengths_query", "actual_seq_lengths_kv"


def named(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)[:, None]


@broken_cases(
    Broken("attention_mode", {"attention_mode": 0}),
    Broken("sinks", {"sinks": torch.zeros(4)}, NotEmulatedError),
    Broken("return_softmax_lse", {"return_softmax_lse": True}, NotEmulatedError),
    Broken("layout_query", {"layout_query": "BNSD"}),
    Broken("layout_kv", {"layout_kv": "BSND"}),
    Broken("dtype of query", lambda call: {"query": call["query"].float()}),
    Broken("dtype of key", lambda call: {"key": call["key"].half()}),
    Broken("dimensions of query", lambda call: {"query": call["query"][None]}),
    Broken("N of key", lambda call: {"key": call["key"].expand(-1, -1, 2, -1)}),
    Broken(QUERY, {QUERY: None}),
    Broken(f"dtype of {QUERY}", {QUERY: torch.tensor([2, 3])}),
    Broken(f"last of {QUERY}", {QUERY: ints(2, 6)}, SilentError),
    Broken(f"values of {QUERY}", {QUERY: ints(3, 2)}, SilentError),
    Broken(f"length of {KEY}", {KEY: ints(17)}),
    Broken(f"values of {KEY}", {KEY: ints(17, 49)}, SilentError),
    Broken("rows of block_table", lambda call: {"block_table": call["block_table"][:1]}),
    Broken("dtype of block_table", lambda call: {"block_table": call["block_table"].long()}),
    Broken("pages in block_table", {KEY: ints(17, 17)}, SilentError),
    Broken("sparse_mode", {"sparse_mode": 4}),
    Broken("pre_tokens", {"pre_tokens": 2**31 - 1}),
    Broken("next_tokens", {"next_tokens": FAR - 1}),
    Broken("ropes", {"query_rope": None}),
    Broken("ropes", {"key_rope": None}, label="key"),
    Broken("dtype of query_rope", lambda call: {"query_rope": call["query_rope"].half()}),
    Broken("dtype of key_rope", lambda call: {"key_rope": call["key_rope"].half()}),
    Broken("shape of query_rope", lambda call: {"query_rope": call["query_rope"][:4]}),
    Broken("shape of key_rope", lambda call: {"key_rope": call["key_rope"][1:]}),
    Broken("query_rope contiguous", gaps("query_rope")),
    Broken("key_rope contiguous", gaps("key_rope")),
    Broken("value", {"value": None}),
    Broken("dtype of value", lambda call: {"value": call["value"].half()}),
    Broken("shape of value", lambda call: {"value": call["value"][1:]}),
    Broken("value contiguous", gaps("value")),
    Broken("memory of value", lambda call: {"value": call["value"].clone()}, SilentError),
    Broken(
        "dtype of sparse_indices", lambda call: {"sparse_indices": call["sparse_indices"].long()}
    ),
    Broken(
        "dimensions of sparse_indices", {"sparse_indices": torch.zeros(5, 8, dtype=torch.int32)}
    ),
    Broken("shape of sparse_indices", lambda call: {"sparse_indices": call["sparse_indices"][:3]}),
    Broken(
        "shape of sparse_indices",
        {"sparse_indices": torch.zeros(5, 4, 8, dtype=torch.int32)},
        label="heads",
    ),
    Broken("K of sparse_indices", {"sparse_indices": torch.zeros(5, 1, 0, dtype=torch.int32)}),
    Broken("sparse_indices contiguous", gaps("sparse_indices")),
    Broken("sparse_block_size", {"sparse_block_size": 3}),
    Broken("sparse_block_size", {"sparse_block_size": 32}, label="more than a page"),
    Broken(
        "order in sparse_indices", {"sparse_indices": named([-1, 0], *[[0, -1]] * 4)}, SilentError
    ),
    Broken("values of sparse_indices", {"sparse_indices": named(*[[0, 5]] * 5)}, SilentError),
    Broken("repeats in sparse_indices", {"sparse_indices": named(*[[1, 1]] * 5)}, SilentError),
)
def test_sparse_flash_attention_contract(case: Broken) -> None:
    case.check(VENDOR.npu_sparse_flash_attention, call_of(BATCH))


def test_the_default_mode_is_refused() -> None:
    call = call_of(BATCH)
    del call["attention_mode"]
    with pytest.raises(RuntimeError, match=r"attentionMode only support 2\."):
        VENDOR.npu_sparse_flash_attention(**call)


BIG = Requests((2, 1), (17, 5), heads=(4, 1), size=512)


def sized(rule: str, rotated: int = 64, **sizes: object) -> Broken:
    return Broken(rule, big(Requests(**{**vars(BIG), **sizes}), rotated), profile=STRICT)


def big(batch: Requests, rotated: int = 64) -> Arguments:
    call = call_of(batch)
    for name in ("query_rope", "key_rope"):
        call[name] = draw(*call[name].shape[:-1], rotated)
    return call


@broken_cases(
    sized("N of query", heads=(3, 1)),
    sized("N of query", heads=(256, 1)),
    sized("D of query", size=256),
    sized("D of query_rope", rotated=32),
    sized("block size", block=24),
)
def test_sparse_flash_attention_sizes(case: Broken) -> None:
    case.check(VENDORS[STRICT].npu_sparse_flash_attention, big(BIG))
    VENDOR.npu_sparse_flash_attention(**dict(case.change))  # type: ignore[arg-type]
