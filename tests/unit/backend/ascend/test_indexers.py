import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import (
    RELAXED,
    STRICT,
    NotEmulatedError,
    SilentError,
)
from tests.unit.backend.ascend.attention_cases import BF, Requests, draw
from tests.unit.backend.ascend.broken import VENDORS, Arguments, Broken, broken_cases, gaps
from tests.unit.backend.ascend.selection_cases import (
    FAR,
    LAYOUTS,
    ints,
    limit,
    row_of,
    selecting,
)

VENDOR = VENDORS[RELAXED]
LEAST = -(2**31)
BATCHES = [
    Requests((1,), (1,), heads=(2, 1), seed=1),
    Requests((3, 1), (17, 40), heads=(4, 1), seed=2),
    Requests((2, 0, 4), (0, 3, 2), heads=(3, 1), seed=3),
    Requests((1, 1, 1), (16, 33, 5), heads=(1, 1), seed=4),
]


def call_of(batch: Requests, layouts: tuple[str, str] = ("TND", "PA_BSND")) -> Arguments:
    call = selecting(batch, layouts, "actual_seq_lengths_key") | {"layout_key": layouts[1]}
    return call | {"weights": draw(*call["query"].shape[:-1], seed=9)}


def score(q: Tensor, k: Tensor, weights: Tensor) -> float:
    """Of one key [D] for one row [N, D], [N]."""
    each = [max(0.0, float(head.double() @ k.double())) for head in q]
    return sum(float(weight) * one for weight, one in zip(weights, each, strict=True))


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("count", [1, 6, 50])
def test_lightning_indexer(
    batch: Requests, layouts: tuple[str, str], mode: int, count: int
) -> None:
    if layouts[1] == "BSND" and not min(batch.keys):
        batch = Requests(batch.queries, (4, 3, 2), batch.heads)
    if layouts[0] == "TND" and layouts[1] == "TND" and not sum(batch.keys):
        pytest.skip("no keys at all are refused")
    call = call_of(batch, layouts)
    chosen, none = VENDOR.npu_lightning_indexer(**call, sparse_mode=mode, sparse_count=count)
    assert chosen.dtype == torch.int32
    assert (none.shape, none.dtype) == ((0,), BF)
    written = 0
    for at in range(batch.count):
        k = batch.k(at)[:, 0]
        for i in range(batch.queries[at]):
            row = row_of(batch, layouts[0], chosen, at, i)
            weights = row_of(batch, layouts[0], call["weights"], at, i)
            assert row.shape == (1, count)
            shown = limit(batch, mode, at, i)
            kept = min(count, shown)
            assert row[0, kept:].tolist() == [-1] * (count - kept)
            picked = row[0, :kept].tolist()
            scores = [score(batch.q(at)[i], k[j], weights) for j in range(shown)]
            best = sorted(range(shown), key=lambda j: (-scores[j], j))[:kept]
            assert picked == best
            written += count
    assert (chosen != LEAST).sum() == written


def test_equal_scores_go_by_position() -> None:
    call = call_of(Requests((1,), (20,), heads=(2, 1)))
    call["weights"] = torch.zeros_like(call["weights"])
    chosen = VENDOR.npu_lightning_indexer(**call, sparse_count=5)[0]
    assert chosen[0, 0].tolist() == [0, 1, 2, 3, 4]


def test_weights_may_be_wider_and_lengths_left_out() -> None:
    batch = Requests((3, 3), (9, 9), heads=(4, 1))
    call = call_of(batch, ("BSND", "BSND"))
    chosen = VENDOR.npu_lightning_indexer(**call, sparse_count=4)[0]
    for name in ("actual_seq_lengths_query", "actual_seq_lengths_key"):
        call[name] = None
    call["weights"] = call["weights"].float()
    assert torch.equal(VENDOR.npu_lightning_indexer(**call, sparse_count=4)[0], chosen)


BATCH = Requests((2, 1), (17, 5), heads=(4, 1))
QUERY, KEY = "actual_seq_lengths_query", "actual_seq_lengths_key"


@broken_cases(
    Broken("layout_query", {"layout_query": "BNSD"}),
    Broken("layout_key", {"layout_key": "BNSD"}),
    Broken("layout_key", {"layout_key": "BSND"}, label="not as of query"),
    Broken("dtype of query", lambda call: {"query": call["query"].float()}),
    Broken("dtype of key", lambda call: {"key": call["key"].half()}),
    Broken("dimensions of query", lambda call: {"query": call["query"][None]}),
    Broken("dimensions of key", lambda call: {"key": call["key"][:, :, 0]}),
    Broken("query", lambda call: {"query": call["query"][:0]}),
    Broken("key", lambda call: {"key": call["key"][:0]}),
    Broken("N of key", lambda call: {"key": call["key"].expand(-1, -1, 2, -1)}),
    Broken("D of key", lambda call: {"key": call["key"][..., :8]}),
    Broken("query contiguous", gaps("query")),
    Broken("key contiguous", gaps("key")),
    Broken(QUERY, {QUERY: None}),
    Broken(f"dtype of {QUERY}", {QUERY: torch.tensor([2, 3])}),
    Broken(f"dimensions of {QUERY}", {QUERY: ints(2, 3)[None]}),
    Broken(f"length of {QUERY}", {QUERY: ints()}),
    Broken(f"values of {QUERY}", {QUERY: ints(3, 2)}, SilentError),
    Broken(f"values of {QUERY}", {QUERY: ints(-1, 2)}, SilentError, label="negative"),
    Broken(f"last of {QUERY}", {QUERY: ints(2, 6)}, SilentError),
    Broken(KEY, {KEY: None}),
    Broken(f"dtype of {KEY}", {KEY: torch.tensor([17, 5])}),
    Broken(f"length of {KEY}", {KEY: ints(17)}),
    Broken(f"length of {KEY}", {QUERY: ints(0, 2, 3)}, label="a leading 0"),
    Broken(f"values of {KEY}", {KEY: ints(17, -5)}, SilentError),
    Broken(f"values of {KEY}", {KEY: ints(17, 49)}, SilentError, label="beyond the table"),
    Broken("block_table", {"block_table": None}),
    Broken("dtype of block_table", lambda call: {"block_table": call["block_table"].long()}),
    Broken("dimensions of block_table", lambda call: {"block_table": call["block_table"][0]}),
    Broken("rows of block_table", lambda call: {"block_table": call["block_table"][:1]}),
    Broken(
        "block_table",
        lambda call: {"block_table": call["block_table"].repeat(1, 2)[:, :3]},
        SilentError,
        label="strides",
    ),
    Broken("pages in block_table", {KEY: ints(17, 17)}, SilentError),
    Broken("sparse_mode", {"sparse_mode": 4}),
    Broken("pre_tokens", {"pre_tokens": FAR - 1}),
    Broken("next_tokens", {"next_tokens": 0}),
    Broken("return_value", {"return_value": True}, NotEmulatedError),
    Broken("dtype of weights", lambda call: {"weights": call["weights"].half()}),
    Broken("shape of weights", lambda call: {"weights": call["weights"][:3]}),
    Broken("weights contiguous", gaps("weights")),
    Broken("sparse_count", {"sparse_count": 0}),
)
def test_lightning_indexer_contract(case: Broken) -> None:
    case.check(VENDOR.npu_lightning_indexer, call_of(BATCH))


@broken_cases(
    Broken("block_table", {"block_table": torch.zeros(2, 2, dtype=torch.int32)}),
    Broken(f"values of {KEY}", {KEY: ints(17, 5)}, SilentError),
    Broken(f"last of {KEY}", {KEY: ints(17, 23)}, SilentError),
)
def test_lightning_indexer_contract_without_pages(case: Broken) -> None:
    case.check(VENDOR.npu_lightning_indexer, call_of(BATCH, ("TND", "TND")))


@broken_cases(
    Broken("B of key", lambda call: {"key": call["key"][:1]}),
    Broken(f"values of {QUERY}", {QUERY: ints(2, 3)}, SilentError),
    Broken(f"length of {QUERY}", {QUERY: ints(2)}),
    Broken(f"values of {KEY}", {KEY: ints(18, 5)}, SilentError),
)
def test_lightning_indexer_contract_side_by_side(case: Broken) -> None:
    case.check(VENDOR.npu_lightning_indexer, call_of(BATCH, ("BSND", "BSND")))


def sized(rule: str, **sizes: object) -> Broken:
    return Broken(rule, call_of(Requests(**{**vars(BIG), **sizes})), profile=STRICT)


BIG = Requests((2, 1), (17, 5), heads=(64, 1), size=128)


@broken_cases(
    sized("N of query", heads=(65, 1)),
    sized("D of query", size=64),
    sized("block size", block=24),
    sized("block size", block=1040),
    Broken("sparse_count", {"sparse_count": 2049}, profile=STRICT),
    Broken("sparse_count", {"sparse_count": 9216}, profile=STRICT, label="too many"),
)
def test_lightning_indexer_sizes(case: Broken) -> None:
    case.check(VENDORS[STRICT].npu_lightning_indexer, call_of(BIG) | {"sparse_count": 3072})
    VENDOR.npu_lightning_indexer(**call_of(BIG) | dict(case.change))  # type: ignore[arg-type]
