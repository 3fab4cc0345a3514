"""The training form of DeepSeek V4 is the model that the engine runs."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from surefoot.config import make_config
from surefoot.engine.models import load
from surefoot.ids import PageId, SlotId
from surefoot.step import Batch, Row, Step
from tests.unit.backend.cuts import Setting
from tests.unit.model.settling import make_pools
from tools.train.latent import LatentNetwork
from tools.train.latent_experts import Router
from tools.train.latent_sizes import LatentSizes
from tools.train.latent_streams import make_doubly_stochastic
from tools.train.recipes import RECIPES, find_recipe

# Windows of 16 and 8 chosen entries: both limits cut something off in 300 tokens.
SIZES = LatentSizes(
    vocab_size=97,
    hidden_size=48,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=24,
    o_lora_rank=12,
    sliding_window=16,
    index_topk=8,
    moe_intermediate_size=24,
)
PAGE = 128
IDS = torch.randint(SIZES.vocab_size, (1, 300), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def network() -> LatentNetwork:
    """With weights that matter: much starts at 0."""
    torch.manual_seed(0)
    network = LatentNetwork(SIZES)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "scale" in name:
                parameter.fill_(0.7)
            elif parameter.dim() == 1 or "position_bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "hc" not in name:
                parameter.mul_(6)
    return network


@pytest.fixture(scope="module")
def folder(network: LatentNetwork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    save_file(network.state_dict(), folder / "model.safetensors")
    config = RECIPES["tiny-dsv4"].whole_config(asdict(network.sizes))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.inference_mode()
def test_the_engine_computes_what_was_trained(network: LatentNetwork, folder: Path) -> None:
    loaded = load(str(folder), make_config(dtype="float32"))
    model, head, tokens = loaded.model, loaded.model.draft_head, IDS[0].tolist()
    assert head is not None
    setting = Setting([tokens], page_tokens=PAGE, depth=3)
    pools = make_pools(model, loaded.backend, setting, pages=4, slots=1)

    def batch(part: list[int], first: int, certain: int) -> Batch:
        table = [PageId(page) for page in range(1, 5)]
        row = Row(part, first, certain, table, SlotId(1), min(first, 1), len(part), first)
        return Step.of([row], PAGE).build(loaded.backend)

    hidden = network.hidden(IDS)
    drafts = [network.draft_logits(x)[0] for x in network.drafts(IDS, hidden, 3)]
    streams = model.forward(batch(tokens, 0, len(tokens)), pools)
    assert _furthest(model.logits(streams), network.logits(hidden)[0]) < 1e-4
    for row in (5, 140, 250):
        head.catch_up(batch(tokens[1 : row + 1], 1, row), streams[:row], pools)
        state = streams[row : row + 1]
        for depth, wanted in enumerate(drafts, 1):
            at = row + depth
            state = head.forward(batch([tokens[at]], at, 0), state, pools)
            assert _furthest(head.logits(state)[0], wanted[row]) < 1e-4


def _furthest(got: Tensor, wanted: Tensor) -> float:
    assert 0.3 < wanted.std() < 5
    return (got - wanted).abs().max().item()


def test_a_config_makes_the_network_it_is_of(network: LatentNetwork, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    before = torch.get_rng_state()
    recipe = find_recipe(config)
    assert torch.equal(torch.get_rng_state(), before), "looking one up must draw no numbers"
    remade = recipe.remake(config)
    assert remade.sizes == network.sizes
    with pytest.raises(ValueError, match="no recipe makes models of type 'other'"):
        find_recipe({"model_type": "other"})


def test_doubly_stochastic_mixing_and_its_gradient_are_those_of_the_plain_rounds() -> None:
    torch.manual_seed(1)
    scores = torch.randn(2, 5, 4, 4, dtype=torch.float64, requires_grad=True)
    mix = scores.softmax(-1) + 1e-6
    mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)
    for _ in range(4):
        mix = mix / (mix.sum(-1, keepdim=True) + 1e-6)
        mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)
    weights = torch.randn_like(mix)
    wanted = torch.autograd.grad((mix * weights).sum(), scores)
    got = make_doubly_stochastic(scores, 5, 1e-6)
    torch.testing.assert_close(got, mix)
    torch.testing.assert_close(torch.autograd.grad((got * weights).sum(), scores), wanted)


def test_an_overloaded_expert_is_made_less_likely() -> None:
    torch.manual_seed(2)
    router = Router(SIZES, hashed=False)
    with torch.no_grad():
        router.e_score_correction_bias[3] = 9.0
    _, loss = router(torch.randn(2, 30, SIZES.hidden_size), torch.zeros(2, 30, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(loss, router.e_score_correction_bias)
    assert gradient[3] > 0.3
    assert abs(gradient.sum().item()) < 1e-6


def test_the_indexer_learns_and_moves_nothing_else(network: LatentNetwork) -> None:
    _, side = network.run(IDS)
    names, parameters = zip(*network.named_parameters(), strict=True)
    found = torch.autograd.grad(side, parameters, allow_unused=True, materialize_grads=True)
    moved = {name for name, gradient in zip(names, found, strict=True) if gradient.any()}
    assert moved
    assert all(".indexer." in name or name.endswith("correction_bias") for name in moved)
    assert any(".scorer." in name for name in moved)
