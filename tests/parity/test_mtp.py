"""The draft head against the same head put together from transformers' modules."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.backend.cpu import CpuBackend
from surefoot.engine.models import load_on, silent
from surefoot.ids import PageId, SlotId
from surefoot.model.model import DraftHead, Model
from surefoot.state.pool import Pools
from surefoot.step import Batch, Row, Step
from tests.parity.hybrids import HYBRIDS, drawn
from tests.parity.oracle import reopened, save
from tests.unit.backend.cuts import Setting, sequences_of
from tests.unit.model.edits import edit_config, edit_weights
from tests.unit.model.settling import make_pools

TOKENS = sequences_of(3, 97, (37,))[0]
SETTING = Setting([TOKENS], page_tokens=8, depth=3)
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Composed:
    """A head of transformers' modules beside its model."""

    oracle: PreTrainedModel
    norms: Mapping[str, nn.Module]
    fc: nn.Module
    layer: nn.Module

    @staticmethod
    def beside(oracle: PreTrainedModel) -> Composed:
        config = copy.deepcopy(oracle.config)
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        module = sys.modules[type(oracle).__module__]
        family = type(oracle).__name__.removesuffix("ForCausalLM")
        layer = getattr(module, family + "DecoderLayer")(config, 0).eval()
        norm = getattr(module, family + "RMSNorm")
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        norms = {name: norm(config.hidden_size) for name in names}
        fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        made = Composed(oracle, norms, fc, layer)
        draws = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for name, parameter in made.tensors().items():
                parameter.copy_(drawn(name, parameter, draws))
        return made

    def tensors(self) -> dict[str, Tensor]:
        named = {
            f"mtp.{name}.weight": norm.get_parameter("weight") for name, norm in self.norms.items()
        }
        named["mtp.fc.weight"] = self.fc.get_parameter("weight")
        inner = {f"mtp.layers.0.{name}": value for name, value in self.layer.state_dict().items()}
        return named | inner

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> Tensor:
        states: Tensor = self.oracle.base_model(torch.tensor([tokens])).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """States and logits of entries 1.. from their tokens and the state before each."""
        embedded = self.oracle.get_input_embeddings()(torch.tensor(list(tokens)))
        parts = (
            self.norms["pre_fc_norm_embedding"](embedded),
            self.norms["pre_fc_norm_hidden"](hidden),
        )
        z, count = self.fc(torch.cat(parts, -1))[None], len(tokens)
        positions = torch.arange(1, count + 1)[None]
        angles = self.oracle.base_model.get_submodule("rotary_emb")(z, positions)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        out = self.layer(z, position_embeddings=angles, attention_mask=mask, position_ids=positions)
        states = self.norms["norm"](out[0] if out.dim() == 3 else out)
        logits: Tensor = self.oracle.get_output_embeddings()(states)
        return states, logits


@dataclass(frozen=True)
class Ours:
    """Our model of the same weights, with caches."""

    model: Model
    head: DraftHead
    backend: CpuBackend
    pools: Pools

    @staticmethod
    def load(folder: Path) -> Ours:
        backend = CpuBackend(bitwise=True)
        model = load_on("hybrid", folder, backend, "float32", silent).model
        assert model.draft_head is not None
        pools = make_pools(model, backend, SETTING, pages=8, slots=1)
        return Ours(model, model.draft_head, backend, pools)

    def batch(self, tokens: Sequence[int], first: int, certain: int) -> Batch:
        table = [PageId(page) for page in range(1, 9)]
        row = Row(tokens, first, certain, table, SlotId(1), min(first, 1), len(tokens), first)
        return Step.of([row], SETTING.page_tokens).build(self.backend)

    @torch.inference_mode()
    def hidden(self) -> Tensor:
        batch = self.batch(TOKENS, 0, len(TOKENS))
        return self.head.enter(self.model.forward(batch, self.pools))

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], first: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        states = self.head.forward(self.batch(tokens, first, 0), hidden, self.pools)
        return states, self.head.logits(states)

    @torch.inference_mode()
    def catch_up(self, tokens: Sequence[int], first: int, hidden: Tensor) -> None:
        self.head.catch_up(self.batch(tokens, first, len(tokens)), hidden, self.pools)


WRONGLY_TIED = ", wrongly tied"
NAMES = ("next", "next without experts", "dense", "dense, tied", "dense" + WRONGLY_TIED, "experts")


@pytest.fixture(scope="module", params=NAMES)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Composed, Path]:
    """A config that ties a head which the file has all the same is one of the cases."""
    oracle = HYBRIDS[request.param.removesuffix(WRONGLY_TIED)]()
    folder = save(oracle, tmp_path_factory.mktemp("mtp"))
    if request.param.endswith(WRONGLY_TIED):
        edit_config(folder, tie_word_embeddings=True)
        oracle = reopened(oracle, folder)
    composed = Composed.beside(oracle)
    head = {name: value.detach().clone() for name, value in composed.tensors().items()}
    edit_weights(folder, lambda tensors: tensors.update(head))
    return composed, folder


def distance(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def test_the_first_draft_has_the_composed_logits(both: tuple[Composed, Path]) -> None:
    composed, ours = both[0], Ours.load(both[1])
    states, logits = composed.run(TOKENS[1:], composed.hidden(TOKENS)[:-1])
    got_states, got = ours.run(TOKENS[1:], 1, ours.hidden()[:-1])
    assert 0.3 < logits.std().item() < 3
    assert distance(got, logits) < TOLERANCE
    assert distance(got_states, states) < TOLERANCE


def test_deeper_drafts_have_the_composed_logits(both: tuple[Composed, Path]) -> None:
    composed, ours = both[0], Ours.load(both[1])
    hidden = composed.hidden(TOKENS)[:-1]
    own = ours.hidden()
    ours.catch_up(TOKENS[1:-1], 1, own[:-2])
    states, logits = ours.run(TOKENS[-1:], len(TOKENS) - 1, own[-2:-1])
    tokens = list(TOKENS)
    for _ in range(3):
        want_states, want = composed.run(tokens[1:], hidden)
        assert distance(logits, want[-1:]) < TOLERANCE
        tokens.append(int(want[-1].argmax()))
        hidden = torch.cat((hidden, want_states[-1:]))
        states, logits = ours.run(tokens[-1:], len(tokens) - 1, states)


def test_catching_up_writes_what_a_full_pass_would(both: tuple[Composed, Path]) -> None:
    whole, cut = Ours.load(both[1]), Ours.load(both[1])
    hidden = whole.hidden()
    whole.run(TOKENS[1:], 1, hidden[:-1])
    for first in range(1, len(TOKENS), 5):
        stop = min(first + 5, len(TOKENS))
        cut.catch_up(TOKENS[first:stop], first, hidden[first - 1 : stop - 1])
    for part in ("k", "v"):
        got, want = (each.pools.paged("mtp.kv", part) for each in (cut, whole))
        assert want.abs().max() > 0.1
        assert distance(got, want) < 1e-5
