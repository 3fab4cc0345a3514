"""Linears in int8: logits and caches have the same bits however the work is cut, without tiles."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from surefoot.backend.cpu import CpuBackend
from surefoot.backend.cpu.int8 import FEW_ROWS
from surefoot.engine.models import load_on, silent
from surefoot.model.model import Model
from tests.unit.backend.cuts import (
    Piece,
    Script,
    Setting,
    padded,
    rejecting,
    sequences_of,
    shuffled,
    together,
)
from tests.unit.model.settling import SettlingMachine, differing
from tests.unit.model.test_hybrid_bitwise import Always, load_damaged, verifying
from tests.unit.model.test_int8_models import MODELS

LENGTHS = (37, 1, 19)
SETTING = Setting(sequences_of(2, 64, LENGTHS), page_tokens=16, depth=4)


def load(name: str, folder: Path, backend: CpuBackend) -> Model:
    MODELS[name](folder)
    return load_on("tiny", folder, backend, "float32", silent, quantization="w8a8").model


def scripts() -> dict[str, Script]:
    """All together are more rows than the form for few rows takes; one by one they are not."""
    assert sum(LENGTHS) > FEW_ROWS
    return {
        "together": together(LENGTHS),
        "rejecting": rejecting(LENGTHS, SETTING.depth),
        "verifying": verifying(LENGTHS),
        "shuffled": shuffled(LENGTHS, SETTING.depth, random.Random(3)),
    }


@pytest.mark.parametrize("name", ["llama", "hybrid", "hybrid experts", "latents", "chosen"])
def test_bits_do_not_depend_on_the_cut(name: str, tmp_path: Path) -> None:
    backend = CpuBackend(bitwise=True)
    model = load(name, tmp_path, backend)
    assert differing(model, backend, SETTING, scripts(), padded) == []
    if name == "llama":
        assert backend.invariant.report() == {}, "no shape has to be tested"


def test_a_damaged_draft_leaves_the_tokens_before_it_alone(tmp_path: Path) -> None:
    backend = CpuBackend(bitwise=True)
    model = load("hybrid", tmp_path, backend)
    setting = Setting([[1, 2, 3, 4, 5, 6, 7, 63]], page_tokens=16, depth=4)
    want = SettlingMachine(model, backend, setting).play([[Piece(0, 0, 8)]])
    damaged = load_damaged(tmp_path, backend, token=60, quantization="w8a8")
    machine = SettlingMachine(damaged, backend, setting)
    machine._noise = Always(60)
    got = machine.play([[Piece(0, at, 1, 3)] for at in range(8)])
    assert torch.equal(got[0], want[0])
