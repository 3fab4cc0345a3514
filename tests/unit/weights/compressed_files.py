"""Turns a folder of floats into one of compressed-tensors in int8."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.weights.modelslim_files import dynamic

Details = dict[str, Any]


def details(ignore: Collection[str] = ()) -> Details:
    """What a config says of its quantisation, as the format's tools write it."""
    return {
        "config_groups": {
            "group_0": {
                "input_activations": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": True,
                    "group_size": None,
                    "num_bits": 8,
                    "observer": None,
                    "observer_kwargs": {},
                    "strategy": "token",
                    "symmetric": True,
                    "type": "int",
                },
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": None,
                    "num_bits": 8,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "strategy": "channel",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "format": "int-quantized",
        "global_compression_ratio": 1.5,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def to_compressed(
    folder: Path,
    wanted: Callable[[str], bool],
    ignore: Collection[str] = ("lm_head",),
    rename: Callable[[str], str] = str,
) -> Path:
    """Quantise the weights that are `wanted`, in place."""
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if wanted(name):
            parts = dynamic(tensor, name.removesuffix(".weight"))
            del parts[name.removesuffix("weight") + "weight_offset"]
        else:
            parts = {name: tensor}
        stored |= {rename(part): value.contiguous() for part, value in parts.items()}
    save_file(stored, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": details(ignore)})
    )
    return folder
