import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import (
    RELAXED,
    STRICT,
    NotEmulatedError,
    SilentError,
)
from tests.unit.backend.ascend.broken import VENDORS, Arguments, Broken, broken_cases, gaps

VENDOR = VENDORS[RELAXED]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


BATCH, LENGTH, ROTATED, NORMED = 2, 3, 8, 16


def latent(mode: str, dtype: torch.dtype = torch.bfloat16, sizes: int = 1) -> Arguments:
    rotated, normed = (64, 512) if sizes == 64 else (ROTATED, NORMED)
    turned = draw(BATCH, 1, LENGTH, rotated, seed=3)
    lead = (BATCH, 1, 7) if mode == "Norm" else (6, 4, 1)
    places = [[6, 0, 2], [1, 2, 3]] if mode == "Norm" else [23, 4, 9, 0, 5, 8]
    return {
        "kv": draw(BATCH, 1, LENGTH, normed + rotated, dtype=dtype),
        "gamma": draw(normed, seed=1, dtype=dtype),
        "cos": turned.cos().to(dtype),
        "sin": turned.sin().to(dtype),
        "index": torch.tensor(places),
        "k_cache": torch.zeros(*lead, rotated, dtype=dtype),
        "ckv_cache": torch.zeros(*lead, normed, dtype=dtype),
        "cache_mode": mode,
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["Norm", "PA", "PA_BNSD"])
def test_kv_rmsnorm_rope_cache(mode: str, dtype: torch.dtype) -> None:
    call = latent(mode, dtype)
    k_cache, ckv_cache, rotated, normed = VENDOR.npu_kv_rmsnorm_rope_cache(
        **call,
        epsilon=0.5,
        is_output_kv=True,
    )
    assert k_cache is call["k_cache"]
    assert ckv_cache is call["ckv_cache"]
    kv, gamma, cos, sin = (call[name].double() for name in ("kv", "gamma", "cos", "sin"))
    index, step, half = call["index"], torch.finfo(dtype).eps * 8, ROTATED // 2
    seen = 0
    for row in range(BATCH):
        for token in range(LENGTH):
            x = kv[row, 0, token]
            norm = x[:NORMED] / (x[:NORMED].pow(2).mean() + 0.5).sqrt() * gamma
            a, b = x[NORMED::2], x[NORMED + 1 :: 2]
            c, s = cos[row, 0, token], sin[row, 0, token]
            turned = torch.cat([a * c[:half] - b * s[:half], b * c[half:] + a * s[half:]])
            at = int(index.view(BATCH, LENGTH)[row, token])
            place = (row, 0, at) if mode == "Norm" else (at // 4, at % 4, 0)
            assert (k_cache[place].double() - turned).abs().max() < step
            assert (ckv_cache[place].double() - norm).abs().max() < step
            seen += 1
            if mode != "Norm":
                assert torch.equal(rotated[row, 0, token], k_cache[place])
                assert torch.equal(normed[row, 0, token], ckv_cache[place])
    assert k_cache.any(-1).sum() == seen
    if mode == "Norm":
        assert rotated.isnan().all()


def test_what_was_not_asked_for_is_undefined() -> None:
    _, _, rotated, normed = VENDOR.npu_kv_rmsnorm_rope_cache(**latent("PA"))
    assert rotated.shape == (BATCH, 1, LENGTH, ROTATED)
    assert normed.shape == (BATCH, 1, LENGTH, NORMED)
    assert rotated.isnan().all()
    assert normed.isnan().all()


def test_kv_rmsnorm_rope_cache_at_the_published_sizes() -> None:
    VENDORS[STRICT].npu_kv_rmsnorm_rope_cache(**latent("PA", sizes=64))


BF = torch.bfloat16


@broken_cases(
    *(
        Broken(name, {name: torch.ones(1)}, NotEmulatedError)
        for name in ("k_rope_scale", "c_kv_scale", "k_rope_offset", "c_kv_offset", "v")
    ),
    Broken("cache_mode", {"cache_mode": "BNSD"}),
    Broken("cache_mode", {"cache_mode": "PA_NZ"}, NotEmulatedError, label="NZ"),
    Broken("dtype of kv", {"kv": torch.zeros(2, 1, 3, 24)}),
    Broken("dimensions of kv", {"kv": torch.zeros(2, 3, 24, dtype=BF)}),
    Broken("dimensions of gamma", {"gamma": torch.zeros(1, 16, dtype=BF)}),
    Broken("dimensions of cos", {"cos": torch.zeros(2, 3, 8, dtype=BF)}),
    Broken("shape of kv", {"kv": torch.zeros(2, 1, 3, 25, dtype=BF)}),
    Broken("shape of kv", {"kv": torch.zeros(2, 2, 3, 24, dtype=BF)}, label="heads"),
    Broken(
        "rotated size",
        {"cos": torch.zeros(2, 1, 3, 7, dtype=BF), "kv": torch.zeros(2, 1, 3, 23, dtype=BF)},
    ),
    Broken("dtype of gamma", {"gamma": torch.zeros(16)}),
    Broken("dtype of cos", {"cos": torch.zeros(2, 1, 3, 8)}),
    Broken("dtype of sin", {"sin": torch.zeros(2, 1, 3, 8)}),
    Broken("shape of cos", {"cos": torch.zeros(2, 1, 1, 8, dtype=BF)}),
    Broken("shape of sin", {"sin": torch.zeros(2, 1, 1, 8, dtype=BF)}),
    *(
        Broken(f"{name} contiguous", gaps(name))
        for name in ("kv", "gamma", "cos", "sin", "index", "k_cache", "ckv_cache")
    ),
    Broken("dtype of index", {"index": torch.arange(6, dtype=torch.int32)}),
    Broken("dimensions of k_cache", {"k_cache": torch.zeros(6, 4, 8, dtype=BF)}),
    Broken("shape of k_cache", {"k_cache": torch.zeros(6, 4, 2, 8, dtype=BF)}),
    Broken("shape of index", {"index": torch.arange(6).view(2, 3)}),
    Broken("pages", {"k_cache": torch.zeros(1, 4, 1, 8, dtype=BF)}),
    Broken("shape of ckv_cache", {"ckv_cache": torch.zeros(6, 4, 1, 15, dtype=BF)}),
    Broken("dtype of k_cache", {"k_cache": torch.zeros(6, 4, 1, 8)}),
    Broken("dtype of ckv_cache", {"ckv_cache": torch.zeros(6, 4, 1, 16)}),
    Broken("range of index", {"index": torch.tensor([24, 4, 9, 0, 5, 8])}, SilentError),
    Broken("range of index", {"index": torch.tensor([-1, 4, 9, 0, 5, 8])}, SilentError, label="-1"),
    Broken("repeats in index", {"index": torch.tensor([8, 4, 9, 0, 5, 8])}, SilentError),
)
def test_kv_rmsnorm_rope_cache_contract(case: Broken) -> None:
    case.check(VENDOR.npu_kv_rmsnorm_rope_cache, latent("PA"))


@broken_cases(
    Broken("shape of k_cache", {"k_cache": torch.zeros(3, 1, 7, 8, dtype=BF)}),
    Broken("shape of index", {"index": torch.arange(6)}),
    Broken("L of k_cache", {"k_cache": torch.zeros(2, 1, 2, 8, dtype=BF)}),
    Broken("range of index", {"index": torch.tensor([[6, 0, 7], [1, 2, 3]])}, SilentError),
    Broken("repeats in index", {"index": torch.tensor([[6, 0, 0], [1, 2, 3]])}, SilentError),
)
def test_kv_rmsnorm_rope_cache_contract_without_pages(case: Broken) -> None:
    case.check(VENDOR.npu_kv_rmsnorm_rope_cache, latent("Norm"))


@pytest.mark.parametrize("name", ["rotated size", "normed size"])
def test_kv_rmsnorm_rope_cache_sizes(name: str) -> None:
    call = latent("PA", sizes=64)
    if name == "normed size":
        call |= {"gamma": draw(16, dtype=BF), "kv": draw(2, 1, 3, 80, dtype=BF)}
    else:
        call |= {"cos": draw(2, 1, 3, 8, dtype=BF), "kv": draw(2, 1, 3, 520, dtype=BF)}
    Broken(name, call, profile=STRICT).check(
        VENDORS[STRICT].npu_kv_rmsnorm_rope_cache, latent("PA", sizes=64)
    )
