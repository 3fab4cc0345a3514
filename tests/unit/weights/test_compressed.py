"""compressed-tensors in int8: what is read, and all else that such a config may say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.backend.operands import Int8Weight
from surefoot.errors import WeightsError
from surefoot.weights.compressed import CompressedCheckpoint
from surefoot.weights.counts import Linears
from surefoot.weights.load import TensorTaker, is_stored_in_int8, open_checkpoint
from tests.unit.model.edits import edit_config, edit_weights
from tests.unit.weights.compressed_files import Details, details, to_compressed
from tests.unit.weights.files import write_folder
from tests.unit.weights.modelslim_files import dynamic

WEIGHT = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Linears a and b in int8, c and lm_head in floats."""
    names = ("model.a", "model.b", "model.c", "lm_head")
    write_folder(
        tmp_path, {"model.safetensors": {f"{name}.weight": WEIGHT.clone() for name in names}}
    )
    eight = ("model.a.weight", "model.b.weight")
    return to_compressed(tmp_path, lambda name: name in eight, ("lm_head", r"re:.*\.c$"))


def opened(folder: Path) -> CompressedCheckpoint:
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, CompressedCheckpoint)
    return checkpoint


def test_weights_are_what_is_stored(folder: Path) -> None:
    checkpoint = opened(folder)
    take = TensorTaker(checkpoint, torch.float32, lambda _: None, checkpoint.int8)
    a, b, c, head = (
        take.weight(f"{name}.weight", (6, 10))
        for name in ("model.a", "model.b", "model.c", "lm_head")
    )
    take.finish()
    parts = dynamic(WEIGHT, "a")
    for weight in (a, b):
        assert isinstance(weight, Int8Weight)
        assert torch.equal(weight.values, parts["a.weight"])
        assert torch.equal(weight.scales, parts["a.weight_scale"][:, 0])
    for weight in (c, head):
        assert isinstance(weight, Tensor)
        assert torch.equal(weight, WEIGHT)
    assert checkpoint.linears == Linears(120, 12)
    assert checkpoint.shape("model.a.weight") == (6, 10)
    assert is_stored_in_int8(folder)
    checkpoint.close()
    assert not checkpoint.names()


def test_the_older_key_and_other_targets_read_as_well(folder: Path) -> None:
    said = details(["lm_head", "model.c"])
    said["config_groups"]["group_0"]["targets"] = [r"re:model\.a", "model.b"]
    said["config_groups"]["group_0"]["weights"]["group_size"] = -1
    edit_config(folder, quantization_config=None, compression_config=said)
    assert opened(folder).linears.numbers == 120


def changed(*path: str, to: object) -> Callable[[Details], object]:
    def change(said: Details) -> None:
        for key in path[:-1]:
            said = said[key]
        said[path[-1]] = to

    return change


GROUP = ("config_groups", "group_0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("format", to="pack-quantized"), "format is 'pack-quantized'.*'int-quantized'"),
        (changed("format", to="float-quantized"), "format is 'float-quantized'"),
        (changed("kv_cache_scheme", to={"num_bits": 8}), "kv_cache_scheme is {'num_bits': 8}"),
        (changed("sparsity_config", to={"format": "dense"}), "sparsity_config is"),
        (changed("transform_config", to={"R1": {}}), "transform_config is"),
        (changed("novelty", to=1), "novelty is 1"),
        (changed("config_groups", to={}), "config_groups is {}"),
        (changed(*GROUP, "weights", "num_bits", to=4), "group_0.weights.num_bits is 4"),
        (changed(*GROUP, "weights", "num_bits", to={"mlp": 4}), "num_bits is {'mlp': 4}"),
        (changed(*GROUP, "weights", "type", to="float"), "weights.type is 'float'"),
        (changed(*GROUP, "weights", "symmetric", to=False), "weights.symmetric is False"),
        (changed(*GROUP, "weights", "symmetric", to=1), "weights.symmetric is 1"),
        (changed(*GROUP, "weights", "strategy", to="group"), "weights.strategy is 'group'"),
        (changed(*GROUP, "weights", "group_size", to=128), "weights.group_size is 128"),
        (changed(*GROUP, "weights", "novelty", to=1), "weights.novelty is 1"),
        (changed(*GROUP, "input_activations", to=None), "input_activations is None"),
        (
            changed(*GROUP, "input_activations", "dynamic", to=False),
            "input_activations.dynamic is False",
        ),
        (
            changed(*GROUP, "input_activations", "strategy", to="tensor"),
            "input_activations.strategy is 'tensor'",
        ),
        (changed(*GROUP, "output_activations", to={"num_bits": 8}), "output_activations is"),
        (changed(*GROUP, "format", to="pack-quantized"), "group_0.format is 'pack-quantized'"),
        (changed(*GROUP, "novelty", to=1), "group_0.novelty is 1"),
        (changed(*GROUP, "targets", to="Linear"), "targets is 'Linear'"),
        (changed("ignore", to=["re:("]), r"ignore is 're:\('"),
        (changed(*GROUP, to=[]), r"group_0 is \[\]"),
    ],
)
def test_anything_else_in_the_config_is_named(
    change: Callable[[Details], object], message: str, folder: Path
) -> None:
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    change(said)
    edit_config(folder, quantization_config=said)
    with pytest.raises(WeightsError, match=f"quantization_config in config.json says .*{message}"):
        open_checkpoint(folder)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("lm_head.weight", WEIGHT.char()), "'lm_head.weight' is stored as I8, .*leaves it out"),
        (put("model.c.weight", WEIGHT.char()), "'model.c.weight' is stored as I8, .*leaves it out"),
        (put("model.d.bias", WEIGHT.char()), "'model.d.bias' is stored as I8, .*no weight of a"),
        (put("model.d.weight", WEIGHT[0].char()), "'model.d.weight' .* is no weight of a linear"),
        (put("model.d.weight", WEIGHT.char()), "lack their scales: model.d.weight_scale"),
        (
            put("model.c.weight_scale", WEIGHT),
            "'model.c.weight_scale' belongs to no weight in int8",
        ),
        (
            put("model.d.weight_packed", WEIGHT.int()),
            "'model.d.weight_packed' belongs to no weight",
        ),
        (put("model.a.weight_zero_point", WEIGHT), "'model.a.weight_zero_point' belongs to no"),
        (
            put("model.a.weight_scale", torch.ones(6, 2)),
            r"'model.a.weight_scale' has shape \[6, 2\]",
        ),
        (put("model.a.weight_scale", torch.ones(6).int()), r"weight_scale' .* in torch.int32"),
    ],
)
def test_what_is_not_as_the_config_says_is_named(
    change: Callable[[dict[str, Tensor]], object], message: str, folder: Path
) -> None:
    edit_weights(folder, change)
    with pytest.raises(WeightsError, match=message):
        opened(folder).int8("model.a.weight", lambda: WEIGHT)


def test_a_folder_of_floats_is_not_stored_in_int8(tmp_path: Path) -> None:
    write_folder(tmp_path, {"model.safetensors": {"a.weight": WEIGHT}})
    assert not is_stored_in_int8(tmp_path)
    assert not is_stored_in_int8(tmp_path / "config.json")
