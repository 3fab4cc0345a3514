"""Models with feed-forwards in 4 bits, and the same weights under all names they come under."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from surefoot.backend.operands import Int8Weight
from surefoot.backend.plain_int8 import quantise_groups
from surefoot.config import make_config
from surefoot.engine.engine import Engine
from surefoot.errors import WeightsError
from surefoot.llm import LLM
from surefoot.params import SamplingParams
from surefoot.testing.tiny_hybrids import write_tiny_hybrid
from surefoot.testing.tiny_latents import TinyLatentSizes, write_tiny_latents
from surefoot.testing.tiny_models import write_tiny
from surefoot.weights.counts import group_size
from surefoot.weights.int8 import FOUR_BITS
from surefoot.weights.modelslim import Decisions, ModelSlimCheckpoint
from tests.unit.model.edits import edit_weights
from tests.unit.model.test_int8_models import (
    GARBAGE,
    QUANT_ERROR,
    _release_names,
    _renamed,
    apart,
    linears,
    loaded,
    said,
)
from tests.unit.model.test_qwen3_5_layouts import one_by_one
from tests.unit.weights.modelslim_files import (
    DYNAMIC,
    FLOAT,
    FOUR,
    Decide,
    Tensors,
    edit,
    four_bits,
    to_modelslim,
)

FOUR_ERROR = 0.35
"""How far logits lie from those of floats at most, with feed-forwards in 4 bits."""

SIZE = 32
"""Inputs of a group; models have several."""

Write = Callable[[Path], Path]
MODELS: dict[str, Write] = {
    "qwen3": lambda folder: write_tiny(folder, "Qwen3ForCausalLM", hidden=96, inner=160),
    "hybrid experts": lambda folder: write_tiny_hybrid(
        folder, "Qwen3_5MoeForConditionalGeneration", hidden=96, expert_inner=64, shared_inner=24
    ),
    "hybrid": lambda folder: write_tiny_hybrid(folder, "Qwen3_5ForCausalLM", hidden=96, inner=160),
    "latents": lambda folder: write_tiny_latents(folder, TinyLatentSizes(hidden=96, inner=64)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def by_name(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name](tmp_path_factory.mktemp("floats"))
            edit_weights(made[name], one_by_one)
        return made[name]

    return by_name


@pytest.fixture
def copied(folders: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(folders(name), tmp_path / "copy"))


Get = Callable[[str], Path]


def decided(name: str) -> Decide:
    """What W4A8 makes of each tensor, the output head aside."""
    eight = linears(name)

    def decide(own: str) -> str:
        return FOUR if eight(own) == DYNAMIC and FOUR_BITS.fullmatch(own) else eight(own)

    return decide


def written(folder: Path, decide: Decide, rename: Callable[[str], str] = str) -> Path:
    """In ModelSlim's form, with groups where they are several."""

    def four(weight: Tensor, module: str) -> Tensors:
        return four_bits(weight, module, SIZE if weight.shape[1] % SIZE == 0 else weight.shape[1])

    to_modelslim(folder, decide, rename, four)
    edit(folder, lambda _, entries: entries.update(group_size=SIZE))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_four_bits_made_on_loading_are_the_floats_that_they_stand_for(
    name: str, copied: Get
) -> None:
    """But for what W8A8 changes: codes of inputs, and of what is not in 4 bits."""
    folder, usual = copied(name), decided(name)
    four, exact = said(loaded(folder, "w4a8")), said(loaded(folder))

    def rounded(tensors: Tensors) -> None:
        for own, tensor in tensors.items():
            if usual(own) == FOUR:
                tensors[own] = worth(quantise_groups(tensor, group_size(tensor.shape[1])))

    edit_weights(folder, rounded)
    for got, want, before in zip(four, said(loaded(folder)), exact, strict=True):
        assert apart(got, want) < QUANT_ERROR
        assert apart(got, want) < 0.6 * apart(got, before) or not want.any()


def worth(weight: Int8Weight) -> Tensor:
    """The numbers that a weight stands for."""
    groups = max(weight.groups, 1)
    parts = weight.values.float().unflatten(1, (groups, -1))
    whole: Tensor = parts * weight.scales.view(-1, groups, 1)
    return whole.flatten(1)


MIXES: dict[str, Decide] = {
    "all int8": lambda own: FOUR,
    "body int8, head floats": lambda own: FLOAT if own.startswith("mtp.") else FOUR,
    "body floats, head int8": lambda own: FOUR if own.startswith("mtp.") else FLOAT,
    "body in 4 bits, head in 8": lambda own: DYNAMIC if own.startswith("mtp.") else FOUR,
}


def mixed(name: str, mix: str) -> Decide:
    usual = decided(name)

    def decide(own: str) -> str:
        whole = MIXES[mix](own)
        return (
            whole
            if usual(own) == FOUR or (usual(own) == DYNAMIC and whole == FLOAT)
            else usual(own)
        )

    return decide


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", ["hybrid", "latents"])
def test_body_and_draft_head_are_decided_apart(name: str, mix: str, copied: Get) -> None:
    folder = copied(name)
    exact = said(loaded(folder))
    got = said(loaded(written(folder, mixed(name, mix))))
    assert (apart(got[0], exact[0]) > 0) == ("body floats" not in mix)
    assert apart(got[0], exact[0]) < FOUR_ERROR
    assert 0 < apart(got[1], exact[1]) < FOUR_ERROR


ODD = {
    "qwen3": (r"layers.1.mlp.up_proj", FLOAT, r"mlp.gate_proj.weight' in int8.*up_proj.*in floats"),
    "hybrid": (r"layers.1.mlp.up_proj", DYNAMIC, r"gate_proj.weight' in int8 with scales for 3"),
    "hybrid experts": (r"experts.2.up_proj", FLOAT, r"experts.2.gate_proj.weight' in int8 with"),
    "latents": (r"layers.1.mlp.experts.2.", DYNAMIC, r"experts.0.' in int8 with.*2.' in int8"),
}


@pytest.mark.parametrize("name", ODD)
def test_parts_of_one_product_that_differ_are_named(name: str, copied: Get) -> None:
    odd, decision, message = ODD[name]
    usual = decided(name)
    folder = written(
        copied(name), lambda own: decision if odd in own and usual(own) == FOUR else usual(own)
    )
    with pytest.raises(WeightsError, match=message):
        loaded(folder)


def test_a_scale_that_belongs_to_nothing_is_named(copied: Get) -> None:
    folder = written(copied("qwen3"), decided("qwen3"))
    name = "model.layers.0.input_layernorm.weight_scale_second"

    def add(tensors: Tensors, entries: dict[str, object]) -> None:
        tensors[name] = tensors["model.layers.0.mlp.up_proj.weight_scale_second"].clone()
        entries[name] = FLOAT

    edit(folder, add)
    with pytest.raises(WeightsError, match=f"does not use: {name}"):
        loaded(folder)


def test_a_missing_key_of_the_description_is_named(copied: Get) -> None:
    folder = written(copied("latents"), decided("latents"))
    name = "mtp.0.mlp.experts.3.up_proj.weight"
    edit(folder, lambda _, entries: entries.pop(name))
    with pytest.raises(WeightsError, match=f"says nothing of tensor '{name}'"):
        loaded(folder)


def once_for_all(patch: pytest.MonkeyPatch) -> None:
    """Planted: what is said of one linear counts for all."""
    right = Decisions.of

    def of(self: Decisions, name: str) -> str:
        said_of_it = right(self, name)
        return FOUR if said_of_it == DYNAMIC else said_of_it

    patch.setattr(Decisions, "of", of)


def not_for_the_head(patch: pytest.MonkeyPatch) -> None:
    """Planted: the draft head is taken for floats, as the decision is asked for its body only."""
    right = ModelSlimCheckpoint.int8

    def int8(self: ModelSlimCheckpoint, name: str, read: Callable[[], Tensor]) -> object:
        return None if name.startswith("mtp.") else right(self, name, read)

    patch.setattr(ModelSlimCheckpoint, "int8", int8)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (once_for_all, r"lack tensors that belong to them|has shape|numbers of 4 bits"),
        (not_for_the_head, r"'mtp\.[^']*' is stored as int8, which is not read without its scales"),
    ],
)
@pytest.mark.parametrize("name", ["hybrid", "latents"])
def test_one_decision_for_a_whole_model_is_caught(
    name: str,
    fault: Callable[[pytest.MonkeyPatch], None],
    message: str,
    copied: Get,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = written(copied(name), decided(name))
    loaded(folder)
    fault(monkeypatch)
    with pytest.raises(WeightsError, match=message):
        loaded(folder)


def groups_turned(patch: pytest.MonkeyPatch) -> None:
    """Planted: groups get one another's scales."""
    right = ModelSlimCheckpoint.int8

    def int8(self: ModelSlimCheckpoint, name: str, read: Callable[[], Tensor]) -> object:
        weight = right(self, name, read)
        if weight is not None and weight.groups:
            weight.scales.copy_(weight.scales.roll(1, -1))
        return weight

    patch.setattr(ModelSlimCheckpoint, "int8", int8)


def test_scales_of_other_groups_are_no_quant_error(
    copied: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups differ in size here, as they do in trained models."""

    def uneven(tensors: Tensors) -> None:
        for own, tensor in tensors.items():
            if re.search(r"mlp\.\w+_proj\.weight", own):
                tensor[:, :SIZE] *= 6

    folder = copied("qwen3")
    edit_weights(folder, uneven)
    exact = said(loaded(folder))[0]
    written(folder, decided("qwen3"))
    assert apart(said(loaded(folder))[0], exact) < FOUR_ERROR
    groups_turned(monkeypatch)
    assert apart(said(loaded(folder))[0], exact) > GARBAGE


def wrapped(name: str) -> str:
    """As Qwen3.5's models for text and pictures are named."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def drafted(folder: Path) -> list[tuple[tuple[int, ...], int]]:
    """Tokens made with drafts, and how many drafted ones were accepted."""
    config = make_config(drafter="mtp", draft_tokens=3, memory=1 << 23, device="cpu")
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM.on(Engine(loaded(folder), config)) as llm:
        results = llm.generate([[1, 2, 3, 1, 2], [7, 8, 9]], params)
        return [
            (result.outputs[0].token_ids, result.speculation.accepted_tokens) for result in results
        ]


Form = Callable[[Path, Callable[[str], str]], Path]


def as_floats(folder: Path, rename: Callable[[str], str]) -> Path:
    def renamed(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[rename(name)] = tensors.pop(name)

    edit_weights(folder, renamed)
    return folder


@pytest.mark.parametrize("name", ["hybrid", "latents"])
def test_names_change_neither_logits_nor_drafts(name: str, folders: Get, tmp_path: Path) -> None:
    """The release's names (or wrapped ones) and transformers', in floats and ModelSlim's form."""
    other = _release_names(folders("latents")) if name == "latents" else {}
    renames: list[Callable[[str], str]] = [
        str,
        (lambda own: _renamed(own, other)) if other else wrapped,
    ]
    forms: dict[str, Form] = {
        "floats": as_floats,
        "modelslim": lambda folder, rename: written(folder, decided(name), rename),
    }
    for form, write in forms.items():
        made = []
        for place, rename in enumerate(renames):
            folder = Path(shutil.copytree(folders(name), tmp_path / f"{form} {place}"))
            write(folder, rename)
            made.append((*said(loaded(folder)), drafted(folder)))
        assert made[0][0].equal(made[1][0])
        assert made[0][1].equal(made[1][1])
        assert made[0][2] == made[1][2]
