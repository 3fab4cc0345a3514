"""Model folders: what is read, and what is refused by name."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from surefoot.errors import ModelError, WeightsError
from surefoot.weights.load import FolderCheckpoint, open_checkpoint, read_config
from tests.unit.weights.files import CONFIG, matching_index, write_folder, write_json

A = {"a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3)}
B = {"b.weight": torch.ones(3, dtype=torch.bfloat16), "b.bias": torch.zeros(1)}
SHARDS = {"model-00001-of-00002.safetensors": A, "model-00002-of-00002.safetensors": B}


def test_a_single_file_is_read_as_stored(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"model.safetensors": A | B})
    write_json(folder / "generation_config.json", {"temperature": 0.5})
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.names()) == {"a.weight", "b.weight", "b.bias"}
    assert checkpoint.shape("a.weight") == (2, 3)
    assert torch.equal(checkpoint.read("a.weight"), A["a.weight"])
    assert checkpoint.read("b.weight").dtype == torch.bfloat16
    assert checkpoint.config == CONFIG
    assert checkpoint.generation == {"temperature": 0.5}


@pytest.mark.parametrize("indexed", [True, False])
def test_shards_are_read_with_and_without_an_index(tmp_path: Path, indexed: bool) -> None:
    index = matching_index(SHARDS) if indexed else None
    checkpoint = FolderCheckpoint(write_folder(tmp_path, SHARDS, index))
    for name, tensor in (A | B).items():
        assert torch.equal(checkpoint.read(name), tensor)
    assert checkpoint.generation == {}


def test_closing_lets_go_and_may_be_repeated(tmp_path: Path) -> None:
    checkpoint = FolderCheckpoint(write_folder(tmp_path, {"model.safetensors": A}))
    checkpoint.close()
    checkpoint.close()
    assert not checkpoint.names()


def test_files_the_index_does_not_name_are_left_alone(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, SHARDS, matching_index(SHARDS))
    (folder / "consolidated.safetensors").write_bytes(b"not read")
    assert set(FolderCheckpoint(folder).names()) == {"a.weight", "b.weight", "b.bias"}


def test_model_safetensors_wins_over_others_without_an_index(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"model.safetensors": A, "adapter.safetensors": B})
    assert set(FolderCheckpoint(folder).names()) == {"a.weight"}


def test_an_index_that_names_an_absent_shard(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, SHARDS, matching_index(SHARDS))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        WeightsError, match=r"names model-00002-of-00002\.safetensors, which is not"
    ):
        FolderCheckpoint(folder)


def test_an_index_that_names_a_tensor_no_file_holds(tmp_path: Path) -> None:
    index = matching_index(SHARDS) | {"c.weight": "model-00001-of-00002.safetensors"}
    with pytest.raises(WeightsError, match=r"1 tensors that the files do not hold.*'c\.weight'"):
        FolderCheckpoint(write_folder(tmp_path, SHARDS, index))


def test_an_index_that_leaves_out_a_stored_tensor(tmp_path: Path) -> None:
    index = matching_index(SHARDS)
    del index["b.bias"]
    with pytest.raises(WeightsError, match=r"leaves out tensors.*b\.bias"):
        FolderCheckpoint(write_folder(tmp_path, SHARDS, index))


def test_an_index_that_places_a_tensor_in_the_wrong_file(tmp_path: Path) -> None:
    index = matching_index(SHARDS) | {"b.bias": "model-00001-of-00002.safetensors"}
    with pytest.raises(WeightsError, match=r"'b\.bias' in model-00001.*model-00002.* holds it"):
        FolderCheckpoint(write_folder(tmp_path, SHARDS, index))


@pytest.mark.parametrize("indexed", [True, False])
def test_a_tensor_in_two_shards(tmp_path: Path, indexed: bool) -> None:
    shards = {"model-1.safetensors": A | {"c": torch.ones(1)}, "model-2.safetensors": A | B}
    index = matching_index(shards) if indexed else None
    with pytest.raises(WeightsError, match=r"model-1\.safetensors and model-2.*'a\.weight'"):
        FolderCheckpoint(write_folder(tmp_path, shards, index))


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "../other/model.safetensors"}, "is not a file name"),
        ({"a": "/etc/passwd"}, "is not a file name"),
        ({"a": 3}, "is not a file name"),
        ({"a": "pytorch_model.bin"}, r"is not a \.safetensors file"),
        ({}, "must hold an object weight_map"),
        (["a"], "must hold an object weight_map"),
        (None, "must hold an object weight_map"),
    ],
)
def test_an_index_that_makes_no_sense(tmp_path: Path, weight_map: object, reason: str) -> None:
    folder = write_folder(tmp_path, {"model.safetensors": A})
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    with pytest.raises(WeightsError, match=reason):
        FolderCheckpoint(folder)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {})
    (folder / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n")
    with pytest.raises(WeightsError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        FolderCheckpoint(folder)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds no \*\.safetensors files"):
        FolderCheckpoint(write_folder(tmp_path, {}))


def _damaged_single(tmp_path: Path, content: bytes) -> Path:
    folder = write_folder(tmp_path, {})
    (folder / "model.safetensors").write_bytes(content)
    return folder


@pytest.mark.parametrize(
    "content",
    [
        b"",
        save(A)[:4],
        save(A)[:40],
        save(A)[:-1],
        save(A) + b"\0",
        struct.pack("<Q", 2**63) + save(A)[8:],
        struct.pack("<Q", 99_000_000) + save(A)[8:],
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"\xff\xfe{}",
    ],
    ids=[
        "empty",
        "truncated length",
        "truncated header",
        "truncated data",
        "trailing data",
        "hostile length",
        "length beyond the file",
        "header no object",
        "header not UTF-8",
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged or incomplete"):
        FolderCheckpoint(_damaged_single(tmp_path, content))


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    with pytest.raises(WeightsError, match="git lfs pull"):
        FolderCheckpoint(_damaged_single(tmp_path, pointer))


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(position=st.integers(0, len(save(A)) - 1), value=st.integers(0, 255))
def test_no_changed_byte_gets_past_as_another_error(
    tmp_path: Path, position: int, value: int
) -> None:
    content = bytearray(save(A))
    content[position] = value
    with suppress(WeightsError):
        checkpoint = FolderCheckpoint(_damaged_single(tmp_path, bytes(content)))
        for name in checkpoint.names():
            assert checkpoint.read(name).numel() <= 6 * 4


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not valid JSON"),
        ("[" * 200_000, "is not valid JSON"),
        ("\ud800", "is not valid JSON"),
        ("[1]", "must hold a JSON object, not list"),
    ],
)
def test_a_damaged_config(tmp_path: Path, content: str, reason: str) -> None:
    folder = write_folder(tmp_path, {"model.safetensors": A})
    (folder / "config.json").write_text(content, errors="surrogatepass")
    with pytest.raises(ModelError, match=rf"config\.json {reason}"):
        FolderCheckpoint(folder)


def test_a_config_of_absurd_size(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(ModelError, match=r"config\.json is larger than 16 MiB"):
        read_config(tmp_path)


def test_a_null_quantisation_is_none(tmp_path: Path) -> None:
    config = {**CONFIG, "quantization_config": None}
    checkpoint = FolderCheckpoint(write_folder(tmp_path, {"model.safetensors": A}, config=config))
    assert checkpoint.config == config


def test_config_can_be_read_without_weights(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"hidden_size": 8})
    assert read_config(tmp_path) == {"hidden_size": 8}


@pytest.mark.parametrize(
    ("name", "reason"),
    [("absent", "does not exist"), ("model.safetensors", "neither a model folder nor a .gguf")],
)
def test_what_is_no_model_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    write_folder(tmp_path, {"model.safetensors": A})
    with pytest.raises(ModelError, match=reason):
        open_checkpoint(tmp_path / name)


def test_a_folder_of_gguf_files_points_to_them(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(ModelError, match=r"no config\.json.*to run tiny\.gguf, name that file"):
        open_checkpoint(tmp_path)
