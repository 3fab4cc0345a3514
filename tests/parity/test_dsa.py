"""DeepSeek V3.2 and GLM-5 against transformers, however the tokens are cut into steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from surefoot.config import make_config
from surefoot.engine.models import load
from tests.parity.dsa import MODELS, Composed, logits, save
from tests.parity.ours import Ours
from tests.parity.test_logits import BACKENDS, CUTS, TOLERANCE, furthest
from tests.unit.backend.cuts import Machine, Setting, rejecting, same_bits, sequences_of
from tests.unit.model.models import Logits

LENGTHS = (60, 1, 12, 35)


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


@pytest.fixture(scope="module", params=MODELS)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    oracle = MODELS[request.param]()
    folder = save(oracle, tmp_path_factory.mktemp("dsa"))
    setting = Setting(sequences_of(1, 97, LENGTHS), page_tokens=8, depth=3)
    return Known(oracle, folder, setting, [logits(oracle, t) for t in setting.sequences])


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_gives_the_oracles_logits(cut: str, known: Known) -> None:
    got = known.machine().play(CUTS[cut](LENGTHS))
    assert 0.3 < known.logits[0].std().item() < 3
    assert furthest(got, known.logits) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_gives_the_oracles_logits(backend: str, known: Known) -> None:
    script = CUTS["any mix"](LENGTHS)
    assert furthest(known.machine(backend).play(script), known.logits) < TOLERANCE


def test_no_bit_depends_on_the_cut(known: Known) -> None:
    whole = known.machine().play(CUTS["whole"](LENGTHS))
    for cut in ("chunks", "any mix"):
        assert same_bits(known.machine().play(CUTS[cut](LENGTHS)), whole)
    wrong = known.machine(depth=8).play(rejecting(LENGTHS, 8))
    assert same_bits(wrong, whole)


TOKENS = sequences_of(3, 97, (50,))[0]


@pytest.fixture(scope="module", params=["deepseek", "deepseek, yarn", "glm"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Composed, Path]:
    composed = Composed.beside(MODELS[request.param]())
    folder = tmp_path_factory.mktemp("head")
    return composed, save(composed.oracle, folder, composed.tensors())


def test_the_first_draft_has_the_composed_logits(both: tuple[Composed, Path]) -> None:
    composed, ours = both[0], Ours.load(both[1], TOKENS)
    states, logits = composed.run(TOKENS[1:], composed.hidden(TOKENS)[:-1])
    got_states, got = ours.run(TOKENS[1:], 1, ours.hidden()[:-1])
    assert 0.3 < logits.std().item() < 3
    assert furthest([got_states, got], [states, logits]) < TOLERANCE


def test_deeper_drafts_have_the_composed_logits(both: tuple[Composed, Path]) -> None:
    composed, ours = both[0], Ours.load(both[1], TOKENS)
    hidden, own = composed.hidden(TOKENS)[:-1], ours.hidden()
    ours.catch_up(TOKENS[1:-1], 1, own[:-2])
    states, logits = ours.run(TOKENS[-1:], len(TOKENS) - 1, own[-2:-1])
    tokens = list(TOKENS)
    for _ in range(3):
        want_states, want = composed.run(tokens[1:], hidden)
        assert furthest([logits], [want[-1:]]) < TOLERANCE
        tokens.append(int(want[-1].argmax()))
        hidden = torch.cat((hidden, want_states[-1:]))
        states, logits = ours.run(tokens[-1:], len(tokens) - 1, states, deeper=True)


def test_deeper_drafts_may_look_where_the_first_has_looked(tmp_path: Path) -> None:
    composed = Composed.beside(MODELS["glm"]())
    tensors = composed.tensors()
    folder = save(composed.oracle, tmp_path, tensors, index_share_for_mtp_iteration=True)
    ours = Ours.load(folder, TOKENS)
    hidden, own = composed.hidden(TOKENS)[:-1], ours.hidden()
    ours.catch_up(TOKENS[1:-1], 1, own[:-2])
    states, logits = ours.run(TOKENS[-1:], len(TOKENS) - 1, own[-2:-1])
    want_states, want = composed.run(TOKENS[1:], hidden)
    block: Any = composed.layer.mtp_block
    looked_at, tokens = block.looked_at[0], list(TOKENS)
    differs = False
    for _ in range(3):
        assert furthest([logits], [want[-1:]]) < TOLERANCE
        tokens.append(int(want[-1].argmax()))
        hidden = torch.cat((hidden, want_states[-1:]))
        looked_at = torch.cat((looked_at, looked_at[-1:]))
        anew = composed.run(tokens[1:], hidden)[1]
        with composed.looking_at(looked_at):
            want_states, want = composed.run(tokens[1:], hidden)
        differs |= furthest([anew[-1:]], [want[-1:]]) > 100 * TOLERANCE
        states, logits = ours.run(tokens[-1:], len(tokens) - 1, states, deeper=True)
    assert differs, "choosing anew would have come to the same"
