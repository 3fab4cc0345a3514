"""Block-scaled 8-bit checkpoints: what they expand to, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.errors import WeightsError
from surefoot.weights.fp8 import BlockScaledCheckpoint, expand
from surefoot.weights.load import FolderCheckpoint, TensorTaker, open_checkpoint
from tests.unit.weights.files import CONFIG, write_folder

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
SHAPES = [(128, 128), (1, 1), (130, 260), (127, 129), (256, 40), (3, 200, 130)]


def write(folder: Path, tensors: dict[str, Tensor], details: object = FP8) -> Path:
    config = {**CONFIG, "quantization_config": details}
    return write_folder(folder, {"model.safetensors": tensors}, config=config)


def scaled(shape: tuple[int, ...], name: str = "w.weight") -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(sum(shape))
    weight = (torch.randn(shape, generator=draws) * 50).to(torch.float8_e4m3fn)
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return {name: weight, name + "_scale_inv": torch.rand(blocks, generator=draws) + 0.01}


def by_loops(weight: Tensor, scale: Tensor) -> Tensor:
    out = weight.float().clone()
    for row in range(weight.shape[-2]):
        for column in range(weight.shape[-1]):
            out[..., row, column] *= scale[..., row // 128, column // 128]
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_block_is_multiplied_by_its_scale(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = scaled(shape)
    checkpoint = open_checkpoint(write(tmp_path, tensors))
    assert isinstance(checkpoint, BlockScaledCheckpoint)
    assert set(checkpoint.names()) == {"w.weight"}
    assert checkpoint.shape("w.weight") == shape
    want = by_loops(*tensors.values())
    assert torch.equal(checkpoint.read("w.weight"), want)
    taker = TensorTaker(checkpoint, torch.bfloat16, lambda _: None)
    assert torch.equal(taker.take("w.weight", shape), want.bfloat16())
    taker.finish()


def test_other_blocks_than_square_ones() -> None:
    weight = torch.ones(3, 5).to(torch.float8_e4m3fn)
    scale = torch.arange(6.0).reshape(2, 3)
    assert expand(weight, scale, (2, 2)).tolist() == [
        [0, 0, 1, 1, 2],
        [0, 0, 1, 1, 2],
        [3, 3, 4, 4, 5],
    ]


def test_what_has_no_scale_is_read_as_it_is(tmp_path: Path) -> None:
    plain = torch.ones(3, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(write(tmp_path, scaled((2, 2)) | {"norm.weight": plain}))
    assert torch.equal(checkpoint.read("norm.weight"), plain)
    assert checkpoint.read("norm.weight").dtype == torch.bfloat16


def test_a_scale_of_nothing_is_unused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, {"w.weight_scale_inv": torch.ones(1, 1)}))
    with pytest.raises(WeightsError, match=r"does not use: w\.weight_scale_inv"):
        TensorTaker(checkpoint, torch.float32, lambda _: None).finish()


def test_codes_without_a_scale_are_named(tmp_path: Path) -> None:
    codes = {"w.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}
    taker = TensorTaker(open_checkpoint(write(tmp_path, codes)), torch.float32, lambda _: None)
    with pytest.raises(WeightsError, match=r"'w\.weight' is stored as float8_e4m3fn"):
        taker.take("w.weight", (2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2, torch.int8])
def test_scaled_numbers_of_another_kind_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"w.weight": torch.ones(2, 2).to(dtype), "w.weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(WeightsError, match=r"'w\.weight' has scales, so it must be stored as"):
        open_checkpoint(write(tmp_path, tensors)).read("w.weight")


@pytest.mark.parametrize("shape", [(1,), (1, 2), (2, 1), ()])
def test_a_scale_of_another_shape_is_named(shape: tuple[int, ...], tmp_path: Path) -> None:
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    tensors = {"w.weight": weight, "w.weight_scale_inv": torch.ones(shape)}
    with pytest.raises(WeightsError, match=r"'w\.weight_scale_inv' has shape .* where \[1, 1\]"):
        open_checkpoint(write(tmp_path, tensors)).read("w.weight")


def test_closing_lets_go(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, scaled((2, 2))))
    checkpoint.close()
    checkpoint.close()
    assert not checkpoint.names()


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised with gptq"),
        ({"bits": 4}, "quantised with an unnamed method"),
        ("x", "quantised with an unnamed method"),
        ({"quant_method": "fp8"}, "weight_block_size is None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, r"weight_block_size is \[0, 1\]"),
    ],
)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_another_quantisation_is_named(
    key: str, details: object, reason: str, tmp_path: Path
) -> None:
    folder = write_folder(
        tmp_path, {"model.safetensors": {"a": torch.ones(1)}}, config={**CONFIG, key: details}
    )
    for opened in (FolderCheckpoint, open_checkpoint):
        with pytest.raises(WeightsError, match=reason):
            opened(folder)
