"""Weights that do not fit are refused before they are read."""

from pathlib import Path

import pytest

from surefoot.backend.cpu import CpuBackend
from surefoot.config import make_config
from surefoot.engine.assemble import page_tokens_of
from surefoot.engine.models import LoadedModel, load_on, silent
from surefoot.errors import MemoryPlanError
from surefoot.testing.tiny_latents import TinyLatentSizes, write_tiny_latents


class Small(CpuBackend):
    """A device with little room."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self._free = free

    def free_memory(self) -> int:
        return self._free


def test_too_many_weights_are_refused_with_the_figures(tmp_path: Path) -> None:
    folder = write_tiny_latents(tmp_path)
    size = load_on("tiny", folder, Small(1 << 30), "float32", silent).weight_bytes
    assert load_on("tiny", folder, Small(size), "float32", silent).weight_bytes == size
    read: list[str] = []
    with pytest.raises(MemoryPlanError) as caught:
        load_on("big", folder, Small(size - 1), "float32", read.append)
    assert read == []
    count = f"{size // 4:,}"
    assert f"the {count} weights of big need 0.00 GiB in float32" in str(caught.value)
    ways = "--dtype bfloat16 (0.00 GiB) or --quantization w8a8 (0.00 GiB) or a smaller model"
    assert f"take {ways}" in str(caught.value)


def test_weights_in_int8_are_counted_as_such(tmp_path: Path) -> None:
    folder = write_tiny_latents(tmp_path)

    def load(free: int, quantization: str | None) -> LoadedModel:
        return load_on("tiny", folder, Small(free), "float32", silent, quantization=quantization)

    floats, size = (load(1 << 30, kind).weight_bytes for kind in (None, "w8a8"))
    assert size < floats
    assert load(size, "w8a8").weight_bytes == size
    with pytest.raises(MemoryPlanError, match=r"in int8 \(w8a8\) and float32, and") as caught:
        load(size - 1, "w8a8")
    assert "--quantization" not in str(caught.value)


def test_a_page_of_the_model_is_taken_where_the_backends_does_not_suit(tmp_path: Path) -> None:
    folder = write_tiny_latents(tmp_path, TinyLatentSizes(heavy_ratio=128))
    target = load_on("tiny", folder, CpuBackend(), "float32", silent)
    assert page_tokens_of(make_config(), target) == 128
    assert page_tokens_of(make_config(page_tokens=256), target) == 256
    small = write_tiny_latents(tmp_path / "small", TinyLatentSizes(heavy_ratio=16))
    target = load_on("tiny", small, CpuBackend(), "float32", silent)
    assert page_tokens_of(make_config(), target) == CpuBackend().capabilities.page_tokens
