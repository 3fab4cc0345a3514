"""Turns a folder of floats into one as ModelSlim writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FLOAT, DYNAMIC, STATIC = "FLOAT", "W8A8_DYNAMIC", "W8A8"
INPUT_SCALE, INPUT_OFFSET = 0.04, 3
DESCRIPTION, WEIGHTS = "quant_model_description.json", "quant_model_weights.safetensors"

Decide = Callable[[str], str]
Tensors = dict[str, Tensor]


def to_modelslim(folder: Path, decide: Decide, rename: Callable[[str], str] = str) -> Path:
    """Quantise the weights of linears as `decide` says of their names, and describe all tensors.

    Args:
        folder: changed in place.
        decide: from a tensor's name to a decision.
        rename: from a tensor's name to that in the files.
    """
    stored: Tensors = {}
    said: dict[str, object] = {"model_quant_type": DYNAMIC, "version": "1.0.0", "group_size": 0}
    floats = load_file(folder / "model.safetensors")
    for name, tensor in floats.items():
        module, decision = name.removesuffix(".weight"), decide(name)
        parts = {name: tensor}
        if decision == DYNAMIC:
            parts = dynamic(tensor, module)
        elif decision == STATIC:
            parts = static(tensor, floats.get(module + ".bias"), module)
        for part, value in parts.items():
            stored[rename(part)], said[rename(part)] = value.contiguous(), decision
    (folder / "model.safetensors").unlink()
    save_file(stored, folder / WEIGHTS)
    (folder / DESCRIPTION).write_text(json.dumps(said))
    return folder


def dynamic(weight: Tensor, module: str) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {
        f"{module}.weight": torch.round(weight / scale).to(torch.int8),
        f"{module}.weight_scale": scale,
        f"{module}.weight_offset": torch.zeros_like(scale),
    }


def static(weight: Tensor, bias: Tensor | None, module: str) -> Tensors:
    parts = dynamic(weight, module)
    values, scale = parts[f"{module}.weight"], parts[f"{module}.weight_scale"][:, 0]
    combined = scale * INPUT_SCALE
    added = torch.zeros(len(weight)) if bias is None else bias / combined
    added = added - INPUT_OFFSET * values.float().sum(1)
    return {
        f"{module}.weight": values,
        f"{module}.input_scale": torch.tensor([INPUT_SCALE]),
        f"{module}.input_offset": torch.tensor([float(INPUT_OFFSET)]),
        f"{module}.quant_bias": added.round().to(torch.int32),
        f"{module}.deq_scale": combined,
    }


def edit(folder: Path, change: Callable[[Tensors, dict[str, object]], object]) -> None:
    """Change tensors and what is said of them."""
    tensors, path = load_file(folder / WEIGHTS), folder / DESCRIPTION
    said = json.loads(path.read_text())
    change(tensors, said)
    save_file(tensors, folder / WEIGHTS)
    path.write_text(json.dumps(said))
