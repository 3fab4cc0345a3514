import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import (
    RELAXED,
    NotEmulatedError,
    SilentError,
)
from tests.unit.backend.ascend.broken import VENDORS, Arguments, Broken, broken_cases

VENDOR = VENDORS[RELAXED]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.int64])
@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_scatter_nd_update(dtype: torch.dtype, wide: torch.dtype, depth: int) -> None:
    target, wanted = (draw(5, 4, 3, 2).mul(50).to(dtype) for _ in range(2))
    places = torch.cartesian_prod(torch.arange(5), torch.arange(4), torch.arange(3))
    chosen = places[torch.randperm(60, generator=torch.Generator().manual_seed(depth))[:12]]
    chosen = torch.unique(chosen[:, :depth], dim=0)
    updates = draw(len(chosen), *target.shape[depth:], seed=2).mul(50).to(dtype)
    for place, update in zip(chosen.tolist(), updates, strict=True):
        wanted[tuple(place)] = update
    came = VENDOR.npu_scatter_nd_update_(target, chosen.to(wide), updates)
    assert came is target
    assert torch.equal(target, wanted)


def test_scatters_write_through_views_and_nothing_at_all() -> None:
    pool = torch.zeros(4, 6, 2)
    view = pool.transpose(0, 1)
    VENDOR.npu_scatter_nd_update_(view, torch.tensor([[[1, 2]], [[3, 0]]]), torch.ones(2, 1, 2))
    assert pool.nonzero().tolist() == [[0, 3, 0], [0, 3, 1], [2, 1, 0], [2, 1, 1]]
    before = pool.clone()
    none = torch.zeros(0, 1, dtype=torch.int32)
    VENDOR.npu_scatter_nd_update_(pool, none, torch.ones(0, 6, 2))
    assert torch.equal(pool, before)


def test_the_sink_may_be_written_twice_the_rest_not() -> None:
    pool = torch.zeros(4, 8, 2)
    places = torch.tensor([[0, 3], [0, 3], [2, 1]])
    VENDOR.npu_scatter_nd_update_(pool, places, torch.ones(3, 2))
    assert pool.sum() == 4
    keys = torch.zeros(4, 8, 1, 2)
    slots = torch.tensor([5, 5, 9], dtype=torch.int32)
    VENDOR.npu_scatter_pa_kv_cache(
        torch.ones(3, 1, 2), torch.ones(3, 1, 2), keys, keys.clone(), slots, cache_mode="Norm"
    )
    assert keys.sum() == 4


def nd() -> Arguments:
    return {
        "input": torch.zeros(4, 8, 2),
        "indices": torch.tensor([[1, 3], [0, 0], [2, 1]]),
        "updates": torch.ones(3, 2),
    }


@broken_cases(
    Broken("dtype of input", {"input": torch.zeros(4, 8, 2, dtype=torch.float64)}),
    Broken("dimensions of input", {"input": torch.zeros(())}),
    Broken("dtype of indices", {"indices": torch.zeros(3, 2)}),
    Broken("dimensions of indices", {"indices": torch.tensor([1, 2])}),
    Broken("shape of indices", {"indices": torch.zeros(3, 4, dtype=torch.int64)}),
    Broken("shape of indices", {"indices": torch.zeros(3, 0, dtype=torch.int64)}, label="none"),
    Broken("dtype of updates", {"updates": torch.ones(3, 2, dtype=torch.bfloat16)}),
    Broken("shape of updates", {"updates": torch.ones(2, 2)}),
    Broken("shape of updates", {"updates": torch.ones(3, 8, 2)}, label="too deep"),
    Broken("range of indices", {"indices": torch.tensor([[1, 3], [4, 0], [2, 1]])}, SilentError),
    Broken(
        "range of indices",
        {"indices": torch.tensor([[1, 3], [0, -1], [2, 1]])},
        SilentError,
        label="negative",
    ),
    Broken("repeats in indices", {"indices": torch.tensor([[1, 3], [0, 0], [1, 3]])}, SilentError),
)
def test_scatter_nd_update_contract(case: Broken) -> None:
    good = nd()
    case.check(VENDOR.npu_scatter_nd_update_, good)
    assert torch.equal(good["input"], VENDOR.npu_scatter_nd_update_(**nd()))


@pytest.mark.parametrize("mode", ["Norm", None])
@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_scatter_pa_kv_cache(mode: str | None, wide: torch.dtype) -> None:
    key, value = draw(5, 2, 4), draw(5, 2, 3, seed=1)
    keys, values = torch.zeros(4, 8, 2, 4), torch.zeros(4, 8, 2, 3)
    slots = [31, 9, 16, 0, 15]
    VENDOR.npu_scatter_pa_kv_cache(
        key, value, keys, values, torch.tensor(slots, dtype=wide), cache_mode=mode
    )
    for token, slot in enumerate(slots):
        assert torch.equal(keys[slot // 8, slot % 8], key[token])
        assert torch.equal(values[slot // 8, slot % 8], value[token])
        keys[slot // 8, slot % 8] = 0
    assert not keys.any()


def kv() -> Arguments:
    return {
        "key": draw(3, 2, 4),
        "value": draw(3, 2, 3),
        "key_cache": torch.zeros(4, 8, 2, 4),
        "value_cache": torch.zeros(4, 8, 2, 3),
        "slot_mapping": torch.tensor([8, 31, 9], dtype=torch.int32),
        "cache_mode": "Norm",
    }


@broken_cases(
    Broken("compress_lens", {"compress_lens": torch.ones(1)}, NotEmulatedError),
    Broken("compress_seq_offsets", {"compress_seq_offsets": torch.ones(1)}, NotEmulatedError),
    Broken("seq_lens", {"seq_lens": torch.ones(1)}, NotEmulatedError),
    Broken("cache_mode", {"cache_mode": "PA_NZ"}, NotEmulatedError),
    Broken("dtype of key", {"key": draw(3, 2, 4).double()}),
    Broken("dimensions of key", {"key": draw(3, 8)}),
    Broken("dimensions of value", {"value": draw(3, 6)}),
    Broken("shape of value", {"value": draw(3, 1, 3)}),
    Broken("dimensions of key_cache", {"key_cache": torch.zeros(32, 2, 4)}),
    Broken("shape of key_cache", {"key_cache": torch.zeros(4, 2, 8, 4)}),
    Broken("shape of value_cache", {"value_cache": torch.zeros(4, 8, 2, 4)}),
    Broken("dtype of value", {"value": draw(3, 2, 3).bfloat16()}),
    Broken("dtype of key_cache", {"key_cache": torch.zeros(4, 8, 2, 4).bfloat16()}),
    Broken("dtype of value_cache", {"value_cache": torch.zeros(4, 8, 2, 3).bfloat16()}),
    Broken("key contiguous", {"key": draw(2, 3, 4).transpose(0, 1)}),
    Broken("value contiguous", {"value": draw(2, 3, 3).transpose(0, 1)}),
    Broken("key_cache contiguous", {"key_cache": torch.zeros(4, 2, 8, 4).transpose(1, 2)}),
    Broken("value_cache contiguous", {"value_cache": torch.zeros(4, 2, 8, 3).transpose(1, 2)}),
    Broken("slot_mapping contiguous", {"slot_mapping": torch.arange(8, 14)[::2]}),
    Broken("dtype of slot_mapping", {"slot_mapping": torch.zeros(3)}),
    Broken("shape of slot_mapping", {"slot_mapping": torch.tensor([8, 9])}),
    Broken("range of slot_mapping", {"slot_mapping": torch.tensor([8, 32, 9])}, SilentError),
    Broken(
        "range of slot_mapping",
        {"slot_mapping": torch.tensor([8, -1, 9])},
        SilentError,
        label="-1",
    ),
    Broken("repeats in slot_mapping", {"slot_mapping": torch.tensor([8, 31, 8])}, SilentError),
)
def test_scatter_pa_kv_cache_contract(case: Broken) -> None:
    case.check(VENDOR.npu_scatter_pa_kv_cache, kv())


def test_the_default_mode_of_scatter_pa_kv_cache_is_not_the_plain_one() -> None:
    good = kv()
    del good["cache_mode"]
    with pytest.raises(NotEmulatedError, match="cache_mode"):
        VENDOR.npu_scatter_pa_kv_cache(**good)
