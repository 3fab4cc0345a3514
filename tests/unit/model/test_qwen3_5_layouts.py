"""Layouts of the hybrid family's files: names, experts, row orders, 8-bit blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from surefoot.backend.cpu import CpuBackend
from surefoot.errors import WeightsError
from surefoot.model.qwen3_5 import describe
from surefoot.model.qwen3_5_config import read_config
from surefoot.testing.tiny_hybrids import NEXT, write_tiny_hybrid
from tests.unit.backend.cuts import Setting, alone, sequences_of
from tests.unit.model.edits import Tensors, edit_config, edit_weights
from tests.unit.model.settling import SettlingMachine
from tests.unit.model.test_qwen3_5 import (
    EXPERTS,
    WRAPPED,
    load_folder,
)

SETTING = Setting(sequences_of(4, 64, (20, 3)), page_tokens=8, depth=2)


def logits_of(folder: Path) -> Tensor:
    machine = SettlingMachine(load_folder(folder), CpuBackend(bitwise=True), SETTING)
    return torch.cat(machine.play(alone(SETTING.lengths)))


def renamed(old: str, new: str) -> Callable[[Tensors], object]:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return edit


def one_by_one(tensors: Tensors) -> None:
    """Fused experts become single ones."""
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        start = name.removesuffix("gate_up_proj")
        pairs = zip(tensors.pop(name), tensors.pop(start + "down_proj"), strict=True)
        for expert, (gate_up, down) in enumerate(pairs):
            gate, up = gate_up.chunk(2)
            for part, value in (("gate", gate), ("up", up), ("down", down)):
                tensors[f"{start}{expert}.{part}_proj.weight"] = value.clone()


def fused(tensors: Tensors) -> None:
    """Single experts become fused ones."""
    for name in [name for name in tensors if name.endswith("experts.0.gate_proj.weight")]:
        start = name.removesuffix("0.gate_proj.weight")
        parts = {
            part: [tensors.pop(f"{start}{expert}.{part}_proj.weight") for expert in range(6)]
            for part in ("gate", "up", "down")
        }
        pairs = zip(parts["gate"], parts["up"], strict=True)
        tensors[start + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[start + "down_proj"] = torch.stack(parts["down"])


def ungrouped(tensors: Tensors) -> None:
    """Rows stored key head by key head become four linears."""
    for name in [name for name in tensors if name.endswith("in_proj_qkvz.weight")]:
        start = name.removesuffix("qkvz.weight")
        rows: dict[str, list[Tensor]] = {part: [] for part in "qkvzba"}
        heads = [tensors.pop(name).chunk(2), tensors.pop(start + "ba.weight").chunk(2)]
        for qkvz, ba in zip(*heads, strict=True):
            for part, value in zip("qkvz", qkvz.split([8, 8, 24, 24]), strict=True):
                rows[part].append(value)
            for part, value in zip("ba", ba.split([2, 2]), strict=True):
                rows[part].append(value)
        tensors[start + "qkv.weight"] = torch.cat(rows["q"] + rows["k"] + rows["v"])
        for part in "zba":
            tensors[f"{start}{part}.weight"] = torch.cat(rows[part])


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        (EXPERTS, renamed("model.", "model.language_model.")),
        (WRAPPED, renamed("model.language_model.", "model.")),
        (EXPERTS, one_by_one),
        (WRAPPED, one_by_one),
        (NEXT, fused),
        (NEXT, ungrouped),
    ],
    ids=["wrapped", "unwrapped", "single", "wrapped single", "fused", "ungrouped"],
)
def test_the_layout_of_the_file_does_not_matter(
    architecture: str, change: Callable[[Tensors], object], tmp_path: Path
) -> None:
    write_tiny_hybrid(tmp_path, architecture)
    before = set(load_file(tmp_path / "model.safetensors"))
    want = logits_of(tmp_path)
    edit_weights(tmp_path, change)
    assert set(load_file(tmp_path / "model.safetensors")) != before
    assert torch.equal(logits_of(tmp_path), want)


def test_the_wrapper_decides_whether_embeddings_are_tied(tmp_path: Path) -> None:
    write_tiny_hybrid(tmp_path, WRAPPED)
    inner = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_config(tmp_path, text_config=inner | {"tie_word_embeddings": True})
    load_folder(tmp_path)
    edit_config(tmp_path, text_config=inner, tie_word_embeddings=True)
    edit_weights(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    described = describe(json.loads((tmp_path / "config.json").read_text()), "float32", "")
    assert load_folder(tmp_path).description == described


@pytest.mark.parametrize("silence", [{}, {"tie_word_embeddings": None}], ids=["absent", "null"])
def test_a_silent_wrapper_leaves_it_to_the_text_model(
    silence: dict[str, object], tmp_path: Path
) -> None:
    write_tiny_hybrid(tmp_path, WRAPPED)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    for tied in (False, True):
        inner = config["text_config"] | {"tie_word_embeddings": tied}
        assert read_config(config | silence | {"text_config": inner}).tied is tied


def test_a_wrapper_that_ties_nothing_needs_the_head_in_the_file(tmp_path: Path) -> None:
    """The reference would go on with a random head; such a model is of no use to anybody."""
    write_tiny_hybrid(tmp_path, WRAPPED)
    inner = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_config(tmp_path, text_config=inner | {"tie_word_embeddings": True})
    edit_weights(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(WeightsError, match=r"lm_head\.weight"):
        load_folder(tmp_path)


def test_block_scaled_weights_give_the_logits_of_the_expanded_ones(tmp_path: Path) -> None:
    for name in ("plain", "scaled"):
        write_tiny_hybrid(tmp_path / name, EXPERTS, hidden=144, layers=2, interval=2)

    def is_scaled(name: str, value: Tensor) -> bool:
        return "proj" in name and "mtp" not in name and min(value.shape[-2:]) > 4

    def scale(tensors: Tensors) -> None:
        for name in [name for name, value in tensors.items() if is_scaled(name, value)]:
            *lead, rows, columns = tensors[name].shape
            blocks = (*lead, -(-rows // 128), -(-columns // 128))
            factors = torch.linspace(0.001, 0.003, math.prod(blocks))
            tensors[name + "_scale_inv"] = factors.reshape(blocks)
            tensors[name] = (tensors[name] * 400).to(torch.float8_e4m3fn)

    def expand(tensors: Tensors) -> None:
        for name in [name for name, value in tensors.items() if is_scaled(name, value)]:
            stored = load_file(tmp_path / "scaled" / "model.safetensors")
            factors = stored[name + "_scale_inv"].repeat_interleave(128, -2)
            factors = factors.repeat_interleave(128, -1)
            rows, columns = tensors[name].shape[-2:]
            tensors[name] = stored[name].float() * factors[..., :rows, :columns]

    edit_weights(tmp_path / "scaled", scale)
    edit_weights(tmp_path / "plain", expand)
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_config(tmp_path / "scaled", quantization_config=block)
    assert torch.equal(logits_of(tmp_path / "scaled"), logits_of(tmp_path / "plain"))
