"""Whole models on the cpu backend: logits have the same bits however the work is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from surefoot.backend.cpu import CpuBackend
from surefoot.backend.cpu.linear import RowInvariant, TiledLinear
from surefoot.backend.reference import ReferenceBackend
from surefoot.model.llama import LlamaModel
from surefoot.testing.tiny_models import write_tiny
from tests.unit.backend.cuts import (
    Machine,
    Setting,
    alone,
    differing_cuts,
    padded,
    same_bits,
    sequences_of,
    shuffled,
    together,
    unpadded,
)
from tests.unit.model.models import load_logits

LENGTHS = (26, 1, 11)


@dataclass(frozen=True)
class Tiny:
    """A model to write, and the pages it runs on."""

    architecture: str
    page_tokens: int = 8
    mixed: bool = False
    sizes: dict[str, int | bool] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        return write_tiny(folder, self.architecture, mixed=self.mixed, **self.sizes)  # type: ignore[arg-type]

    @property
    def setting(self) -> Setting:
        vocab = self.sizes.get("vocab", 64)
        return Setting(sequences_of(2, vocab, LENGTHS), self.page_tokens, depth=3)


ODD = {"vocab": 67, "hidden": 20, "inner": 30, "heads": 3, "key_heads": 1, "head_dim": 6}

MODELS = {
    "llama": Tiny("LlamaForCausalLM"),
    "odd llama": Tiny("LlamaForCausalLM", 4, sizes=ODD),
    "odd tied qwen3": Tiny("Qwen3ForCausalLM", 5, sizes=ODD | {"tied": True}),
    "qwen2": Tiny("Qwen2ForCausalLM", 16, sizes={"head_dim": 64, "heads": 4, "key_heads": 4}),
    "qwen3": Tiny("Qwen3ForCausalLM", 32),
    "windows": Tiny("MistralForCausalLM", 4),
    "odd windows": Tiny("MistralForCausalLM", 8, sizes=ODD | {"window": 3}),
    "some windows": Tiny("MistralForCausalLM", 16, mixed=True),
}


class TilesOnly(CpuBackend):
    """The cpu backend on a machine where no packed product keeps a row's bits."""

    def __init__(self) -> None:
        super().__init__(bitwise=True)
        self.invariant = RowInvariant(lambda linear, inputs: False)


@pytest.fixture(params=list(MODELS))
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return MODELS[request.param]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_logits_have_the_same_bits_for_every_cut(tiny: Tiny, tmp_path: Path) -> None:
    backend = CpuBackend(bitwise=True)
    model = load_logits(tiny.write(tmp_path), backend)
    assert differing_cuts(model, backend, tiny.setting, seed=1, pads=[padded]) == []
    assert differing_cuts(model, backend, tiny.setting, seed=2, pads=[unpadded]) == []


@pytest.mark.parametrize("name", ["odd llama", "odd windows", "qwen2"])
def test_the_fall_back_to_tiles_has_the_same_bits_for_every_cut(name: str, tmp_path: Path) -> None:
    tiny, backend = MODELS[name], TilesOnly()
    model = load_logits(tiny.write(tmp_path), backend)
    assert differing_cuts(model, backend, tiny.setting, seed=1, pads=[padded]) == []
    assert set(backend.invariant.report().values()) == {"tiles"}
    packed = load_logits(tmp_path, CpuBackend(bitwise=True))
    script = alone(tiny.setting.lengths)
    torch.testing.assert_close(
        Machine(model, backend, tiny.setting).play(script),
        Machine(packed, CpuBackend(), tiny.setting).play(script),
        rtol=1e-5,
        atol=2e-5,
    )


def test_a_failed_self_test_reaches_the_layers(tmp_path: Path) -> None:
    model = load_logits(MODELS["llama"].write(tmp_path), TilesOnly()).model
    assert isinstance(model, LlamaModel)
    assert isinstance(model._head, TiledLinear)
    assert all(isinstance(layer.down, TiledLinear) for layer in model._layers)


@pytest.mark.parametrize("name", ["odd llama", "windows"])
def test_bfloat16_logits_have_the_same_bits_for_every_cut(name: str, tmp_path: Path) -> None:
    tiny, backend = MODELS[name], CpuBackend(bitwise=True)
    model = load_logits(tiny.write(tmp_path), backend, "bfloat16")
    assert differing_cuts(model, backend, tiny.setting, seed=1, pads=[padded]) == []


@pytest.mark.parametrize("bitwise", [True, False])
def test_logits_are_those_of_the_reference(tiny: Tiny, bitwise: bool, tmp_path: Path) -> None:
    tiny.write(tmp_path)
    script = together(tiny.setting.lengths)
    outputs = []
    for backend in (CpuBackend(bitwise), ReferenceBackend()):
        model = load_logits(tmp_path, backend)
        outputs.append(Machine(model, backend, tiny.setting).play(script, padded))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=5e-5)


@pytest.mark.deep
@pytest.mark.usefixtures("two_threads")
def test_one_thread_and_two_give_the_same_logits(tiny: Tiny, tmp_path: Path) -> None:
    backend = CpuBackend(bitwise=True)
    model = load_logits(tiny.write(tmp_path), backend)
    lengths, rng = tiny.setting.lengths, random.Random(1)
    scripts = [together(lengths), shuffled(lengths, 3, rng)]
    two = [Machine(model, backend, tiny.setting).play(script) for script in scripts]
    torch.set_num_threads(1)
    one = Machine(model, backend, tiny.setting).play(alone(lengths))
    assert same_bits(two[0], one)
    assert same_bits(two[1], one)
