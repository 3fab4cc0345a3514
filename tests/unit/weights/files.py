"""Writes small model files for the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

CONFIG: Mapping[str, object] = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4}

Arrays = Mapping[str, npt.NDArray[np.generic]]


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def write_folder(
    folder: Path,
    shards: Mapping[str, Mapping[str, torch.Tensor]],
    index: Mapping[str, str] | None = None,
    config: Mapping[str, object] = CONFIG,
) -> Path:
    """Write a model folder of the given shards, with an index if one is given."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", config)
    for file, tensors in shards.items():
        save_file(dict(tensors), folder / file)
    if index is not None:
        write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    return folder


def matching_index(shards: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, str]:
    return {name: file for file, tensors in shards.items() for name in tensors}


def gguf_keys(
    arch: str = "llama", changes: Mapping[str, object] = MappingProxyType({})
) -> dict[str, object]:
    """Metadata of a small model; `changes` replace or, when None, remove keys under `arch`."""
    keys: dict[str, object] = {
        "context_length": 128,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
    }
    keys |= changes
    return {f"{arch}.{key}": value for key, value in keys.items() if value is not None}


def write_gguf(path: Path, arch: str, keys: Mapping[str, object], tensors: Arrays) -> Path:
    """Write a .gguf file; a tensor of uint8 counts as Q8_0."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        _add_key(writer, key, value)
    for name, array in tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if array.dtype == np.uint8 else None
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        raise TypeError(key)


def embedding(rows: int = 48, width: int = 32) -> dict[str, npt.NDArray[np.generic]]:
    """The one tensor that every GGUF model must have."""
    return {"token_embd.weight": np.zeros((rows, width), np.float32)}
