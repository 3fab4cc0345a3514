"""Packed 4-bit floats and power-of-two scales: what they expand to, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from surefoot.errors import WeightsError
from surefoot.weights.deepseek_v4 import open_deepseek_v4
from surefoot.weights.load import FolderCheckpoint
from surefoot.weights.mxfp4 import Fp4Checkpoint, unpack
from tests.unit.weights.files import write_folder

# By code, 0 to 15.
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0 = torch.float8_e8m0fnu


def opened(folder: Path, tensors: dict[str, Tensor]) -> Fp4Checkpoint:
    return Fp4Checkpoint(FolderCheckpoint(write_folder(folder, {"model.safetensors": tensors})))


def powers(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Scales of all sizes that leave bfloat16 room."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(60, 190, shape, generator=draws, dtype=torch.uint8).view(E8M0)


def any_bytes(shape: tuple[int, ...]) -> Tensor:
    draws = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, shape, generator=draws, dtype=torch.uint8)


def by_transformers(weight: Tensor, scale: Tensor) -> Tensor:
    pair: dict[str, list[Tensor] | Tensor] = {"weight": weight, "weight_scale_inv": scale}
    expanded = Fp8Dequantize(None).convert(pair)["weight"]
    assert isinstance(expanded, Tensor)
    return expanded.float()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_each_byte_is_two_numbers_the_low_half_first(dtype: torch.dtype) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(16, 16)
    numbers = unpack(packed)
    assert numbers.shape == (16, 32)
    assert numbers.dtype == torch.float32
    pairs = numbers.reshape(256, 2).tolist()
    for byte, (first, second) in enumerate(pairs):
        assert (first, second) == (NUMBERS[byte % 16], NUMBERS[byte // 16])
        assert math.copysign(1, first) == (-1 if byte % 16 >= 8 else 1)
        assert math.copysign(1, second) == (-1 if byte // 16 >= 8 else 1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_two_rows_by_hand(dtype: torch.dtype, tmp_path: Path) -> None:
    packed = torch.tensor([[0x21, 0x7F], [0x80, 0x93]], dtype=torch.uint8).view(dtype)
    scale = torch.tensor([[1.0, 2.0], [0.5, 8.0]]).to(E8M0)
    checkpoint = opened(tmp_path, {"w.weight": packed, "w.weight_scale_inv": scale})
    assert set(checkpoint.names()) == {"w.weight"}
    assert checkpoint.shape("w.weight") == (2, 4)
    assert checkpoint.read("w.weight").tolist() == [[0.5, 1, -12, 12], [0, 0, 12, -4]]


def test_each_power_of_two_is_exact(tmp_path: Path) -> None:
    """Of 4-bit and of 8-bit weights; the last byte is no number."""
    scale = torch.arange(255, dtype=torch.uint8).view(E8M0).reshape(255, 1)
    ones = torch.full((255, 1), 0x22, dtype=torch.int8)
    tensors = {
        "four.weight": ones,
        "four.weight_scale_inv": scale,
        "eight.weight": torch.ones(255, 1).to(torch.float8_e4m3fn),
        "eight.weight_scale_inv": scale.clone(),
    }
    stored = FolderCheckpoint(write_folder(tmp_path, {"model.safetensors": tensors}))
    checkpoint = open_deepseek_v4(stored, (1, 1))
    want = [2.0 ** (byte - 127) for byte in range(255)]
    assert checkpoint.read("four.weight").tolist() == [[number, number] for number in want]
    assert checkpoint.read("eight.weight").tolist() == [[number] for number in want]


@pytest.mark.parametrize("group", [1, 2, 16, 32, 64])
@pytest.mark.parametrize("lead", [(), (3,)], ids=["one", "stacked"])
def test_packed_weights_are_those_of_transformers(
    group: int, lead: tuple[int, ...], tmp_path: Path
) -> None:
    packed = any_bytes((*lead, 6, 32)).view(torch.int8)
    scale = powers((*lead, 6, 64 // group))
    checkpoint = opened(tmp_path, {"w": packed, "w_scale_inv": scale})
    assert checkpoint.shape("w") == (*lead, 6, 64)
    assert torch.equal(checkpoint.read("w"), by_transformers(packed, scale))


@pytest.mark.parametrize("kind", [torch.float32, E8M0], ids=str)
@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((256, 384), (2, 3)),
        ((128, 128), (1, 1)),
        ((48, 32), (3, 2)),
        ((8, 24), (1, 3)),
        ((2, 8, 24), (2, 1, 3)),
    ],
    ids=str,
)
def test_8_bit_weights_are_those_of_transformers(
    kind: torch.dtype, shape: tuple[int, ...], grid: tuple[int, ...], tmp_path: Path
) -> None:
    draws = torch.Generator().manual_seed(1)
    weight = (torch.randn(shape, generator=draws) * 50).to(torch.float8_e4m3fn)
    fractions = torch.rand(grid, generator=draws) + 0.01
    scale = fractions if kind == torch.float32 else powers(grid)
    tensors = {"w.weight": weight, "w.weight_scale_inv": scale}
    stored = FolderCheckpoint(write_folder(tmp_path, {"model.safetensors": tensors}))
    checkpoint = open_deepseek_v4(stored, (128, 128))
    assert checkpoint.shape("w.weight") == shape
    assert torch.equal(checkpoint.read("w.weight"), by_transformers(weight, scale))


def test_the_block_of_the_config_comes_before_the_one_of_the_shapes(tmp_path: Path) -> None:
    """Of 200 rows with two scales, 128 have the first."""
    weight = torch.ones(200, 200).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    tensors = {"w.weight": weight, "w.weight_scale_inv": scale}
    stored = FolderCheckpoint(write_folder(tmp_path, {"model.safetensors": tensors}))
    numbers = open_deepseek_v4(stored, (128, 128)).read("w.weight")
    assert numbers[127, 127] == 1
    assert numbers[128, 127] == 3
    assert numbers[127, 128] == 2


@pytest.mark.parametrize("grid", [(1, 2), (3, 1), (2,), (2, 2, 1), (2, 0), (5, 5)], ids=str)
def test_8_bit_scales_of_no_square_blocks_are_named(grid: tuple[int, ...], tmp_path: Path) -> None:
    weight = torch.ones(48, 24).to(torch.float8_e4m3fn)
    tensors = {"w.weight": weight, "w.weight_scale_inv": torch.ones(grid)}
    stored = FolderCheckpoint(write_folder(tmp_path, {"model.safetensors": tensors}))
    with pytest.raises(WeightsError, match=r"'w\.weight_scale_inv' has shape .* where \[1, 1\]"):
        open_deepseek_v4(stored, (128, 128)).read("w.weight")


@pytest.mark.parametrize(
    "grid", [(4,), (1, 2), (4, 3), (4, 0), (2, 4), (1, 4, 2), (8, 2), ()], ids=str
)
def test_4_bit_scales_of_no_equal_groups_are_named(grid: tuple[int, ...], tmp_path: Path) -> None:
    packed = torch.zeros(4, 8, dtype=torch.int8)
    checkpoint = opened(tmp_path, {"w.weight": packed, "w.weight_scale_inv": torch.ones(grid)})
    with pytest.raises(
        WeightsError, match=r"'w\.weight_scale_inv' has shape .* of shape \[4, 16\]"
    ):
        checkpoint.read("w.weight")


@pytest.mark.parametrize("weight", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("scale", [torch.uint8, torch.int32], ids=str)
def test_scales_in_whole_numbers_are_refused(
    weight: torch.dtype, scale: torch.dtype, tmp_path: Path
) -> None:
    """A byte could be a factor or an exponent."""
    tensors = {
        "w.weight": torch.ones(1, 2).to(weight),
        "w.weight_scale_inv": torch.ones(1, 1, dtype=scale),
    }
    stored = FolderCheckpoint(write_folder(tmp_path, {"model.safetensors": tensors}))
    with pytest.raises(WeightsError, match=r"'w\.weight_scale_inv' holds scales, so it must be"):
        open_deepseek_v4(stored, None).read("w.weight")


@pytest.mark.parametrize(
    "weight",
    [torch.ones(2, 2, dtype=torch.int32), torch.ones(2, 2), torch.ones(2, dtype=torch.int8)],
    ids=["int32", "float32", "one dimension"],
)
def test_scaled_numbers_of_another_kind_are_named(weight: Tensor, tmp_path: Path) -> None:
    tensors = {"w.weight": weight, "w.weight_scale_inv": torch.ones(2, 1)}
    stored = FolderCheckpoint(write_folder(tmp_path, {"model.safetensors": tensors}))
    with pytest.raises(WeightsError, match=r"'w\.weight' has scales, so it must be stored as"):
        open_deepseek_v4(stored, None).read("w.weight")


def test_bytes_without_scales_and_scales_without_bytes_stay(tmp_path: Path) -> None:
    codes = torch.ones(2, 2, dtype=torch.int8)
    checkpoint = opened(tmp_path, {"w.weight": codes, "v.weight_scale_inv": torch.ones(2, 1)})
    assert set(checkpoint.names()) == {"w.weight", "v.weight_scale_inv"}
    assert checkpoint.shape("w.weight") == (2, 2)
    assert torch.equal(checkpoint.read("w.weight"), codes)
    checkpoint.close()
    checkpoint.close()
    assert not checkpoint.names()
