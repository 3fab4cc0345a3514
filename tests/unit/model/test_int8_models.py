"""Models with linears in int8: made so on loading, or as ModelSlim stores them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.backend.cpu import CpuBackend
from surefoot.backend.operands import Int8Weight, Weight
from surefoot.engine.models import LoadedModel, load_on, silent
from surefoot.errors import WeightsError
from surefoot.ids import PageId, SlotId
from surefoot.model import deepseek_v4_weights, qwen3_5_weights
from surefoot.model.layers import weights as joining
from surefoot.model.registry import FAMILIES
from surefoot.step import Batch, Row, Step
from surefoot.testing.tiny_dsa import TinyDsaSizes, write_tiny_dsa
from surefoot.testing.tiny_hybrids import write_tiny_hybrid
from surefoot.testing.tiny_latents import write_tiny_latents
from surefoot.testing.tiny_models import write_tiny
from surefoot.weights import taker
from surefoot.weights.deepseek_v4 import transformers_name
from surefoot.weights.modelslim import ModelSlimCheckpoint
from tests.unit.backend.cuts import Setting, sequences_of
from tests.unit.model.edits import edit_weights
from tests.unit.model.settling import make_pools
from tests.unit.model.test_qwen3_5_layouts import one_by_one
from tests.unit.weights import test_deepseek_v4 as release
from tests.unit.weights.modelslim_files import DYNAMIC, FLOAT, STATIC, Decide, edit, to_modelslim

TOKENS = sequences_of(1, 64, (24,))[0]
PAGE = 16
QUANT_ERROR = 0.2
"""How far logits of int8 lie from those of floats at most, in terms of the size of the latter. Most
lie nearer; with random weights, now and then another expert is chosen."""
GARBAGE = 0.4
"""How far they lie at least where a fault is planted."""

CHOSEN = TinyDsaSizes(index_chosen=64)
"""All positions are chosen, as int8 may well choose others."""

Write = Callable[[Path], Path]


def write_hybrid(folder: Path, architecture: str) -> Path:
    write_tiny_hybrid(folder, architecture)
    edit_weights(folder, one_by_one)
    return folder


def write_latents(folder: Path) -> Path:
    write_tiny_latents(folder)
    edit_weights(folder, one_by_one)
    return folder


MODELS: dict[str, Write] = {
    "llama": lambda folder: write_tiny(folder, "LlamaForCausalLM", tied=True),
    "qwen2": lambda folder: write_tiny(folder, "Qwen2ForCausalLM"),
    "qwen3": lambda folder: write_tiny(folder, "Qwen3ForCausalLM"),
    "hybrid": lambda folder: write_hybrid(folder, "Qwen3_5ForCausalLM"),
    "hybrid experts": lambda folder: write_hybrid(folder, "Qwen3_5MoeForConditionalGeneration"),
    "next": lambda folder: write_hybrid(folder, "Qwen3NextForCausalLM"),
    "latents": write_latents,
    "chosen": lambda folder: write_tiny_dsa(folder, CHOSEN),
}
HEADS = {
    "hybrid": "mtp.",
    "hybrid experts": "mtp.",
    "latents": "mtp.",
    "chosen": f"model.layers.{CHOSEN.layers}.",
}
"""Draft heads, by the beginning of their tensors' names."""


def linears(folder_model: str) -> Decide:
    """All that W8A8 makes int8, but for the output head, as ModelSlim usually leaves that."""
    architecture = {
        "latents": "DeepseekV4ForCausalLM",
        "hybrid": "Qwen3_5ForCausalLM",
        "hybrid experts": "Qwen3_5ForCausalLM",
        "next": "Qwen3NextForCausalLM",
        "chosen": "DeepseekV32ForCausalLM",
    }.get(folder_model, "LlamaForCausalLM")
    pattern = FAMILIES[architecture].int8_linears
    assert pattern is not None

    def decide(name: str) -> str:
        return DYNAMIC if pattern.fullmatch(name) and "lm_head" not in name else FLOAT

    return decide


def loaded(folder: Path, quantization: str | None = None) -> LoadedModel:
    backend = CpuBackend(bitwise=True)
    return load_on("tiny", folder, backend, "float32", silent, quantization=quantization)


@torch.inference_mode()
def said(target: LoadedModel) -> tuple[Tensor, Tensor]:
    """Logits of the model and of its draft head, if it has one, along one text."""
    model, backend, count = target.model, target.backend, len(TOKENS)
    pools = make_pools(model, backend, Setting([TOKENS], PAGE, 1), pages=2, slots=1)
    table = [PageId(1), PageId(2)]

    def batch(tokens: Sequence[int], first: int) -> Batch:
        row = Row(list(tokens), first, len(tokens), table, SlotId(1), first, len(tokens), first)
        return Step.of([row], PAGE).build(backend)

    hidden = model.forward(batch(TOKENS, 0), pools)
    head = model.draft_head
    if head is None:
        return model.logits(hidden), torch.zeros(count, 1)
    before = head.enter(hidden[:-1])
    drafted = head.forward(batch(TOKENS[1:], 1), before, pools)
    return model.logits(hidden), head.logits(drafted)


def apart(got: Tensor, want: Tensor) -> float:
    """Distance in terms of the size of what is wanted."""
    return float((got - want).norm() / want.norm().clamp(min=1e-9))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def by_name(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name](tmp_path_factory.mktemp("floats"))
        return made[name]

    return by_name


@pytest.fixture
def copied(folders: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A folder of floats that may be changed."""
    return lambda name: Path(shutil.copytree(folders(name), tmp_path / "copy"))


Get = Callable[[str], Path]


@pytest.mark.parametrize("name", MODELS)
def test_int8_made_on_loading_is_near_floats(name: str, folders: Get) -> None:
    exact, near = said(loaded(folders(name))), said(loaded(folders(name), "w8a8"))
    assert 0 < apart(near[0], exact[0]) < QUANT_ERROR
    assert apart(near[1], exact[1]) < QUANT_ERROR


@pytest.mark.parametrize("name", MODELS)
def test_modelslim_s_dynamic_form_is_what_is_made_on_loading(name: str, copied: Get) -> None:
    """But for the output head, which it leaves in floats: so that one is taken off here."""
    folder = copied(name)
    made = said(_with_float_head(folder))
    decide, names = linears(name), _release_names(folder) if name == "latents" else {}
    stored = loaded(to_modelslim(folder, decide, lambda own: _renamed(own, names)))
    assert stored.form == "modelslim"
    for ours, theirs in zip(said(stored), made, strict=True):
        assert torch.equal(ours, theirs)


def _with_float_head(folder: Path) -> LoadedModel:
    before = taker.TensorTaker.weight

    def weight(self: taker.TensorTaker, name: str, shape: tuple[int, ...]) -> Weight:
        return self.take(name, shape) if name == "lm_head.weight" else before(self, name, shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taker.TensorTaker, "weight", weight)
        patch.setattr(taker.TensorTaker, "shared", lambda *_: None)
        return loaded(folder, "w8a8")


def _release_names(folder: Path) -> dict[str, str]:
    """From transformers' names to the release's."""
    layers = [f"layers.{n}." for n in range(3)]
    block = {**release.BLOCK, **release.COMPRESSED}
    experts = {
        f"ffn.experts.{expert}.{old}.weight": f"mlp.experts.{expert}.{new}_proj.weight"
        for expert in range(8)
        for old, new in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    }
    both = block | experts
    return (
        {new: old for old, new in release.OUTER.items()}
        | {f"model.{start}{new}": start + old for start in layers for old, new in both.items()}
        | {f"mtp.0.{new}": f"mtp.0.{old}" for old, new in (both | release.HEAD).items()}
    )


def _renamed(name: str, names: dict[str, str]) -> str:
    """A tensor's name in the release; what stands beside a weight goes with it."""
    if not names or name in names:
        return names.get(name, name)
    module, _, part = name.rpartition(".")
    stored = names[module + ".weight"].removesuffix("weight") + part
    assert transformers_name(stored) == name
    return stored


MIXES: dict[str, Callable[[bool], str]] = {
    "all int8": lambda _: DYNAMIC,
    "body int8, head floats": lambda of_head: FLOAT if of_head else DYNAMIC,
    "body floats, head int8": lambda of_head: DYNAMIC if of_head else FLOAT,
}
"""What is decided for a tensor of the draft head or of the body."""


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", HEADS)
def test_body_and_draft_head_are_decided_apart(name: str, mix: str, copied: Get) -> None:
    folder, decide = copied(name), linears(name)
    exact = said(loaded(folder))

    def mixed(own: str) -> str:
        return MIXES[mix](own.startswith(HEADS[name])) if decide(own) == DYNAMIC else FLOAT

    to_modelslim(folder, mixed)
    got = said(loaded(folder))
    assert (apart(got[0], exact[0]) > 0) == mix.startswith(("all", "body int8"))
    assert apart(got[0], exact[0]) < QUANT_ERROR
    assert 0 < apart(got[1], exact[1]) < QUANT_ERROR


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_the_static_form_is_near_floats(name: str, copied: Get) -> None:
    """With and without biases, which the sums have already."""
    folder = copied(name)
    exact = said(loaded(folder))[0]
    inward = re.compile(r".*\.([qkv]|gate|up)_proj\.weight")
    to_modelslim(folder, lambda own: STATIC if inward.fullmatch(own) else FLOAT)
    assert 0 < apart(said(loaded(folder))[0], exact) < QUANT_ERROR


MIXED = {
    "qwen3": (r"layers.1.self_attn.k_proj", r"'model.layers.1.self_attn.q_proj.weight' in int8"),
    "hybrid": (r"layers.0.linear_attn.in_proj_z", r"linear_attn.in_proj_qkv.weight' in int8"),
    "hybrid experts": (r"layers.1.mlp.experts.2.up_proj", r"experts.2.gate_proj.weight' in int8"),
    "latents": (r"layers.1.self_attn.kv_proj", r"self_attn.q_a_proj.weight' in int8"),
}


@pytest.mark.parametrize("name", MIXED)
def test_shards_of_one_product_that_differ_are_named(name: str, copied: Get) -> None:
    folder, decide = copied(name), linears(name)
    odd, other = MIXED[name]
    to_modelslim(folder, lambda own: FLOAT if odd in own else decide(own))
    with pytest.raises(WeightsError, match=f"{other}.*{odd}.weight' in floats|{odd}.*{other}"):
        loaded(folder)


def test_shards_whose_inputs_are_scaled_apart_are_named(copied: Get) -> None:
    folder = copied("qwen3")
    to_modelslim(folder, lambda own: STATIC if "q_proj" in own or "k_proj" in own else FLOAT)
    with pytest.raises(WeightsError, match=r"q_proj.weight' in int8 for inputs of scale"):
        loaded(folder)
    module = "model.layers.0.self_attn."
    folder = to_modelslim(
        MODELS["qwen3"](folder.parent / "other"),
        lambda own: STATIC if module in own and own.endswith("proj.weight") else FLOAT,
    )
    edit(folder, lambda tensors, _: tensors[module + "k_proj.input_scale"].mul_(2))
    with pytest.raises(WeightsError, match=r"k_proj.weight' in int8 for inputs of scale 0.0799"):
        loaded(folder)


def test_experts_that_differ_are_named(copied: Get) -> None:
    folder, decide = copied("latents"), linears("latents")
    odd = "layers.1.mlp.experts.2."
    to_modelslim(folder, lambda own: FLOAT if odd in own else decide(own))
    with pytest.raises(WeightsError, match=r"experts.0.' in int8, '.*experts.2.' in floats"):
        loaded(folder)


def ignored(patch: pytest.MonkeyPatch) -> None:
    """Planted: decisions are ignored, and codes are copied into weights of floats."""
    patch.setattr(ModelSlimCheckpoint, "int8", lambda *_: None)
    patch.setattr(taker, "_FLOATS", taker._FLOATS | {torch.int8})


def turned(patch: pytest.MonkeyPatch) -> None:
    """Planted: the scales of shards are joined in another order than the shards."""
    right = joining.joined

    def joined(weights: Sequence[Weight]) -> Weight:
        whole = right(weights)
        if not isinstance(whole, Int8Weight):
            return whole
        backwards = [each.scales for each in weights[::-1] if isinstance(each, Int8Weight)]
        return Int8Weight(whole.values, torch.cat(backwards), whole.fixed)

    for module in (joining, qwen3_5_weights, deepseek_v4_weights):
        patch.setattr(module, "joined", joined)


@pytest.mark.parametrize("fault", [ignored, turned])
@pytest.mark.parametrize("name", ["qwen3", "hybrid", "latents"])
def test_a_planted_fault_is_no_quant_error(
    name: str,
    fault: Callable[[pytest.MonkeyPatch], None],
    copied: Get,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shards differ in size, as they do in trained models, so that their scales do."""
    folder = copied(name)
    edit_weights(folder, uneven)
    exact = said(loaded(folder))[0]
    to_modelslim(folder, linears(name))
    assert apart(said(loaded(folder))[0], exact) < QUANT_ERROR
    fault(monkeypatch)
    assert apart(said(loaded(folder))[0], exact) > GARBAGE


def uneven(tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        if re.search(r"(k_proj|in_proj_z|q_a_proj|up_proj)\.weight", name):
            tensors[name] *= 4
