"""How weights are kept: what is int8 is known beforehand, and nothing is kept twice."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from surefoot.backend.cpu import CpuBackend
from surefoot.backend.operands import Int8Weight
from surefoot.backend.reference import ReferenceBackend
from surefoot.config import make_config
from surefoot.engine import forms
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel, load, load_draft, load_on, silent
from surefoot.errors import SettingError
from surefoot.llm import LLM
from surefoot.model.registry import FAMILIES
from surefoot.params import SamplingParams
from surefoot.testing.tiny_dsa import write_tiny_dsa
from surefoot.testing.tiny_hybrids import HYBRIDS, write_tiny_hybrid
from surefoot.testing.tiny_latents import write_tiny_latents
from surefoot.testing.tiny_models import (
    ARCHITECTURES,
    TinySizes,
    make_tiny_config,
    write_tiny,
)
from surefoot.weights.int8 import made_int4, made_int8
from surefoot.weights.taker import Int8Form
from tests.unit.weights.modelslim_files import DYNAMIC, FLOAT, to_modelslim

Write = Callable[[Path], Path]
MODELS: dict[str, Write] = {
    **{name: lambda folder, name=name: write_tiny(folder, name) for name in ARCHITECTURES},  # type: ignore[misc]
    "tied": lambda folder: write_tiny(folder, "LlamaForCausalLM", tied=True),
    **{name: lambda folder, name=name: write_tiny_hybrid(folder, name) for name in HYBRIDS},  # type: ignore[misc]
    "groups": lambda folder: write_tiny(folder, "LlamaForCausalLM", hidden=96, inner=160),
    "latents": write_tiny_latents,
    "latents without a head": lambda folder: write_tiny_latents(folder, mtp=False),
    "chosen": write_tiny_dsa,
    "chosen without a head": lambda folder: write_tiny_dsa(folder, mtp=False),
}


def load_int8(
    folder: Path, backend: CpuBackend | ReferenceBackend | None = None, form: str = "w8a8"
) -> LoadedModel:
    made = backend or CpuBackend()
    return load_on("tiny", folder, made, "float32", silent, quantization=form)


@pytest.mark.parametrize(("quantization", "right"), [("w8a8", made_int8), ("w4a8", made_int4)])
@pytest.mark.parametrize("name", MODELS)
def test_the_description_says_how_much_becomes_int8(
    name: str,
    quantization: str,
    right: Callable[[re.Pattern[str]], Int8Form],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, Int8Weight] = {}

    def noted(names: re.Pattern[str]) -> Int8Form:
        make = right(names)

        def form(name: str, read: Callable[[], Tensor]) -> Int8Weight | None:
            weight = make(name, read)
            if weight is not None:
                made[name] = weight
            return weight

        return form

    monkeypatch.setattr(forms, "made_int8" if quantization == "w8a8" else "made_int4", noted)
    target = load_int8(MODELS[name](tmp_path), form=quantization)
    described = target.model.description.linears
    described = described if quantization == "w8a8" else described.in_four()
    assert described.numbers == sum(weight.values.numel() for weight in made.values()) > 0
    assert described.outputs == sum(weight.scales.numel() for weight in made.values())
    assert described.copied == (made["lm_head.weight"].values.numel() if name == "tied" else 0)
    assert target.form == quantization


def test_groups_are_kept_once_and_apart(tmp_path: Path) -> None:
    folder = write_tiny(
        tmp_path, "LlamaForCausalLM", vocab=256, hidden=256, inner=512, heads=4, head_dim=64
    )
    target, eight = load_int8(folder, form="w4a8"), load_int8(folder)
    # 4 bytes more for each group to take off what the kernel adds to the codes of inputs.
    assert target.weight_bytes <= held(target.model) < 1.1 * target.weight_bytes
    more = 2 * (2 * 512 * 1 + 256 * 3)
    assert target.weight_bytes - eight.weight_bytes == 4 * more


@pytest.mark.parametrize("tied", [False, True])
def test_nothing_is_kept_twice(tied: bool, tmp_path: Path) -> None:
    """What a loaded model holds is what its parameters take, and some tables beside them."""
    # Sizes that need no zeros behind them.
    folder = write_tiny(
        tmp_path,
        "LlamaForCausalLM",
        tied=tied,
        vocab=256,
        hidden=128,
        inner=256,
        heads=4,
        head_dim=32,
    )
    target = load_int8(folder)
    assert target.weight_bytes <= held(target.model) < 1.1 * target.weight_bytes
    floats = load_on("tiny", folder, CpuBackend(), "float32", silent)
    linears = target.model.description.linears
    assert floats.weight_bytes - target.weight_bytes == (
        3 * linears.numbers - 4 * linears.copied - 4 * linears.outputs
    )


def held(model: object) -> int:
    """Bytes behind all tensors and arrays that an object holds, each counted once."""
    seen: set[int] = set()
    stores: dict[int, int] = {}
    waiting: list[object] = [model]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, ModuleType | type | FunctionType):
            continue
        seen.add(id(each))
        if isinstance(each, np.ndarray) and each.dtype != object:
            each = torch.from_numpy(each)
        if isinstance(each, Tensor):
            store = each.untyped_storage()
            stores[store.data_ptr()] = store.nbytes()
        else:
            waiting += gc.get_referents(each)
    return sum(stores.values())


def test_a_large_model_falls_to_about_a_quarter() -> None:
    sizes = TinySizes(
        vocab=32000, hidden=4096, inner=11008, layers=32, heads=32, key_heads=32, head_dim=128
    )
    config = make_tiny_config("LlamaForCausalLM", sizes, False)
    family, backend = FAMILIES["LlamaForCausalLM"], CpuBackend()
    described = family.describe(config, "float32", "")
    floats, int8 = (
        forms.weight_form(None, family, described, form, backend).bytes(described, 4)
        for form in (None, "w8a8")
    )
    assert floats == 4 * described.parameters
    assert 0.25 < int8 / floats < 0.27


class NoInt8(ReferenceBackend):
    def __init__(self) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, int8=False)


def test_a_backend_or_a_family_without_int8_says_so(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "Qwen3ForCausalLM")
    with pytest.raises(SettingError, match="not offered by the backend 'reference'"):
        load_int8(folder, NoInt8())
    family = replace(FAMILIES["Qwen3ForCausalLM"], int8_linears=None)
    described = family.describe(
        make_tiny_config("Qwen3ForCausalLM", TinySizes(), False), "float32", ""
    )
    with pytest.raises(SettingError, match="'w8a8' is not offered for Qwen3ForCausalLM"):
        forms.weight_form(None, family, described, "w8a8", CpuBackend())
    to_modelslim(folder, lambda name: DYNAMIC if name.endswith("proj.weight") else FLOAT)
    with pytest.raises(SettingError, match="weights in int8 are not offered"):
        load_on("tiny", folder, NoInt8(), "float32", silent)


def test_a_folder_in_int8_stays_as_it_is_whatever_is_asked_for(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "Qwen3ForCausalLM")
    to_modelslim(folder, lambda name: DYNAMIC if name.endswith("o_proj.weight") else FLOAT)
    plain, asked = load_on("tiny", folder, CpuBackend(), "float32", silent), load_int8(folder)
    assert plain.form == asked.form == "modelslim"
    numbers, outputs = 2 * 32 * 32, 2 * 32
    size = 4 * plain.model.description.parameters - 3 * numbers + 4 * outputs
    assert plain.weight_bytes == asked.weight_bytes == size


def test_a_draft_model_is_kept_in_the_same_way(tmp_path: Path) -> None:
    folder = str(write_tiny(tmp_path, "LlamaForCausalLM"))
    config = make_config(device="cpu", quantization="w8a8", draft_model=folder)
    target = load(folder, config)
    assert target.form == load_draft(target, config).form == "w8a8"


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_answers_are_the_same_with_drafts_and_without(device: str, tmp_path: Path) -> None:
    folder = str(write_tiny(tmp_path, "Qwen3ForCausalLM"))
    config = make_config(device=device, quantization="w8a8")
    target = load(folder, config)
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=5, ignore_eos=True)
    said = []
    for drafter, rows in (("none", 1), ("ngram", 3)):
        depth = 3 if drafter == "ngram" else None
        own = make_config(drafter=drafter, draft_tokens=depth, max_rows=rows, memory=1 << 22)
        with LLM.on(Engine(target, own)) as llm:
            results = llm.generate([[1, 2, 1, 2, 1], [7, 8, 9, 7, 8]], params)
        said.append([result.outputs[0].token_ids for result in results])
    assert said[0] == said[1]
    floats = load(folder, make_config(device=device))
    assert floats.form == "floats"


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(SettingError, match="'w4a4' is unknown; known are w8a8, w4a8"):
        make_config(quantization="w4a4")
