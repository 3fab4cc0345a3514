"""ModelSlim's folders: what is read, and every way in which they may contradict themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from surefoot.backend.operands import FixedInput, Int8Weight
from surefoot.errors import WeightsError
from surefoot.weights.load import INDEX_NAME, TensorTaker, open_checkpoint
from surefoot.weights.modelslim import ModelSlimCheckpoint
from tests.unit.weights.files import matching_index, write_folder, write_json
from tests.unit.weights.modelslim_files import (
    DESCRIPTION,
    DYNAMIC,
    FLOAT,
    STATIC,
    Tensors,
    dynamic,
    edit,
    static,
    to_modelslim,
)

WEIGHT = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
FLOATS = {**{f"{name}.weight": WEIGHT.clone() for name in "abc"}, "b.bias": torch.ones(6)}
DECISIONS = {"a.weight": DYNAMIC, "b.weight": STATIC}

Said = dict[str, object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Linears a in the dynamic form, b in the static one, c in floats."""
    write_folder(tmp_path, {"model.safetensors": FLOATS})
    return to_modelslim(tmp_path, lambda name: DECISIONS.get(name, FLOAT))


def taker(folder: Path) -> TensorTaker:
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, ModelSlimCheckpoint)
    return TensorTaker(checkpoint, torch.float32, lambda _: None, checkpoint.int8)


def taken(folder: Path, name: str) -> Int8Weight:
    weight = taker(folder).weight(name, (6, 10))
    assert isinstance(weight, Int8Weight)
    return weight


def test_every_tensor_is_what_was_decided(folder: Path) -> None:
    take = taker(folder)
    a, b, c = (take.weight(f"{name}.weight", (6, 10)) for name in "abc")
    assert torch.equal(take.take("b.bias", (6,)), torch.ones(6))
    take.finish()
    assert isinstance(a, Int8Weight)
    assert isinstance(b, Int8Weight)
    assert isinstance(c, Tensor)
    assert torch.equal(c, WEIGHT)
    parts = dynamic(WEIGHT, "a")
    assert torch.equal(a.values, parts["a.weight"])
    assert torch.equal(a.scales, parts["a.weight_scale"][:, 0])
    assert a.fixed is None
    parts = static(WEIGHT, torch.ones(6), "b")
    assert torch.equal(b.values, parts["b.weight"])
    assert torch.equal(b.scales, parts["b.deq_scale"])
    assert isinstance(b.fixed, FixedInput)
    assert (b.fixed.scale, b.fixed.offset) == (float(torch.tensor(0.04)), 3)
    assert torch.equal(b.fixed.added, parts["b.quant_bias"])


def test_how_much_is_int8_is_known_before_it_is_read(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, ModelSlimCheckpoint)
    assert (checkpoint.linears.numbers, checkpoint.linears.outputs) == (120, 12)
    assert set(checkpoint.names()) == {"a.weight", "b.weight", "c.weight", "b.bias"}
    assert checkpoint.shape("a.weight") == (6, 10)
    checkpoint.close()
    assert not checkpoint.names()


def test_scales_may_be_bits_in_whole_numbers(folder: Path) -> None:
    want = taken(folder, "b.weight").scales

    def as_bits(tensors: Tensors, _: Said) -> None:
        tensors["b.deq_scale"] = tensors["b.deq_scale"].view(torch.int32).long()
        tensors["b.input_offset"] = tensors["b.input_offset"].to(torch.int8)

    edit(folder, as_bits)
    assert torch.equal(taken(folder, "b.weight").scales, want)


def test_what_belongs_to_a_weight_may_leave_the_decision_to_it(folder: Path) -> None:
    edit(
        folder,
        lambda _, said: [said.pop(f"a.{part}") for part in ("weight_scale", "weight_offset")],
    )
    assert torch.equal(taken(folder, "a.weight").values, dynamic(WEIGHT, "a")["a.weight"])


def test_another_name_of_the_description_and_an_index_are_found(folder: Path) -> None:
    (folder / DESCRIPTION).rename(folder / "quant_model_description_w8a8.json")
    (folder / "quant_model_weights.safetensors").rename(
        folder / "quant_model_weight_w8a8-1.safetensors"
    )
    save_file({"d.weight": WEIGHT}, folder / "other.safetensors")
    tensors = (
        dynamic(WEIGHT, "a") | static(WEIGHT, None, "b") | {"c.weight": WEIGHT, "b.bias": WEIGHT}
    )
    index = matching_index({"quant_model_weight_w8a8-1.safetensors": tensors})
    write_json(folder / "quant_model_weight_w8a8.safetensors.index.json", {"weight_map": index})
    assert set(open_checkpoint(folder).names()) == {"a.weight", "b.weight", "c.weight", "b.bias"}
    write_json(folder / INDEX_NAME, {"weight_map": {"x": "absent.safetensors"}})
    assert isinstance(taken(folder, "a.weight"), Int8Weight), "the usual index is not looked at"


def test_the_description_wins_over_the_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"quantization_config": {"quant_method": "other"}})
    assert isinstance(taken(folder, "a.weight"), Int8Weight)


def forget(name: str) -> Callable[[Tensors, Said], object]:
    return lambda _, said: said.pop(name)


def say(name: str, decision: str) -> Callable[[Tensors, Said], object]:
    return lambda _, said: said.update({name: decision})


def store(name: str, tensor: Tensor) -> Callable[[Tensors, Said], object]:
    return lambda tensors, _: tensors.update({name: tensor})


def drop(name: str) -> Callable[[Tensors, Said], object]:
    return lambda tensors, _: tensors.pop(name)


INT8 = torch.ones(6, 10, dtype=torch.int8)
NO_FLOATS = r"'a\.weight' is stored as int8, which is not read without its scales"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (forget("c.weight"), r"description.json says nothing of tensor 'c.weight'"),
        (
            say("c.weight", "W4A4_DYNAMIC"),
            r"says 'W4A4_DYNAMIC' of tensor 'c.weight', which is not",
        ),
        (say("b.bias", "C8"), r"says 'C8' of tensor 'b.bias'"),
        (
            say("c.weight", DYNAMIC),
            r"'c.weight' is decided to be W8A8_DYNAMIC, and it is stored as F32",
        ),
        (say("a.weight", FLOAT), r"'a.weight' is decided to be FLOAT, and it is stored as I8"),
        (store("c.weight", INT8), r"'c.weight' is decided to be FLOAT, and it is stored as I8"),
        (store("b.weight", WEIGHT), r"'b.weight' is decided to be W8A8, and it is stored as F32"),
        (
            store("a.weight", INT8[0].clone()),
            r"'a.weight' is decided to be .* no weight of a linear",
        ),
        (drop("a.weight_scale"), r"lack tensors that belong to them: a.weight_scale"),
        (drop("b.quant_bias"), r"lack tensors that belong to them: b.quant_bias"),
        (say("a.weight", STATIC), r"lack tensors that belong to them: a.deq_scale, a.input_offset"),
    ],
)
def test_a_contradiction_is_named_when_the_folder_is_opened(
    change: Callable[[Tensors, Said], object], message: str, folder: Path
) -> None:
    edit(folder, change)
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        (store("a.weight_offset", torch.full((6, 1), 0.5)), "a", "'a.weight_offset' must be zero"),
        (store("a.weight_scale", torch.ones(6, 2)), "a", r"'a.weight_scale' has shape \[6, 2\]"),
        (store("a.weight_scale", torch.ones(6).int()), "a", r"'a.weight_scale' .* in torch.int32"),
        (store("b.deq_scale", torch.ones(5)), "b", r"'b.deq_scale' has shape \[5\]"),
        (store("b.quant_bias", torch.ones(6)), "b", r"'b.quant_bias' .* in torch.float32"),
        (store("b.input_scale", torch.zeros(1)), "b", "'b.input_scale' must be above 0: 0.0"),
        (store("b.input_scale", torch.ones(2)), "b", "'b.input_scale' must be a single number"),
        (store("b.input_offset", torch.tensor([0.5])), "b", "'b.input_offset' must be a whole"),
        (store("b.input_offset", torch.tensor([200.0])), "b", "'b.input_offset' must be a whole"),
        (
            store("b.input_offset", torch.tensor([math.nan])),
            "b",
            "'b.input_offset' must be a whole",
        ),
    ],
)
def test_what_belongs_to_a_weight_must_fit_it(
    change: Callable[[Tensors, Said], object], name: str, message: str, folder: Path
) -> None:
    edit(folder, change)
    with pytest.raises(WeightsError, match=message):
        taken(folder, f"{name}.weight")


def test_codes_are_never_taken_for_floats(folder: Path) -> None:
    """The fault that gave drafts nobody accepts: codes copied into a weight of floats."""
    with pytest.raises(WeightsError, match=NO_FLOATS):
        taker(folder).take("a.weight", (6, 10))
    careless = TensorTaker(open_checkpoint(folder), torch.float32, lambda _: None)
    with pytest.raises(WeightsError, match=NO_FLOATS):
        careless.weight("a.weight", (6, 10))


def test_scales_without_a_weight_are_not_used(folder: Path) -> None:
    def move(tensors: Tensors, said: Said) -> None:
        tensors["z.weight_scale"], said["z.weight_scale"] = torch.ones(6, 1), FLOAT

    edit(folder, move)
    assert "z.weight_scale" in open_checkpoint(folder).names()


def test_two_descriptions_are_one_too_many(folder: Path) -> None:
    write_json(folder / "quant_model_description_w8a8.json", {})
    with pytest.raises(WeightsError, match="more than one description of its weights"):
        open_checkpoint(folder)


def test_rotations_on_the_way_are_refused(folder: Path) -> None:
    edit(folder, lambda _, said: said.update({"metadata": {"quarot": {"layers": [1]}}}))
    with pytest.raises(WeightsError, match=r"rotations while the model runs \(metadata.quarot\)"):
        open_checkpoint(folder)
    edit(folder, lambda _, said: said.update({"metadata": {}, "optional": {"quarot": {}}}))
    assert isinstance(taken(folder, "a.weight"), Int8Weight)
