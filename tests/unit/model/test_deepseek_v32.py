"""Configs of DeepSeek V3.2 and GLM-5 as they are written, and what becomes of their tensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surefoot.backend import make_backend
from surefoot.backend.cpu import CpuBackend
from surefoot.engine.models import load_on, silent
from surefoot.errors import ModelError, WeightsError
from surefoot.model.deepseek_v32 import ChosenModel, describe
from surefoot.model.deepseek_v32_config import FULL, SHARED, read_config
from surefoot.model.layers.grouped import GroupedChoice, GroupedSizes
from surefoot.state.pool import Pools
from surefoot.state.spec import Paged
from surefoot.step import Step
from surefoot.testing.tiny_dsa import GLM, TinyDsaSizes, main, make_dsa_config, write_tiny_dsa
from tests.unit import dsa
from tests.unit.backend.cuts import Setting, alone, plan_of, same_bits, sequences_of
from tests.unit.model.models import Logits
from tests.unit.model.settling import SettlingMachine

_rope = dsa.DEEPSEEK["rope_scaling"]
assert isinstance(_rope, dict)
YARN: dict[str, object] = _rope


def config(**entries: object) -> dict[str, object]:
    changed = {**make_dsa_config(TinyDsaSizes()), **entries}
    return {name: value for name, value in changed.items() if value != "absent"}


def test_the_release_of_deepseek_is_understood() -> None:
    known = read_config(dsa.DEEPSEEK)
    assert known.kinds == (FULL,) * 61
    assert known.attention.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert not known.index.neighbours
    assert known.rotary(64).factor == 1.0
    # 671 billion as it is told everywhere, and the indexers of all layers, not of the head.
    assert known.parameters(mtp=False) == pytest.approx(671.9e9, rel=1e-3)
    assert not known.one_choice


def test_the_release_of_glm_is_understood() -> None:
    known = read_config(dsa.GLM)
    assert known.kinds == (FULL,) * 78
    assert known.attention.scale == 256**-0.5
    assert known.index.neighbours
    assert known.theta == 1000000
    # 744 billion as it is told.
    assert known.parameters(mtp=False) == pytest.approx(744e9, rel=2e-3)


@pytest.mark.parametrize(("name", "layers"), [("DEEPSEEK", 61), ("GLM", 78)])
def test_a_token_takes_its_latents_and_index_keys(name: str, layers: int) -> None:
    described = describe(getattr(dsa, name), "bfloat16", "")
    of_token = [cache.page_bytes(16) for cache in described.caches if isinstance(cache, Paged)]
    assert sum(of_token) == 16 * layers * (512 + 64 + 128) * 2
    of_head = [cache.page_bytes(16) for cache in described.draft_caches if isinstance(cache, Paged)]
    assert sum(of_head) == 16 * (512 + 64 + 128) * 2


def test_layers_that_share_a_choice_keep_no_index_keys() -> None:
    described = describe(dict(dsa.GLM, index_topk_freq=4), "bfloat16", "")
    # Layers 0, 1, 5, 9, ...
    assert [i for i, kind in enumerate(described.layers) if kind == FULL][:4] == [0, 1, 5, 9]
    assert [cache.layers for cache in described.caches] == [78, 21]


@pytest.mark.parametrize(
    "entries",
    [
        {"indexer_types": ["full", "shared", "full"]},
        {"index_topk_pattern": "FSF"},
        {"index_topk_pattern": ["full", "shared", "full"]},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
        {"indexer_types": ["full", "shared", "full"], "index_topk_pattern": "FFF"},
    ],
)
def test_which_layers_share_is_told_in_several_ways(entries: dict[str, object]) -> None:
    assert read_config(config(**entries)).kinds == (FULL, SHARED, FULL)


def test_ropes_stand_in_either_place() -> None:
    older = config(rope_parameters="absent", rope_scaling=YARN, rope_theta=500.0)
    newer = config(rope_parameters={**YARN, "rope_type": "yarn", "rope_theta": 500.0})
    for entries in (older, newer):
        known = read_config(entries)
        assert known.theta == 500.0
        assert known.attention.sharpened == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    plain = read_config(config(rope_parameters="absent", rope_theta=500.0))
    assert (plain.theta, plain.attention.sharpened) == (500.0, 1.0)


def test_pairs_of_the_indexer_go_by_the_architecture_or_by_the_config() -> None:
    glm = make_dsa_config(TinyDsaSizes(architecture=GLM))
    assert read_config(glm).index.neighbours
    assert not read_config({**glm, "indexer_rope_interleave": False}).index.neighbours
    assert read_config(config(indexer_rope_interleave=True)).index.neighbours
    assert not read_config(config()).index.neighbours


NONSENSE: list[tuple[dict[str, object], str]] = [
    ({"index_topk": 0}, "index_topk must be at least 1, not 0"),
    ({"index_topk": "absent"}, "'index_topk' must be a whole number, and it is missing"),
    ({"kv_lora_rank": "absent"}, "'kv_lora_rank' must be a whole number"),
    ({"q_lora_rank": None}, "'q_lora_rank' must be a whole number"),
    ({"rms_norm_eps": "absent"}, "'rms_norm_eps' must be a number"),
    ({"first_k_dense_replace": "absent"}, "'first_k_dense_replace' must be a whole number"),
    ({"first_k_dense_replace": -1}, "first_k_dense_replace must be 0 or more"),
    ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must name 3 known kinds"),
    ({"indexer_types": ["full", "half", "full"]}, "indexer_types must name 3 known kinds"),
    ({"indexer_types": ["shared", "full", "full"]}, "indexer_types must begin with 'full'"),
    ({"index_topk_pattern": "FX"}, "index_topk_pattern must name 3 known kinds"),
    ({"index_topk_pattern": 3}, "'index_topk_pattern' must be letters F and S"),
    ({"rope_parameters": "absent"}, "'rope_theta' must be a number"),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be above 1"),
    ({"rope_parameters": {**YARN, "rope_theta": 9.0, "factor": 0}}, "rope factor must be above 0"),
    ({"rope_parameters": {"rope_type": "odd", "rope_theta": 9.0}}, "rope scaling 'odd'"),
    ({"qk_rope_head_dim": 7}, "rope cannot turn 7"),
    ({"index_head_dim": 6}, "rope cannot turn 8 of a head's 6"),
    ({"n_group": 3}, "8 experts cannot form n_group 3 groups"),
    ({"n_group": 8}, "8 experts cannot form n_group 8 groups"),
    ({"topk_group": 5}, "topk_group 5 is more than n_group 4"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than topk_group 2 groups have"),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2 is not supported"),
    ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
    ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
    ({"attention_bias": True}, "attention_bias True is not supported"),
    ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
    ({"index_share_for_mtp_iteration": 1}, "'index_share_for_mtp_iteration' must be true or false"),
    ({"indexer_rope_interleave": "yes"}, "'indexer_rope_interleave' must be true or false"),
    ({"architectures": ["Other"]}, "architectures must be one of"),
]


@pytest.mark.parametrize(("entries", "message"), NONSENSE)
def test_what_makes_no_sense_is_named(entries: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        describe(config(**entries), "float32", "")


@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize("every", [1, 2])
def test_the_parameters_are_those_of_the_file(every: int, mtp: bool, tmp_path: Path) -> None:
    size = TinyDsaSizes(architecture=GLM, every=every)
    stored = load_file(write_tiny_dsa(tmp_path, size, mtp=mtp) / "model.safetensors")
    copies = ("layers.3.embed_tokens.weight", "layers.3.shared_head.head.weight")
    count = sum(stored[name].numel() for name in stored if not name.endswith(copies))
    assert describe(make_dsa_config(size, mtp), "float32", "").parameters == count


def loaded(folder: Path, dtype: str = "float32") -> ChosenModel:
    model = load_on("tiny", folder, CpuBackend(), dtype, silent).model
    assert isinstance(model, ChosenModel)
    return model


SETTING = Setting(sequences_of(2, 64, (40,)), page_tokens=16, depth=1)


def logits(model: ChosenModel) -> list[Tensor]:
    return SettlingMachine(model, CpuBackend(), SETTING).play(alone(SETTING.lengths))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def test_experts_stored_whole_are_the_same_experts(tmp_path: Path) -> None:
    one_by_one = write_tiny_dsa(tmp_path / "one")

    def join(tensors: dict[str, Tensor]) -> None:
        for layer in (1, 2, 3):
            name = f"model.layers.{layer}.mlp.experts."
            parts = {
                part: [tensors.pop(f"{name}{expert}.{part}_proj.weight") for expert in range(8)]
                for part in ("gate", "up", "down")
            }
            tensors[name + "down_proj"] = torch.stack(parts["down"])
            pairs = zip(parts["gate"], parts["up"], strict=True)
            tensors[name + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])

    whole = rewrite(write_tiny_dsa(tmp_path / "whole"), join)
    assert same_bits(logits(loaded(one_by_one)), logits(loaded(whole)))


def test_blocks_of_8_bit_floats_are_expanded(tmp_path: Path) -> None:
    """As the release stores linears, with norms, routers and the heads' weights in floats."""
    kept = re.compile(r"norm|embed|lm_head|head\.weight|gate\.|weights_proj|eh_proj")
    eight, floats = write_tiny_dsa(tmp_path / "eight"), write_tiny_dsa(tmp_path / "floats")

    def narrow(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if not kept.search(name)]:
            weight = tensors[name]
            tensors[name] = (weight / 0.25).to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = torch.full((1, 1), 0.25)

    def round_(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if not kept.search(name)]:
            tensors[name] = (tensors[name] / 0.25).to(torch.float8_e4m3fn).float() * 0.25

    details = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    entries = {**make_dsa_config(TinyDsaSizes()), "quantization_config": details}
    (eight / "config.json").write_text(json.dumps(entries))
    narrowed = loaded(rewrite(eight, narrow))
    assert narrowed.draft_head is not None
    assert same_bits(logits(narrowed), logits(loaded(rewrite(floats, round_))))


@pytest.mark.parametrize("name", ["embed_tokens.weight", "shared_head.head.weight"])
def test_a_copy_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"model.layers.3.{name}"][5, 7] += 1

    folder = rewrite(write_tiny_dsa(tmp_path), change)
    with pytest.raises(WeightsError, match=re.escape(f"'model.layers.3.{name}' must repeat")):
        loaded(folder)


def test_a_head_without_copies_is_the_same_head(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.3.embed_tokens.weight"]
        del tensors["model.layers.3.shared_head.head.weight"]

    assert loaded(rewrite(write_tiny_dsa(tmp_path), change)).draft_head is not None


def test_there_is_no_head_without_its_tensors(tmp_path: Path) -> None:
    model = loaded(write_tiny_dsa(tmp_path, mtp=False))
    assert model.draft_head is None
    assert model.description.draft_caches == ()


def test_every_tensor_is_wanted(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.self_attn.indexer.more.weight"] = torch.zeros(1)

    with pytest.raises(WeightsError, match="does not use"):
        loaded(rewrite(write_tiny_dsa(tmp_path), change))


def test_a_layer_that_shares_has_no_indexer(tmp_path: Path) -> None:
    """A file that has one all the same belongs to another config."""
    folder = write_tiny_dsa(tmp_path, TinyDsaSizes(architecture=GLM))
    entries = make_dsa_config(TinyDsaSizes(architecture=GLM, every=2))
    (folder / "config.json").write_text(json.dumps(entries))
    with pytest.raises(WeightsError, match=re.escape("layers.1.self_attn.indexer")):
        loaded(folder)


def test_a_backend_that_cannot_attend_to_chosen_positions_says_so(tmp_path: Path) -> None:
    backend = make_backend("npu", None, emulate=True)
    with pytest.raises(ModelError, match=re.escape("'npu (emulated)' cannot do yet")):
        load_on("tiny", write_tiny_dsa(tmp_path), backend, "bfloat16", silent)


def test_sixteen_bits_are_close(tmp_path: Path) -> None:
    folder = write_tiny_dsa(tmp_path, TinyDsaSizes(architecture=GLM, every=2, index_chosen=64))
    [want], [got] = logits(loaded(folder)), logits(loaded(folder, "bfloat16"))
    assert 0 < (got - want).abs().mean() < 0.05 * want.std()


def test_a_small_model_is_written_from_a_shell(tmp_path: Path) -> None:
    told = ["--dial", "0.5", "--architecture", GLM, "--every", "2", "--one-choice"]
    main([str(tmp_path), *told])
    model = loaded(tmp_path)
    assert model.config.kinds == (FULL, SHARED, FULL)
    assert model.draft_head is not None
    assert model.draft_head.deepens
    assert (tmp_path / "tokenizer.json").is_file()


def test_a_step_without_tokens_is_fine(tmp_path: Path) -> None:
    model, backend = loaded(write_tiny_dsa(tmp_path)), CpuBackend()
    plan = plan_of(Setting([[1]], page_tokens=16), 2, 2)
    pools = Pools(model.description.caches, plan, backend.device)
    with torch.inference_mode():
        hidden = model.forward(Step.of([], 16).build(backend), pools)
    assert hidden.shape == (0, 32)
    assert Logits(model).caches == model.description.caches


def test_equal_experts_and_groups_are_taken_from_the_lowest() -> None:
    """All scores are 1/2, so the bias decides, and where that is equal the place."""
    sizes = GroupedSizes(8, 3, 4, 2, 1, 1, True, 2.0)
    bias = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    choice = GroupedChoice(bias, sizes, CpuBackend())
    experts, weights = choice(torch.zeros(2, 8))
    # Groups 1, 2 and 3 are worth the same; the best of 1 and 2 and, of the rest, the lowest.
    assert experts.tolist() == [[3, 5, 2]] * 2
    assert weights.tolist() == [pytest.approx([2 / 3] * 3)] * 2
    kept = GroupedChoice(bias, GroupedSizes(8, 3, 4, 2, 1, 1, False, 2.0), CpuBackend())
    assert kept(torch.zeros(1, 8))[1].tolist() == [[1.0] * 3]
