"""Logits of hybrids equal those of transformers, however the tokens are cut into steps."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.config import make_config
from surefoot.engine.models import load
from tests.parity.conftest import Saved
from tests.parity.hybrids import HYBRIDS, ROPE
from tests.parity.oracle import logits_of, reopened, save
from tests.parity.test_logits import BACKENDS, TOLERANCE, chunks_of_five, furthest
from tests.unit.backend.cuts import (
    Script,
    Setting,
    alone,
    one_by_one,
    rejecting,
    sequences_of,
    shuffled,
    together,
)
from tests.unit.model.edits import edit_weights
from tests.unit.model.settling import SettlingMachine

SETTING = Setting(sequences_of(1, 97, (45, 1, 12, 30)), page_tokens=8, depth=3)

CUTS: Mapping[str, Callable[[Sequence[int]], Script]] = {
    "whole": alone,
    "batch": together,
    "chunks": chunks_of_five,
    "token by token": one_by_one,
    "rejected drafts": lambda lengths: rejecting(lengths, SETTING.depth),
    "any mix": lambda lengths: shuffled(lengths, SETTING.depth, random.Random(1)),
}

Get = Callable[[str], Saved]


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Get:
    made: dict[str, Saved] = {}

    def by_name(name: str) -> Saved:
        if name not in made:
            oracle = HYBRIDS[name]()
            made[name] = Saved(oracle, save(oracle, tmp_path_factory.mktemp("hybrid")))
        return made[name]

    return by_name


def ours(folder: Path, script: Script, backend: str = "cpu") -> list[Tensor]:
    loaded = load(str(folder), make_config(dtype="float32", **BACKENDS[backend]))
    return SettlingMachine(loaded.model, loaded.backend, SETTING).play(script)


def theirs(saved: Saved) -> list[Tensor]:
    return [logits_of(saved.oracle, tokens) for tokens in SETTING.sequences]


CHOSEN = [(name, "any mix") for name in HYBRIDS]
CHOSEN += [("dense", cut) for cut in CUTS if cut != "any mix"]


@pytest.mark.parametrize(("name", "cut"), CHOSEN)
def test_every_cut_gives_the_oracles_logits(name: str, cut: str, hybrid: Get) -> None:
    got = ours(hybrid(name).folder, CUTS[cut](SETTING.lengths))
    assert furthest(got, theirs(hybrid(name))) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "backend"),
    [("next", "fast cpu"), ("dense", "fast cpu"), ("experts", "fast cpu"), ("dense", "reference")],
)
def test_every_backend_gives_the_oracles_logits(name: str, backend: str, hybrid: Get) -> None:
    got = ours(hybrid(name).folder, together(SETTING.lengths), backend)
    assert furthest(got, theirs(hybrid(name))) < TOLERANCE


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_oracles_logits_have_scale_one(name: str, hybrid: Get) -> None:
    """Otherwise the tolerance would say nothing."""
    logits = logits_of(hybrid(name).oracle, SETTING.sequences[0])
    assert 0.5 < logits.std().item() < 2


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dense", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}}),
        ("dense", {"rope_parameters": {**ROPE, "rope_theta": 10100.0}}),
        ("dense", {"rms_norm_eps": 1e-3}),
        ("next, some dense", {"norm_topk_prob": True}),
        ("experts", {"num_experts_per_tok": 2}),
    ],
)
def test_a_small_fault_exceeds_the_tolerance(
    name: str, changes: dict[str, object], hybrid: Get, tmp_path: Path
) -> None:
    folder = save(hybrid(name).oracle, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    got = ours(folder, alone(SETTING.lengths))
    assert furthest(got, theirs(hybrid(name))) > 2 * TOLERANCE


TIES: Mapping[str, dict[str, object]] = {
    "flat": {"tie_word_embeddings": True},
    "wrapper alone": {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}},
    "text model alone": {
        "tie_word_embeddings": False,
        "text_config": {"tie_word_embeddings": True},
    },
    "both": {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}},
}


def tie(folder: Path, changes: Mapping[str, object]) -> None:
    """Change the config, and what lies in it of the text model."""
    config = json.loads((folder / "config.json").read_text())
    text = changes.get("text_config", {})
    assert isinstance(text, dict)
    inner = {"text_config": config["text_config"] | text} if text else {}
    (folder / "config.json").write_text(json.dumps(config | changes | inner))


@pytest.mark.parametrize("ties", TIES)
def test_a_stored_head_is_used_whatever_the_config_ties(
    ties: str, hybrid: Get, tmp_path: Path
) -> None:
    made = hybrid("dense" if ties == "flat" else "dense, wrapped").oracle
    folder = save(made, tmp_path / "apart")
    tie(folder, TIES[ties])
    want = theirs(Saved(reopened(made, folder), folder))
    assert furthest(want, theirs(Saved(made, folder))) == 0
    assert furthest(ours(folder, together(SETTING.lengths)), want) < TOLERANCE


@pytest.mark.parametrize("ties", ["flat", "wrapper alone", "both"])
def test_without_a_stored_head_the_outermost_word_counts(ties: str, tmp_path: Path) -> None:
    """Where the wrapper ties nothing, the oracle makes a head at random, and we say no."""
    made = HYBRIDS["dense" if ties == "flat" else "dense, wrapped"]()
    with torch.no_grad():
        made.get_input_embeddings().get_parameter("weight").mul_(0.15)
    folder = save(made, tmp_path / "tied")
    tie(folder, TIES[ties])
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    want = theirs(Saved(reopened(made, folder), folder))
    assert furthest(want, theirs(Saved(made, folder))) > 1
    assert furthest(ours(folder, together(SETTING.lengths)), want) < TOLERANCE


def test_yarn_leaves_the_numbers_that_pass_through_alone(tmp_path: Path) -> None:
    rope = {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    oracle = HYBRIDS["next without experts"](rope_parameters=rope)
    folder = save(oracle, tmp_path / "yarn")
    got = ours(folder, together(SETTING.lengths))
    assert furthest(got, theirs(Saved(oracle, folder))) < TOLERANCE


def test_bfloat16_stays_near_float32(hybrid: Get) -> None:
    loaded = load(str(hybrid("dense").folder), make_config(device="cpu", dtype="bfloat16"))
    machine = SettlingMachine(loaded.model, loaded.backend, SETTING)
    got = torch.cat(machine.play(alone(SETTING.lengths)))
    want = torch.cat(theirs(hybrid("dense")))
    assert got.dtype == torch.float32
    assert (got - want).abs().mean().item() < 0.1
    assert (got.argmax(-1) == want.argmax(-1)).float().mean().item() > 0.8
