"""Turns a folder of floats into one as ModelSlim writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FLOAT, DYNAMIC, STATIC, FOUR = "FLOAT", "W8A8_DYNAMIC", "W8A8", "W4A8_DYNAMIC"
INPUT_SCALE, INPUT_OFFSET = 0.04, 3
DESCRIPTION, WEIGHTS = "quant_model_description.json", "quant_model_weights.safetensors"

Decide = Callable[[str], str]
Tensors = dict[str, Tensor]


def to_modelslim(
    folder: Path,
    decide: Decide,
    rename: Callable[[str], str] = str,
    four: Callable[[Tensor, str], Tensors] | None = None,
) -> Path:
    """Quantise the weights of linears as `decide` says of their names, and describe all tensors.

    Args:
        folder: changed in place.
        decide: from a tensor's name to a decision.
        rename: from a tensor's name to that in the files.
        four: what is stored for a weight in 4 bits and its module; by default `four_bits`.
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
        elif decision == FOUR:
            parts = (four or four_bits)(tensor, module)
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


def four_bits(weight: Tensor, module: str, size: int = 0, pairs: bool = True) -> Tensors:
    """In 4 bits, two in a byte as version 1.0.0 has it; groups of `size` inputs, 0 for none."""
    parts = weight.unflatten(1, (-1, size or weight.shape[1]))
    outputs = weight.abs().amax(1, keepdim=True) / 127
    scales = parts.abs().amax(2) / 7
    combined = (outputs * (scales / outputs)).half().float() if size else scales
    codes = torch.round(parts / combined[..., None]).clamp(-8, 7)
    stored = codes.flatten(1).to(torch.int8)
    bytes_of_two = (stored[0::2] & 15) + 16 * stored[1::2]
    kept = {
        f"{module}.weight": bytes_of_two if pairs else stored,
        f"{module}.weight_scale": outputs if size else scales,
        f"{module}.weight_offset": torch.zeros_like(outputs),
        f"{module}.scale_bias": 8 * (codes * combined[..., None]).sum((1, 2))[:, None],
    }
    if size:
        kept[f"{module}.weight_scale_second"] = scales / outputs
        kept[f"{module}.weight_offset_second"] = torch.zeros_like(scales)
    return kept


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
