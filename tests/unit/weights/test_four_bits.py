"""Weights in 4 bits: how ModelSlim stores them, and every way in which they may be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.backend.operands import Int8Weight
from surefoot.backend.plain_int8 import quantise_groups
from surefoot.errors import WeightsError
from surefoot.weights.counts import Linears, group_size
from surefoot.weights.four_bits import packed, unpacked
from surefoot.weights.load import TensorTaker, open_checkpoint
from surefoot.weights.modelslim import ModelSlimCheckpoint
from tests.unit.weights.files import write_folder
from tests.unit.weights.modelslim_files import (
    DYNAMIC,
    FLOAT,
    FOUR,
    Tensors,
    edit,
    four_bits,
    to_modelslim,
)
from tests.unit.weights.test_modelslim import drop, say, store

WEIGHT = torch.randn(6, 12, generator=torch.Generator().manual_seed(1))
ONES = torch.ones(6, 1)
Said = dict[str, object]
Change = Callable[[Tensors, Said], object]


def write(folder: Path, size: int = 0, pairs: bool = True) -> Path:
    """Linear a in 4 bits, b in 8, c in floats."""
    decisions = {"a.weight": FOUR, "b.weight": DYNAMIC}
    write_folder(
        folder, {"model.safetensors": {f"{name}.weight": WEIGHT.clone() for name in "abc"}}
    )

    def four(weight: Tensor, module: str) -> Tensors:
        return four_bits(weight, module, size, pairs)

    to_modelslim(folder, lambda name: decisions.get(name, FLOAT), four=four)
    version = "1.0.0" if pairs else "0"
    edit(folder, lambda _, said: said.update(group_size=size, version=version))
    return folder


def taken(folder: Path, name: str = "a") -> Int8Weight:
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, ModelSlimCheckpoint)
    take = TensorTaker(checkpoint, torch.float32, lambda _: None, checkpoint.int8)
    weight = take.weight(f"{name}.weight", (6, 12))
    assert isinstance(weight, Int8Weight)
    return weight


def worth(weight: Int8Weight) -> Tensor:
    """The numbers that a weight stands for."""
    groups = max(weight.groups, 1)
    parts = weight.values.float().unflatten(1, (groups, -1))
    whole: Tensor = parts * weight.scales.view(6, groups, 1)
    return whole.flatten(1)


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("size", [0, 4, 6, 12])
def test_it_stands_for_what_was_written(size: int, pairs: bool, tmp_path: Path) -> None:
    weight = taken(write(tmp_path, size, pairs))
    assert weight.groups == (12 // size if 0 < size < 12 else 0)
    parts = WEIGHT.unflatten(1, (-1, size or 12))
    step = (parts.abs().amax(2) / 7)[..., None].expand(parts.shape).flatten(1)
    assert ((worth(weight) - WEIGHT).abs() <= 0.501 * step).all()
    assert int(weight.values.max()) <= 7
    assert int(weight.values.min()) >= -8


def test_all_is_found_beside_what_is_stored_otherwise(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, 4))
    assert isinstance(checkpoint, ModelSlimCheckpoint)
    assert set(checkpoint.names()) == {"a.weight", "b.weight", "c.weight"}
    assert checkpoint.shape("a.weight") == (6, 12)
    assert checkpoint.linears == Linears(2 * 72, 6 * 3 + 6)
    assert taken(tmp_path, "b").groups == 0


def test_scales_are_rounded_to_float16_where_two_are_multiplied(tmp_path: Path) -> None:
    for size in (0, 4):
        folder = write(tmp_path / str(size), size)
        scales = taken(folder).scales
        assert torch.equal(scales, scales.half().float()) == (size > 0)


def test_what_is_added_for_the_vendor_s_kernel_may_be_split_or_missing(tmp_path: Path) -> None:
    want = taken(write(tmp_path, 4))
    for change in (store("a.scale_bias", torch.zeros(6, 16)), drop("a.scale_bias")):
        edit(tmp_path, change)
        got = taken(tmp_path)
        assert torch.equal(got.values, want.values)
        assert torch.equal(got.scales, want.scales)


def test_without_a_word_about_groups_their_scales_tell(tmp_path: Path) -> None:
    write(tmp_path, 4)
    for change in (say("group_size", 0), drop_word("group_size")):  # type: ignore[arg-type]
        edit(tmp_path, change)
        assert taken(tmp_path).groups == 3


def test_inputs_that_the_group_size_does_not_divide_have_other_groups(tmp_path: Path) -> None:
    write(tmp_path, 4)
    edit(tmp_path, say("group_size", 8))  # type: ignore[arg-type]
    assert taken(tmp_path).groups == 3


def drop_word(key: str) -> Change:
    return lambda _, said: said.pop(key)


INT8 = torch.full((3, 12), 0x19, dtype=torch.int8)


def test_pairs_are_packed_with_the_even_output_below() -> None:
    codes = torch.randint(-8, 8, (6, 5), generator=torch.Generator().manual_seed(2)).char()
    assert torch.equal(unpacked(packed(codes)), codes)
    assert unpacked(torch.tensor([[0x19]], dtype=torch.int8)).tolist() == [[-7], [1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (store("a.weight_scale", torch.ones(3, 1)), r"'a.weight_scale' has shape \[3, 1\]"),
        (store("a.weight_offset", ONES), "'a.weight_offset' must be zero"),
        (drop("a.weight_scale"), "lack tensors that belong to them: a.weight_scale"),
        (drop("a.weight_scale_second"), "that belong to them: a.weight_scale_second"),
        (drop("a.weight_offset_second"), "that belong to them: a.weight_offset_second"),
        (
            store("a.weight_scale_second", torch.ones(6, 5)),
            r"'a.weight_scale_second' has 5 groups, which cannot share 12 inputs",
        ),
        (
            store("a.weight_scale_second", torch.ones(6, 2)),
            r"'a.weight_scale_second' has groups of 6 inputs, and the description says 4",
        ),
        (store("a.weight_scale_second", torch.ones(3, 3)), r"second' has shape \[3, 3\] in"),
        (store("a.weight_scale_second", torch.ones(6, 3).int()), r"6 outputs need a row of floats"),
        (
            store("a.weight_offset_second", torch.ones(6, 2)),
            r"'a.weight_offset_second' has shape \[6, 2\] where \[6, 3\]",
        ),
        (
            store("a.weight_offset_second", torch.ones(6, 3)),
            "'a.weight_offset_second' must be zero",
        ),
        (store("a.weight_scale_second", torch.full((6, 3), 1e9)), "not finite numbers"),
        (store("a.weight_scale", torch.full((6, 1), torch.nan)), "not finite numbers"),
        (store("a.scale_bias", torch.ones(6, 4)), r"'a.scale_bias' has shape \[6, 4\]"),
        (store("a.scale_bias", torch.ones(6, 1).int()), r"'a.scale_bias' .* in torch.int32"),
        (store("a.scale_bias", torch.full((6, 1), torch.inf)), "'a.scale_bias' must hold finite"),
        (say("version", "0"), r"'a.weight' has shape \[3, 12\]"),
        (say("a.weight", DYNAMIC), r"'a.weight' has shape \[3, 12\]"),
        (say("a.weight", FLOAT), "'a.weight' is decided to be FLOAT, and it is stored as I8"),
        (store("a.weight", INT8.repeat(2, 1)), r"'a.weight' has shape \[12, 12\]"),
    ],
)
def test_what_does_not_belong_together_is_named(
    change: Change, message: str, tmp_path: Path
) -> None:
    write(tmp_path, 4)
    edit(tmp_path, change)
    with pytest.raises(WeightsError, match=message):
        taken(tmp_path)


@pytest.mark.parametrize("size", [0, 4])
def test_scales_of_groups_and_their_offsets_come_together(size: int, tmp_path: Path) -> None:
    """Where the description says that there are groups, both; else both or none."""
    write(tmp_path, 4)
    edit(tmp_path, say("group_size", size))  # type: ignore[arg-type]
    edit(tmp_path, drop("a.weight_offset_second"))
    with pytest.raises(WeightsError, match=r"belong to them: a.weight_offset_second$"):
        taken(tmp_path)
    edit(tmp_path, drop("a.weight_scale_second"))
    if size:
        with pytest.raises(WeightsError, match=r"offset_second, a.weight_scale_second$"):
            taken(tmp_path)
    else:
        assert taken(tmp_path).groups == 0


def test_codes_of_eight_bits_are_not_taken_for_codes_of_four(tmp_path: Path) -> None:
    write(tmp_path, 4, pairs=False)
    edit(tmp_path, store("a.weight", INT8.repeat(2, 1)))
    with pytest.raises(WeightsError, match=r"'a.weight' must hold numbers of 4 bits"):
        taken(tmp_path)


def test_scales_of_groups_beside_a_weight_in_eight_bits_are_left_over(tmp_path: Path) -> None:
    write(tmp_path, 4)

    def add(tensors: Tensors, said: Said) -> None:
        tensors["b.weight_scale_second"], said["b.weight_scale_second"] = ONES.clone(), DYNAMIC

    edit(tmp_path, add)
    assert "b.weight_scale_second" in open_checkpoint(tmp_path).names()


@pytest.mark.parametrize(
    ("inputs", "size"), [(4096, 128), (576, 64), (96, 32), (33, 33), (128, 128), (48, 48)]
)
def test_groups_are_as_large_as_the_inputs_allow(inputs: int, size: int) -> None:
    assert group_size(inputs) == size
    groups = inputs // size
    assert Linears.feed(inputs, inputs).groups == 3 * inputs * groups
    weight = quantise_groups(torch.randn(2, 3, inputs), size)
    assert weight.scales.shape == ((2, 3, groups) if groups > 1 else (2, 3))


def test_weights_become_the_nearest_codes_of_four_bits() -> None:
    weight = torch.randn(20, 64, generator=torch.Generator().manual_seed(3))
    weight[3, :32], weight[4, 5], weight[5, 0] = 0, torch.nan, 1e6
    made = quantise_groups(weight, 32)
    assert int(made.values.abs().max()) == 7
    exact = weight.unflatten(1, (2, 32)).abs().amax(2) / 7
    sound = torch.ones(20, 2, dtype=torch.bool)
    sound[3, 0], sound[4, 0], sound[5, 0] = False, False, False
    assert torch.equal(made.scales[sound], exact.half().float()[sound])
    assert made.scales[3, 0] == 1
    assert made.scales[4, 0].isnan()
    assert made.scales[5, 0].isnan(), "too large for float16, and it says so"
    error = made.values.float().unflatten(1, (2, 32)) * made.scales[..., None]
    error = (error - weight.unflatten(1, (2, 32))).abs()[sound]
    assert (error <= 0.502 * made.scales[sound][:, None]).all()
    assert quantise_groups(torch.tensor([[7.0, 0.5, 1.5, -2.5]]), 4).values.tolist() == [
        [7, 0, 2, -2]
    ]
