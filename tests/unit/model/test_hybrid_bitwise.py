"""Hybrids on the cpu backend: logits and caches have the same bits however the work is cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from surefoot.backend.cpu import CpuBackend
from surefoot.backend.operands import Fold
from surefoot.backend.reference import ReferenceBackend
from surefoot.engine.models import load_on, silent
from surefoot.model.model import Model
from surefoot.state.pool import Pools
from surefoot.testing.tiny_hybrids import write_tiny_hybrid
from tests.unit.backend.cuts import (
    Piece,
    Script,
    Setting,
    one_by_one,
    padded,
    rejecting,
    sequences_of,
    shuffled,
    together,
    unpadded,
)
from tests.unit.model.settling import SettlingMachine, differing

LENGTHS = (37, 1, 19)
SETTING = Setting(sequences_of(2, 64, LENGTHS), page_tokens=8, depth=4)
# Every count there is, and blocks end inside drafts that stay: at 14 + 5, and later at 30 + 4.
COUNTS = (5, 2, 3, 4, 5, 1)
ODD = {"vocab": 67, "hidden": 20, "inner": 30, "heads": 3, "key_heads": 1, "head_dim": 6}
ODD_LINEAR = {"linear_value_heads": 3, "linear_key_heads": 1, "linear_key_size": 5, "rotary": 0.4}

MODELS: dict[str, tuple[str, dict[str, int | float]]] = {
    "dense": ("Qwen3_5ForCausalLM", {}),
    "odd dense": ("Qwen3_5ForCausalLM", ODD | ODD_LINEAR | {"tied": True}),
    "experts": ("Qwen3_5MoeForCausalLM", {}),
    "next": ("Qwen3NextForCausalLM", {"interval": 2, "layers": 3}),
}


def verifying(lengths: Sequence[int]) -> Script:
    """Full verify rows, of which COUNTS tokens stay; the others are garbage."""
    script: list[list[Piece]] = []
    for index, length in enumerate(lengths):
        at, counts = 0, cycle(COUNTS)
        while at < length:
            count = min(next(counts), length - at)
            script.append([Piece(index, at, count, SETTING.depth + 1 - count)])
            at += count
    return script


def scripts(seed: int) -> dict[str, Script]:
    rng = random.Random(seed)
    return {
        "together": together(LENGTHS),
        "rejecting": rejecting(LENGTHS, SETTING.depth),
        "verifying": verifying(LENGTHS),
        "shuffled": shuffled(LENGTHS, SETTING.depth, rng),
    }


def load_hybrid(name: str, folder: Path, backend: CpuBackend | ReferenceBackend) -> Model:
    architecture, sizes = MODELS[name]
    write_tiny_hybrid(folder, architecture, mtp=False, **sizes)  # type: ignore[arg-type]
    return load_on("hybrid", folder, backend, "float32", silent).model


@pytest.mark.parametrize("name", MODELS)
def test_bits_do_not_depend_on_the_cut(name: str, tmp_path: Path) -> None:
    backend = CpuBackend(bitwise=True)
    model = load_hybrid(name, tmp_path, backend)
    assert differing(model, backend, SETTING, scripts(1), padded) == []


@pytest.mark.deep
@pytest.mark.parametrize("name", MODELS)
def test_bits_do_not_depend_on_more_cuts(name: str, tmp_path: Path) -> None:
    backend = CpuBackend(bitwise=True)
    model = load_hybrid(name, tmp_path, backend)
    assert differing(model, backend, SETTING, {"one": one_by_one(LENGTHS)}, padded) == []
    for seed in range(2, 8):
        assert differing(model, backend, SETTING, scripts(seed), unpadded) == []


def test_the_reference_says_nearly_the_same(tmp_path: Path) -> None:
    outputs = []
    backends: tuple[CpuBackend | ReferenceBackend, ...] = (CpuBackend(True), ReferenceBackend())
    for place, backend in enumerate(backends):
        model = load_hybrid("dense", tmp_path / str(place), backend)
        machine = SettlingMachine(model, backend, SETTING)
        outputs.append(machine.play(verifying(LENGTHS)) + machine.kept())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=2e-4)


class Faulty:
    """A model whose checkpoints do not move as they should."""

    def __init__(self, model: Model, fault: str) -> None:
        self._model, self._fault = model, fault
        self.description, self.draft_head = model.description, model.draft_head
        self.forward, self.logits = model.forward, model.logits

    def fold(self, folds: Sequence[Fold], pools: Pools) -> None:
        chosen = {"none": [], "twice": [*folds]}[self._fault]
        self._model.fold(chosen, pools)
        if self._fault == "twice":
            self._model.fold(chosen, pools)


@pytest.mark.parametrize("fault", ["none", "twice"])
def test_a_fold_left_out_or_done_twice_is_seen(fault: str, tmp_path: Path) -> None:
    backend = CpuBackend(bitwise=True)
    model = Faulty(load_hybrid("dense", tmp_path, backend), fault)
    script = {"verifying": verifying(LENGTHS)}
    assert differing(model, backend, SETTING, script, unpadded) == ["verifying"]


def test_a_damaged_draft_leaves_the_tokens_before_it_alone(tmp_path: Path) -> None:
    backend = CpuBackend(bitwise=True)
    model = load_hybrid("dense", tmp_path, backend)
    setting = Setting([[1, 2, 3, 4, 5, 6, 7, 63]], page_tokens=8, depth=4)
    want = SettlingMachine(model, backend, setting).play([[Piece(0, 0, 8)]])
    damaged = load_damaged(tmp_path, backend, token=60)
    machine = SettlingMachine(damaged, backend, setting)
    machine._noise = Always(60)
    got = machine.play([[Piece(0, at, 1, 3)] for at in range(8)])
    assert torch.equal(got[0], want[0])


class Always(random.Random):
    """Draws one number only."""

    def __init__(self, number: int) -> None:
        super().__init__(0)
        self._number = number

    def randrange(self, *bounds: object) -> int:
        return self._number


def load_damaged(
    folder: Path, backend: CpuBackend, token: int, quantization: str | None = None
) -> Model:
    """The same model, in which one token's embedding is not a number."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    target = load_on("hybrid", folder, backend, "float32", silent, quantization=quantization)
    return target.model
