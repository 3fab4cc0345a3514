"""Checkpoints: where a model's tensors come from.

A checkpoint gives read access to stored tensors under transformers' names. A model does not
read it directly: it takes tensors through a `TensorTaker`, which checks that every wanted tensor
is there with the wanted shape, and that every stored tensor was wanted.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from surefoot.errors import ModelError, WeightsError
from surefoot.weights.checkpoint import Checkpoint
from surefoot.weights.compressed import CompressedCheckpoint, Scheme, scheme_of
from surefoot.weights.deepseek_v4 import RenamedCheckpoint, is_deepseek_v4, open_deepseek_v4
from surefoot.weights.fp8 import BlockScaledCheckpoint, scaled_block
from surefoot.weights.modelslim import ModelSlimCheckpoint, find_description, read_decisions
from surefoot.weights.names import listed
from surefoot.weights.taker import TensorTaker

__all__ = [
    "Checkpoint",
    "FolderCheckpoint",
    "TensorTaker",
    "open_checkpoint",
    "read_config",
]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MODELSLIM_INDICES = "quant_model_weight*.safetensors.index.json"

_CONFIG_BYTES = 16 << 20
_INDEX_BYTES = 100 << 20
_PICKLES = ("*.bin", "*.pt", "*.pth")


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class _Shard(Protocol):
    """The part of safetensors' open file that is used here."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


class FolderCheckpoint:
    """A folder in the layout of transformers: config.json and safetensors files.

    With an index, exactly the files it names are read, and index and files must agree. Without,
    `model.safetensors` is read if it is there, otherwise every `*.safetensors` file. Files are
    mapped into memory, not read at once. Pickle files are never opened. What ModelSlim says about
    a quantised folder is not looked at here; see `modelslim`.

    Raises:
        ModelError: config.json is absent, or a JSON file is damaged.
        WeightsError: no safetensors files, a damaged one, an index that does not fit them, a
            tensor stored twice, or a quantisation that is not supported.
    """

    def __init__(self, folder: Path) -> None:
        self.config: Mapping[str, object] = read_config(folder)
        if find_description(folder) is None and scheme_of(self.config) is None:
            scaled_block(self.config, folder)
        self.generation: Mapping[str, object] = {}
        if (folder / "generation_config.json").is_file():
            self.generation = _read_json(folder / "generation_config.json", _CONFIG_BYTES)
        self._shards, self._files = _open_shards(folder)

    def names(self) -> Collection[str]:
        """All tensors that are stored."""
        return self._shards.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one stored tensor, without reading it."""
        return tuple(self._shards[name].get_slice(name).get_shape())

    def encoding(self, name: str) -> str:
        """How one tensor is stored, in safetensors' words, without reading it."""
        return self._shards[name].get_slice(name).get_dtype()

    def file_of(self, name: str) -> str:
        """The name of the file that holds one tensor."""
        return self._files[name]

    def read(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype, usually a view of the mapped file: never write to it."""
        try:
            return self._shards[name].get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(f"tensor {name!r} cannot be read: {error}") from error

    def close(self) -> None:
        """Let go of the files."""
        self._shards = {}


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model folder or a `.gguf` file; block-scaled weights are expanded as they are read.

    Weights that are stored in int8 stay in it: the checkpoint is an Int8Checkpoint then.

    Raises:
        ModelError: there is no such path, or it is neither of them, or it is damaged.
    """
    if path.is_dir():
        stored = FolderCheckpoint(path)
        if (description := find_description(path)) is not None:
            return _open_modelslim(stored, description)
        if (scheme := scheme_of(stored.config)) is not None:
            return _open_compressed(stored, scheme)
        block = scaled_block(stored.config, path)
        if is_deepseek_v4(stored.config):
            return open_deepseek_v4(stored, block)
        return stored if block is None else BlockScaledCheckpoint(stored, block)
    _require_gguf(path)
    from surefoot.weights.gguf import GgufCheckpoint

    return GgufCheckpoint(path)


def _open_modelslim(stored: FolderCheckpoint, description: Path) -> ModelSlimCheckpoint:
    content = _read_json(description, _INDEX_BYTES)
    if not is_deepseek_v4(stored.config):
        return ModelSlimCheckpoint(stored, read_decisions(content, description))
    renamed = RenamedCheckpoint(stored)
    return ModelSlimCheckpoint(renamed, read_decisions(content, description, renamed.stored_name))


def _open_compressed(stored: FolderCheckpoint, scheme: Scheme) -> CompressedCheckpoint:
    if not is_deepseek_v4(stored.config):
        return CompressedCheckpoint(stored, scheme)
    renamed = RenamedCheckpoint(stored)
    return CompressedCheckpoint(renamed, scheme, renamed.stored_name)


def is_stored_in_int8(path: Path) -> bool:
    """Whether the weights of a folder, and not its config, say how much of them is in int8.

    Raises:
        ModelError: there is no config, or it is damaged or not supported.
    """
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        return False
    return find_description(path) is not None or scheme_of(read_config(path)) is not None


def read_config(path: Path) -> Mapping[str, object]:
    """Return the config of a model folder or `.gguf` file; a folder needs no weights for that.

    Raises:
        ModelError: there is none, or it is damaged.
    """
    if not path.is_dir():
        checkpoint = open_checkpoint(path)
        checkpoint.close()
        return checkpoint.config
    if (path / "config.json").is_file():
        return _read_json(path / "config.json", _CONFIG_BYTES)
    files = sorted(file.name for file in path.glob("*.gguf"))
    advice = f"; to run {files[0]}, name that file" if files else ""
    raise ModelError(f"{path} has no config.json, so it is not a model folder{advice}")


def _require_gguf(path: Path) -> None:
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is neither a model folder nor a .gguf file")


def _read_json(path: Path, limit: int) -> dict[str, object]:
    """Read a JSON object of at most `limit` bytes."""
    try:
        raw = path.read_bytes() if path.stat().st_size <= limit else None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if raw is None:
        raise ModelError(f"{path} is larger than {limit >> 20} MiB, which no such file is")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _open_shards(folder: Path) -> tuple[dict[str, _Shard], dict[str, str]]:
    """Map the name of every tensor in the folder to the file that holds it, opened and by name."""
    index_path = _find_index(folder)
    index = None if index_path is None else _read_index(index_path)
    files = _files_without_index(folder) if index is None else sorted(set(index.values()))
    shards: dict[str, _Shard] = {}
    homes: dict[str, str] = {}
    for file in files:
        shard = _open_shard(folder / file)
        names = shard.keys()
        for name in names:
            if name in homes:
                raise WeightsError(f"{folder}: {homes[name]} and {file} both hold tensor {name!r}")
        homes.update(dict.fromkeys(names, file))
        shards.update(dict.fromkeys(names, shard))
    if index is not None and index_path is not None:
        _check_index(index_path, index, homes)
    return shards, homes


def _find_index(folder: Path) -> Path | None:
    """The index of a folder: ModelSlim's, which has another name, or the usual one."""
    names = [*sorted(file.name for file in folder.glob(MODELSLIM_INDICES)), INDEX_NAME]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_index(path: Path) -> dict[str, str]:
    """Return the index's map from tensor to file name, whose files lie in the same folder."""
    weight_map = _read_json(path, _INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path} must hold an object weight_map from tensors to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise WeightsError(f"{path}: {file!r}, given for tensor {name!r}, is not a file name")
        if not file.endswith(".safetensors"):
            raise WeightsError(f"{path}: {file!r} is not a .safetensors file")
    for file in sorted(set(weight_map.values())):
        if not (path.parent / file).is_file():
            raise WeightsError(f"{path} names {file}, which is not there; fetch it again")
    return weight_map


def _check_index(path: Path, index: Mapping[str, str], homes: Mapping[str, str]) -> None:
    if absent := index.keys() - homes.keys():
        first = min(absent)
        raise WeightsError(
            f"{path} names {len(absent)} tensors that the files do not hold, among them {first!r} "
            f"in {index[first]}"
        )
    if extra := homes.keys() - index.keys():
        raise WeightsError(f"{path} leaves out tensors that the files hold: {listed(extra)}")
    for name, file in index.items():
        if homes[name] != file:
            raise WeightsError(f"{path} places {name!r} in {file}, but {homes[name]} holds it")


def _files_without_index(folder: Path) -> list[str]:
    if (folder / SINGLE_NAME).is_file():
        return [SINGLE_NAME]
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise WeightsError(
            f"{folder} holds only pickled weights ({pickles[0]}). These can run code and are never "
            "opened; save the model again with transformers, which writes safetensors"
        )
    raise WeightsError(f"{folder} holds no *.safetensors files")


def _open_shard(path: Path) -> _Shard:
    try:
        return cast(_Shard, safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        reason = _pointer_reason(path) or f"is damaged or incomplete: {error}"
        raise WeightsError(f"{path} {reason}") from error


def _pointer_reason(path: Path) -> str | None:
    """Explain a file that is only a stand-in for the real one, or return None."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(24).startswith(b"version https://git-lfs"):
            return "is a Git LFS pointer, not the weights; run `git lfs pull` in its folder"
    return None
