"""What a model takes from a checkpoint, and the account that is kept of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surefoot.errors import WeightsError
from surefoot.weights.load import FolderCheckpoint, TensorTaker
from tests.unit.weights.files import write_folder

TENSORS = {
    "model.embed_tokens.weight": torch.arange(8, dtype=torch.bfloat16).reshape(4, 2),
    "model.layers.1.mlp.up_proj.weight": torch.ones(3, 2),
    "model.layers.1.rotary_emb.inv_freq": torch.ones(1),
    "model.layers.10.mlp.up_proj.weight": torch.ones(3, 2),
    "model.norm.weight": torch.full((2,), 0.1),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> FolderCheckpoint:
    return FolderCheckpoint(write_folder(tmp_path, {"model.safetensors": TENSORS}))


def _taker(checkpoint: FolderCheckpoint, dtype: torch.dtype = torch.float32) -> TensorTaker:
    return TensorTaker(checkpoint, dtype, lambda _: None)


def test_a_taken_tensor_is_converted(checkpoint: FolderCheckpoint) -> None:
    taken = _taker(checkpoint).take("model.embed_tokens.weight", (4, 2))
    assert taken.dtype == torch.float32
    assert torch.equal(taken, torch.arange(8.0).reshape(4, 2))
    narrow = _taker(checkpoint, torch.bfloat16).take("model.norm.weight", (2,))
    assert torch.equal(narrow, torch.full((2,), 0.1).bfloat16())


def test_a_tensor_can_be_taken_in_a_type_of_its_own(checkpoint: FolderCheckpoint) -> None:
    taker = _taker(checkpoint, torch.bfloat16)
    exact = taker.take("model.norm.weight", (2,), torch.float32)
    assert torch.equal(exact, TENSORS["model.norm.weight"])


def test_whole_numbers_are_taken_as_they_are_stored(tmp_path: Path) -> None:
    tensors = {"table": torch.arange(3), "weight": torch.ones(3)}
    taker = _taker(FolderCheckpoint(write_folder(tmp_path, {"model.safetensors": tensors})))
    assert torch.equal(taker.take("table", (3,), torch.int64), torch.arange(3))
    for name, dtype in (("table", torch.int32), ("weight", torch.int64)):
        with pytest.raises(
            WeightsError, match=rf"'{name}' is stored as .* where int\d\d is wanted"
        ):
            taker.take(name, (3,), dtype)
    with pytest.raises(WeightsError, match="'table' is stored as int64, which is not read"):
        taker.take("table", (3,))


def test_a_module_is_there_if_any_of_its_tensors_is(checkpoint: FolderCheckpoint) -> None:
    taker = _taker(checkpoint)
    assert all(map(taker.has_module, ("model", "model.", "model.layers.1", "model.norm")))
    assert not any(map(taker.has_module, ("mode", "model.layers.2", "model.norm.weight")))


def test_a_taken_tensor_outlives_the_checkpoint_and_is_its_own(
    checkpoint: FolderCheckpoint,
) -> None:
    taker = _taker(checkpoint)
    taken = taker.take("model.norm.weight", (2,))
    taken.fill_(7)
    assert torch.equal(taker.take("model.norm.weight", (2,)), torch.full((2,), 0.1))
    checkpoint.close()
    assert taken.tolist() == [7, 7]


def test_progress_names_each_tensor(checkpoint: FolderCheckpoint) -> None:
    seen: list[str] = []
    taker = TensorTaker(checkpoint, torch.float32, seen.append)
    taker.take("model.norm.weight", (2,))
    taker.take("model.embed_tokens.weight", (4, 2))
    assert seen == ["model.norm.weight", "model.embed_tokens.weight"]


def test_a_missing_tensor_is_named_with_its_like(checkpoint: FolderCheckpoint) -> None:
    wanted = "model.layers.2.mlp.up_proj.weight"
    with pytest.raises(WeightsError) as caught:
        _taker(checkpoint).take(wanted, (3, 2))
    assert f"{wanted!r} is missing" in str(caught.value)
    assert "names like it: model.layers.1" in str(caught.value)
    assert caught.value.parameter == "model"


def test_a_missing_tensor_unlike_all_others(checkpoint: FolderCheckpoint) -> None:
    with pytest.raises(WeightsError, match=r"'zzz' is missing from the checkpoint$"):
        _taker(checkpoint).take("zzz", (1,))


@pytest.mark.parametrize("shape", [(2, 4), (4, 3), (8,), (4, 2, 1)])
def test_a_tensor_of_another_shape(checkpoint: FolderCheckpoint, shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightsError) as caught:
        _taker(checkpoint).take("model.embed_tokens.weight", shape)
    assert "shape [4, 2]" in str(caught.value)
    assert f"asks for {list(shape)}" in str(caught.value)


def test_a_mis_shaped_tensor_is_not_read(checkpoint: FolderCheckpoint) -> None:
    seen: list[str] = []
    with pytest.raises(WeightsError):
        TensorTaker(checkpoint, torch.float32, seen.append).take("model.norm.weight", (3,))
    assert not seen


def test_everything_taken_or_skipped_finishes(checkpoint: FolderCheckpoint) -> None:
    taker = _taker(checkpoint)
    for name, tensor in TENSORS.items():
        if name != "model.layers.1.rotary_emb.inv_freq":
            taker.take(name, tuple(tensor.shape))
    taker.skip("model.layers.1.rotary_emb.inv_freq")
    taker.skip("model.absent")
    taker.finish()


@pytest.mark.parametrize("module", ["model.layers.1", "model.layers.1."])
def test_skipping_a_module_spares_its_namesakes(checkpoint: FolderCheckpoint, module: str) -> None:
    taker = _taker(checkpoint)
    taker.skip(module)
    with pytest.raises(WeightsError) as caught:
        taker.finish()
    assert "model.layers.1." not in str(caught.value)
    assert "model.layers.10.mlp.up_proj.weight" in str(caught.value)


def test_unused_tensors_are_counted_and_the_first_listed(tmp_path: Path) -> None:
    tensors = {f"extra.{number:02}": torch.ones(1) for number in range(11)}
    taker = _taker(FolderCheckpoint(write_folder(tmp_path, {"model.safetensors": tensors})))
    with pytest.raises(WeightsError) as caught:
        taker.finish()
    assert "11 tensors that this model does not use" in str(caught.value)
    assert "extra.00, extra.01" in str(caught.value)
    assert "extra.07 and 3 more" in str(caught.value)
    assert "extra.08" not in str(caught.value)


def test_a_tied_head_shows_as_absent(checkpoint: FolderCheckpoint) -> None:
    taker = _taker(checkpoint)
    assert not taker.has("lm_head.weight")
    assert taker.has("model.embed_tokens.weight")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_codes_are_not_taken_for_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = {"w": torch.ones(2).to(dtype)}
    taker = _taker(FolderCheckpoint(write_folder(tmp_path, {"model.safetensors": stored})))
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(WeightsError, match=f"'w' is stored as {name}, .* without its scales"):
        taker.take("w", (2,))
