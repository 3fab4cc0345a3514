"""DeepSeek V4 against transformers, however the tokens are cut into steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from surefoot.config import make_config
from surefoot.engine.models import load
from tests.parity.latents import LATENTS, Composed, save
from tests.parity.oracle import logits_of
from tests.parity.ours import Ours
from tests.parity.test_logits import BACKENDS, CUTS, TOLERANCE, furthest
from tests.unit.backend.cuts import Machine, Setting, rejecting, same_bits, sequences_of
from tests.unit.model.models import Logits

LENGTHS: Mapping[str, Sequence[int]] = {"real ratios": (270, 5, 131)}
PAGES: Mapping[str, int] = {"real ratios": 128}


@dataclass(frozen=True)
class Known:
    """A model of transformers, its folder, and what it says of some sequences."""

    oracle: PreTrainedModel
    folder: Path
    setting: Setting
    logits: list[Tensor]

    def machine(self, backend: str = "cpu", depth: int = 3) -> Machine:
        loaded = load(str(self.folder), make_config(dtype="float32", **BACKENDS[backend]))
        setting = replace(self.setting, depth=depth)
        return Machine(Logits(loaded.model), loaded.backend, setting)


@pytest.fixture(scope="module", params=LATENTS)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    oracle = LATENTS[request.param]()
    folder = save(oracle, tmp_path_factory.mktemp("latents"))
    lengths = LENGTHS.get(request.param, (45, 1, 12, 30))
    setting = Setting(sequences_of(1, 97, lengths), PAGES.get(request.param, 16), depth=3)
    return Known(oracle, folder, setting, [logits_of(oracle, t) for t in setting.sequences])


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_gives_the_oracles_logits(cut: str, known: Known) -> None:
    script = CUTS[cut](known.setting.lengths)
    got = known.machine().play(script)
    assert furthest(got, known.logits) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_gives_the_oracles_logits(backend: str, known: Known) -> None:
    script = CUTS["any mix"](known.setting.lengths)
    assert furthest(known.machine(backend).play(script), known.logits) < TOLERANCE


def test_no_bit_depends_on_the_cut(known: Known) -> None:
    lengths = known.setting.lengths
    whole = known.machine().play(CUTS["whole"](lengths))
    for seed in range(2):
        mixed = CUTS["any mix"](lengths) if seed else CUTS["chunks"](lengths)
        assert same_bits(known.machine().play(mixed), whole)


def test_nothing_of_nine_tokens_that_are_rejected_is_left(known: Known) -> None:
    lengths = known.setting.lengths
    whole = known.machine().play(CUTS["whole"](lengths))
    assert same_bits(known.machine(depth=8).play(rejecting(lengths, 8)), whole)


TOKENS = sequences_of(3, 97, (37,))[0]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Composed, Path]:
    composed = Composed.beside(LATENTS["small windows"]())
    folder = tmp_path_factory.mktemp("head")
    return composed, save(composed.oracle, folder, composed.tensors())


def test_the_model_hands_its_streams_to_the_head(both: tuple[Composed, Path]) -> None:
    composed, ours = both[0], Ours.load(both[1], TOKENS)
    assert furthest([ours.hidden()], [composed.streams(TOKENS)]) < TOLERANCE


def test_the_first_draft_has_the_composed_logits(both: tuple[Composed, Path]) -> None:
    composed, ours = both[0], Ours.load(both[1], TOKENS)
    streams, logits = composed.run(TOKENS[1:], composed.streams(TOKENS)[:-1])
    got_streams, got = ours.run(TOKENS[1:], 1, ours.hidden()[:-1])
    assert 0.3 < logits.std().item() < 3
    assert furthest([got_streams, got], [streams, logits]) < TOLERANCE


def test_deeper_drafts_have_the_composed_logits(both: tuple[Composed, Path]) -> None:
    composed, ours = both[0], Ours.load(both[1], TOKENS)
    hidden, own = composed.streams(TOKENS)[:-1], ours.hidden()
    ours.catch_up(TOKENS[1:-1], 1, own[:-2])
    states, logits = ours.run(TOKENS[-1:], len(TOKENS) - 1, own[-2:-1])
    tokens = list(TOKENS)
    for _ in range(3):
        want_states, want = composed.run(tokens[1:], hidden)
        assert furthest([logits], [want[-1:]]) < TOLERANCE
        tokens.append(int(want[-1].argmax()))
        hidden = torch.cat((hidden, want_states[-1:]))
        states, logits = ours.run(tokens[-1:], len(tokens) - 1, states)
