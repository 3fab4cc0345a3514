"""Every family in the forms that checkpoints are published in besides floats."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.errors import WeightsError
from tests.unit.model.edits import edit_config, edit_weights
from tests.unit.model.test_int8_models import (
    MODELS,
    _release_names,
    _renamed,
    _with_float_head,
    apart,
    linears,
    loaded,
    said,
)
from tests.unit.weights.compressed_files import to_compressed
from tests.unit.weights.modelslim_files import DYNAMIC, Tensors

NAMES = ("qwen2", "qwen3", "hybrid", "hybrid experts", "next", "latents")
Get = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def by_name(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name](tmp_path_factory.mktemp("floats"))
        return made[name]

    return by_name


@pytest.fixture
def copied(folders: Get, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(folders(name), tmp_path / "copy"))


@pytest.mark.parametrize("name", NAMES)
def test_compressed_tensors_are_what_w8a8_makes(name: str, copied: Get) -> None:
    """But for the output head; the last of them under the release's names."""
    folder, decide = copied(name), linears(name)
    made, names = said(_with_float_head(folder)), {}
    if name == "latents":
        names = _release_names(folder)
    ignore = ("head",) if names else ("lm_head",)
    to_compressed(
        folder, lambda own: decide(own) == DYNAMIC, ignore, lambda own: _renamed(own, names)
    )
    stored = loaded(folder)
    assert stored.form == "compressed-tensors"
    for ours, theirs in zip(said(stored), made, strict=True):
        assert torch.equal(ours, theirs)


def test_a_part_of_one_product_that_is_left_out_is_named(copied: Get) -> None:
    folder, decide = copied("qwen3"), linears("qwen3")
    odd = "model.layers.1.self_attn.k_proj"
    to_compressed(
        folder,
        lambda own: decide(own) == DYNAMIC and odd not in own,
        ("lm_head", odd),
    )
    with pytest.raises(WeightsError, match=rf"q_proj.weight' in int8.*'{odd}.weight' in floats"):
        loaded(folder)


BLOCK = 16


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight [..., n, k] in 8-bit floats, the scale of each block, and what both stand for."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape[-2:])
    padded = torch.zeros(*weight.shape[:-2], rows * BLOCK, columns * BLOCK)
    padded[..., : weight.shape[-2], : weight.shape[-1]] = weight
    blocks = padded.unflatten(-1, (columns, BLOCK)).unflatten(-3, (rows, BLOCK))
    scales = blocks.abs().amax((-3, -1)) / 448
    spread = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    spread = spread[..., : weight.shape[-2], : weight.shape[-1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * spread


@pytest.mark.parametrize("name", NAMES)
def test_floats_of_eight_bits_in_blocks_are_what_they_stand_for(name: str, copied: Get) -> None:
    folder, decide = copied(name), linears(name)
    exact = said(loaded(folder))[0]

    def narrow(tensors: Tensors, expanded: bool) -> None:
        for own in [own for own in tensors if decide(own) == DYNAMIC]:
            codes, scales, numbers = in_blocks(tensors[own])
            tensors[own] = numbers if expanded else codes
            if not expanded:
                tensors[own + "_scale_inv"] = scales

    plain = Path(shutil.copytree(folder, folder.parent / "expanded"))
    edit_weights(plain, partial(narrow, expanded=True))
    edit_weights(folder, partial(narrow, expanded=False))
    block = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    edit_config(folder, quantization_config=block)
    got, want = said(loaded(folder)), said(loaded(plain))
    assert apart(want[0], exact) > 0
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
