"""Logits equal those of transformers, however the tokens are cut into steps."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from surefoot.config import make_config
from surefoot.engine.models import load
from tests.parity.conftest import Saved
from tests.parity.oracle import MODELS, SIZES, logits_of, save
from tests.unit.backend.cuts import (
    Machine,
    Piece,
    Script,
    Setting,
    alone,
    one_by_one,
    rejecting,
    sequences_of,
    shuffled,
    together,
)
from tests.unit.model.models import Logits

TOLERANCE = 1e-4
SETTING = Setting(sequences_of(1, 97, (45, 1, 12, 30)), page_tokens=8, depth=3)

Get = Callable[[str], Saved]


def chunks_of_five(lengths: Sequence[int]) -> Script:
    return [
        [Piece(index, at, min(5, length - at))]
        for index, length in enumerate(lengths)
        for at in range(0, length, 5)
    ]


CUTS: Mapping[str, Callable[[Sequence[int]], Script]] = {
    "whole": alone,
    "batch": together,
    "chunks": chunks_of_five,
    "token by token": one_by_one,
    "rejected drafts": lambda lengths: rejecting(lengths, SETTING.depth),
    "any mix": lambda lengths: shuffled(lengths, SETTING.depth, random.Random(1)),
}

BACKENDS: Mapping[str, Mapping[str, object]] = {
    "reference": {"device": "reference"},
    "cpu": {"device": "cpu", "bitwise": True},
    "fast cpu": {"device": "cpu", "bitwise": False},
}


def ours(folder: Path, script: Script, **settings: object) -> list[Tensor]:
    loaded = load(str(folder), make_config(dtype="float32", **settings))
    return Machine(Logits(loaded.model), loaded.backend, SETTING).play(script)


def furthest(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(got, want, strict=True))


def theirs(saved: Saved) -> list[Tensor]:
    return [logits_of(saved.oracle, tokens) for tokens in SETTING.sequences]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_cut_gives_the_oracles_logits(name: str, cut: str, saved: Get) -> None:
    got = ours(saved(name).folder, CUTS[cut](SETTING.lengths), **BACKENDS["cpu"])
    assert furthest(got, theirs(saved(name))) < TOLERANCE


@pytest.mark.parametrize("backend", ["reference", "fast cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_every_backend_gives_the_oracles_logits(name: str, backend: str, saved: Get) -> None:
    got = ours(saved(name).folder, together(SETTING.lengths), **BACKENDS[backend])
    assert furthest(got, theirs(saved(name))) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_the_oracles_logits_have_scale_one(name: str, saved: Get) -> None:
    """Otherwise the tolerance would say nothing."""
    logits = logits_of(saved(name).oracle, SETTING.sequences[0])
    assert 0.5 < logits.std().item() < 2


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"rms_norm_eps": 1e-3}),
        ("llama", {"rope_theta": 10100.0, "rope_parameters": None}),
        ("mistral", {"sliding_window": 9}),
        ("mistral", {"sliding_window": 7}),
        ("qwen2 with a window", {"layer_types": ["sliding_attention"] * 3}),
    ],
)
def test_a_small_fault_exceeds_the_tolerance(
    name: str, changes: dict[str, object], saved: Get, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved(name).folder, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    got = ours(folder, alone(SETTING.lengths), **BACKENDS["cpu"])
    assert furthest(got, theirs(saved(name))) > 2 * TOLERANCE


ROPES: Mapping[str, Mapping[str, object]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with its options": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "truncate": False,
    },
    "yarn with two scales": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.8,
        "mscale_all_dim": 0.3,
    },
    "yarn with a factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_rope_scalings_give_the_oracles_logits(rope: str, tmp_path: Path) -> None:
    name = "qwen3" if rope == "yarn" else "llama"
    parameters = {"rope_theta": 10000.0, **ROPES[rope]}
    oracle = MODELS[name](rope_parameters=parameters)
    folder = save(oracle, tmp_path / "scaled")
    want = theirs(Saved(oracle, folder))
    assert furthest(ours(folder, one_by_one(SETTING.lengths)), want) < TOLERANCE
    plain = MODELS[name]()
    assert furthest(want, theirs(Saved(plain, folder))) > 100 * TOLERANCE


def test_an_old_spelling_of_a_scaling_is_read(tmp_path: Path) -> None:
    parameters = {"rope_theta": 20000.0, **ROPES["llama3"]}
    oracle = MODELS["llama"](rope_parameters=parameters)
    folder = save(oracle, tmp_path / "scaled")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    scaling = dict(ROPES["llama3"]) | {"type": "llama3"}
    del scaling["rope_type"]
    old = {"rope_theta": 20000.0, "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config | old))
    got = ours(folder, together(SETTING.lengths))
    assert furthest(got, theirs(Saved(oracle, folder))) < TOLERANCE


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 36, "head_dim": 12},
        {"num_key_value_heads": 4, "vocab_size": 101, "intermediate_size": 33},
        {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    ],
    ids=["3/1 heads", "no groups", "wide heads"],
)
def test_other_sizes_give_the_oracles_logits(sizes: dict[str, object], tmp_path: Path) -> None:
    oracle = MODELS["llama"](**sizes)
    assert SIZES.keys() >= sizes.keys() - {"head_dim"}
    folder = save(oracle, tmp_path / "model")
    want = theirs(Saved(oracle, folder))
    got = ours(folder, CUTS["any mix"](SETTING.lengths))
    assert furthest(got, want) < TOLERANCE
