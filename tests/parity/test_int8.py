"""W8A8 against transformers whose weights and inputs of linears are rounded to int8 and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surefoot.config import make_config
from surefoot.engine.models import load
from tests.parity import latents, oracle
from tests.parity.hybrids import HYBRIDS
from tests.parity.oracle import MODELS, logits_of
from tests.parity.test_logits import BACKENDS
from tests.unit.backend.cuts import Setting, alone, sequences_of
from tests.unit.model.settling import SettlingMachine

SETTING = Setting(sequences_of(1, 97, (12,) * 12), page_tokens=16, depth=3)
NEAR = 1e-4
"""Where all codes are the same, logits differ by the order of float sums only."""
MOSTLY = 0.6
"""So many texts are near. In others a code was rounded the other way, as what it is rounded from
differs in its last bits; that changes everything behind it a little, and any fault all texts."""

PROJECTIONS = re.compile(
    r".*\.((q|k|v|o|gate|up|down|q_a|q_b|o_a|o_b|out)_proj|in_proj_(qkv|z|qkvz))\.weight"
    r"|.*\.experts\.(gate_up|down)_proj|lm_head\.weight"
)
COMPRESSORS = re.compile(r".*\.compressor\.(indexer\.)?(kv|gate)_proj\.weight")
LATENTS = re.compile(r".*\.self_attn\.kv_proj\.weight")


def rounded(values: Tensor) -> Tensor:
    """To 255 steps along the last axis, and back."""
    step = values.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, torch.round(values / step) * step, values)


def is_linear(name: str) -> bool:
    if COMPRESSORS.fullmatch(name):
        return False
    return bool(PROJECTIONS.fullmatch(name) or LATENTS.fullmatch(name))


@contextmanager
def fake(model: PreTrainedModel) -> Iterator[set[str]]:
    """Round the weights of linears in place, and their inputs wherever they are multiplied."""
    head = model.get_output_embeddings()
    assert head is not None
    head.weight = nn.Parameter(head.get_parameter("weight").detach().clone())
    chosen = {name: each for name, each in model.named_parameters() if is_linear(name)}
    for parameter in chosen.values():
        parameter.data.copy_(rounded(parameter.data))
    memory = {each.untyped_storage().data_ptr() for each in chosen.values()}
    linear, bmm = torch.nn.functional.linear, torch.bmm

    def near_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ours = weight.untyped_storage().data_ptr() in memory
        return linear(rounded(x) if ours else x, weight, bias)

    def near_bmm(x: Tensor, weight: Tensor) -> Tensor:
        ours = weight.untyped_storage().data_ptr() in memory
        return bmm(rounded(x) if ours else x, weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", near_linear)
        patch.setattr(torch, "bmm", near_bmm)
        yield set(chosen)


Make = Callable[[], PreTrainedModel]
Save = Callable[[PreTrainedModel, Path], Path]

CASES: Mapping[str, tuple[Make, Save]] = {
    "llama with biases": (MODELS["llama with biases"], oracle.save),
    "qwen2": (MODELS["qwen2"], oracle.save),
    "qwen3": (MODELS["qwen3"], oracle.save),
    "dense, tied": (HYBRIDS["dense, tied"], oracle.save),
    "next, some dense": (HYBRIDS["next, some dense"], oracle.save),
    "experts, wrapped, tied": (HYBRIDS["experts, wrapped, tied"], oracle.save),
    "latents": (latents.LATENTS["small windows"], latents.save),
}


def ours(folder: Path, backend: str, quantization: str | None) -> list[Tensor]:
    settings = {**BACKENDS[backend], "quantization": quantization}
    loaded = load(str(folder), make_config(dtype="float32", **settings))
    return SettlingMachine(loaded.model, loaded.backend, SETTING).play(alone(SETTING.lengths))


def near(got: list[Tensor], want: list[Tensor]) -> float:
    """Share of texts whose logits are all near."""
    apart = [(a - b).abs().max().item() for a, b in zip(got, want, strict=True)]
    return sum(each < NEAR for each in apart) / len(apart)


@pytest.mark.parametrize("name", CASES)
def test_int8_is_what_rounding_says(name: str, tmp_path: Path) -> None:
    make, save = CASES[name]
    model = make()
    model.config._experts_implementation = "eager"
    folder = save(model, tmp_path)
    exact = [logits_of(model, tokens) for tokens in SETTING.sequences]
    with fake(model) as chosen:
        want = [logits_of(model, tokens) for tokens in SETTING.sequences]
    assert len(chosen) > 8
    assert near(exact, want) == 0, "otherwise this would say nothing"
    for backend in ("cpu", *(["reference"] if name == "qwen3" else [])):
        assert near(ours(folder, backend, "w8a8"), want) > MOSTLY
