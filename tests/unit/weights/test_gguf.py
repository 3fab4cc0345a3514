"""GGUF checkpoints against transformers: tensors, row order and config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from surefoot.errors import ModelError, WeightsError
from surefoot.weights.gguf import GgufCheckpoint
from surefoot.weights.load import TensorTaker, open_checkpoint
from surefoot.weights.locate import locate
from tests.unit.weights.files import Arrays, embedding, gguf_keys, write_gguf

SIZES: Mapping[str, float] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 48,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
FAMILIES: Mapping[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def _model(family: str, **options: object) -> PreTrainedModel:
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(5)
    config = config_class.from_dict({**SIZES, **options})
    model: PreTrainedModel = model_class(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def _paired(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """The row order of Llama's queries and keys in GGUF files: first and second ones in turn."""
    size = len(rows) // heads
    order = [
        head * size + half * (size // 2) + pair
        for head in range(heads)
        for pair in range(size // 2)
        for half in range(2)
    ]
    return rows[order]


def _stored(model: PreTrainedModel, family: str) -> Arrays:
    """The tensors of a model as a converter to GGUF would store them."""
    table = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), 2)
    stored: dict[str, npt.NDArray[np.generic]] = {}
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array = tensor.numpy()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            array = _paired(array, 4 if "q_proj" in name else 2)
        module, kind = name.rsplit(".", 1)
        stored[f"{table.get_name(module)}.{kind}"] = np.ascontiguousarray(array)
    return stored


CASES = [
    ("llama", {"tie_word_embeddings": True}, {}),
    ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}, {}),
    ("qwen2", {"tie_word_embeddings": True}, {}),
    ("qwen3", {"tie_word_embeddings": False, "head_dim": 16}, {"attention.key_length": 16}),
    (
        "qwen3",
        {"tie_word_embeddings": True, "head_dim": 8, "attention_bias": True},
        {"attention.key_length": 8},
    ),
]


@pytest.mark.parametrize(("family", "options", "keys"), CASES)
def test_a_written_model_comes_back_and_computes_the_same(
    tmp_path: Path, family: str, options: dict[str, object], keys: dict[str, object]
) -> None:
    model = _model(
        family, **options, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}
    )
    path = write_gguf(tmp_path / "m.gguf", family, gguf_keys(family, keys), _stored(model, family))
    checkpoint = open_checkpoint(path)
    taker = TensorTaker(checkpoint, torch.float32, lambda _: None)
    wanted = {name: tensor for name, tensor in model.state_dict().items() if taker.has(name)}
    taken = {name: taker.take(name, tuple(tensor.shape)) for name, tensor in wanted.items()}
    taker.finish()
    for name, tensor in wanted.items():
        assert torch.equal(taken[name], tensor), name
    tied = options["tie_word_embeddings"]
    assert model.state_dict().keys() - taken.keys() == ({"lm_head.weight"} if tied else set())
    config_class, model_class = FAMILIES[family]
    again = model_class(config_class.from_dict(dict(checkpoint.config))).eval()
    again.load_state_dict(taken, strict=not tied)
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


# 128 is the only head size of Qwen3 that transformers reads from a GGUF file.
@pytest.mark.parametrize(("family", "head_dim"), [("llama", 8), ("qwen3", 128)])
def test_transformers_reads_the_same_tensors_from_the_same_file(
    tmp_path: Path, family: str, head_dim: int
) -> None:
    model = _model(family, tie_word_embeddings=False, head_dim=head_dim)
    keys = gguf_keys(
        family,
        {"vocab_size": 48, "rope.dimension_count": head_dim, "attention.key_length": head_dim},
    )
    write_gguf(tmp_path / "m.gguf", family, keys, _stored(model, family))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf").state_dict()
    ours = GgufCheckpoint(tmp_path / "m.gguf")
    assert set(ours.names()) == set(theirs)
    for name in ours.names():
        assert torch.equal(ours.read(name), theirs[name].float()), name


def test_quantised_and_half_tensors_are_dequantised(tmp_path: Path) -> None:
    numbers = np.random.default_rng(3).standard_normal((32, 32)).astype(np.float32)
    packed = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
    tensors = embedding() | {
        "blk.0.attn_k.weight": packed,
        "blk.0.attn_v.weight": packed,
        "blk.0.ffn_up.weight": numbers.astype(np.float16),
    }
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "t.gguf", "llama", gguf_keys(), tensors))
    values = checkpoint.read("model.layers.0.self_attn.v_proj.weight").numpy()
    assert checkpoint.shape("model.layers.0.self_attn.v_proj.weight") == (32, 32)
    assert values.dtype == np.float32
    assert 0 < np.abs(values - numbers).max() < 0.03
    keys = checkpoint.read("model.layers.0.self_attn.k_proj.weight").numpy()
    assert np.array_equal(_paired(keys, 2), values)
    half = checkpoint.read("model.layers.0.mlp.up_proj.weight").numpy()
    assert np.array_equal(half, numbers.astype(np.float16).astype(np.float32))


def test_a_read_tensor_can_be_written_without_changing_the_file(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "t.gguf", "llama", gguf_keys(), embedding()))
    checkpoint.read("model.embed_tokens.weight").fill_(1)
    assert not checkpoint.read("model.embed_tokens.weight").any()


def test_an_encoding_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    tensors = embedding() | {"blk.0.attn_q.weight": np.ones((32, 32), np.int32)}
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "t.gguf", "llama", gguf_keys(), tensors))
    with pytest.raises(WeightsError, match=r"'blk\.0\.attn_q\.weight' is stored as I32"):
        checkpoint.read("model.layers.0.self_attn.q_proj.weight")


def test_rows_that_heads_cannot_share_are_refused(tmp_path: Path) -> None:
    tensors = embedding() | {"blk.0.attn_q.weight": np.ones((30, 32), np.float32)}
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "t.gguf", "llama", gguf_keys(), tensors))
    with pytest.raises(WeightsError, match="has 30 rows, which 4 heads cannot share"):
        checkpoint.read("model.layers.0.self_attn.q_proj.weight")


def test_a_tensor_without_counterpart_is_reported_as_unused(tmp_path: Path) -> None:
    tensors = embedding() | {"blk.0.ffn_gate_inp.weight": np.ones((2, 32), np.float32)}
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "t.gguf", "llama", gguf_keys(), tensors))
    taker = TensorTaker(checkpoint, torch.float32, lambda _: None)
    taker.take("model.embed_tokens.weight", (48, 32))
    with pytest.raises(WeightsError, match=r"1 tensors .* blk\.0\.ffn_gate_inp\.weight"):
        taker.finish()


def test_a_tensor_of_any_name_can_be_read(tmp_path: Path) -> None:
    tensors = embedding() | {"odd": np.full(3, 2, np.float32)}
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "t.gguf", "llama", gguf_keys(), tensors))
    assert checkpoint.read("odd").tolist() == [2, 2, 2]


def test_two_names_for_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = embedding() | {"model.embed_tokens.weight": np.ones((48, 32), np.float32)}
    path = write_gguf(tmp_path / "t.gguf", "llama", gguf_keys(), tensors)
    with pytest.raises(ModelError, match=r"'token_embd\.weight' is there under two names"):
        GgufCheckpoint(path)


def _smollm2() -> Path:
    return locate("smollm2", revision=None, progress=lambda _: None)


def test_smollm2_has_its_known_size() -> None:
    ours = open_checkpoint(_smollm2())
    assert sum(math.prod(ours.shape(name)) for name in ours.names()) == 134_515_008
    assert ours.config["tie_word_embeddings"] is True
    assert ours.read("model.layers.3.self_attn.k_proj.weight").shape == (192, 576)


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_smollm2_as_transformers_reads_it() -> None:
    path = _smollm2()
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    weights = theirs.state_dict()
    ours = open_checkpoint(path)
    assert set(weights) - set(ours.names()) == {"lm_head.weight"}
    for name in ours.names():
        assert torch.equal(ours.read(name), weights[name]), name
    for key, value in ours.config.items():
        if key not in ("architectures", "rope_theta", "rope_scaling"):
            assert getattr(theirs.config, key) == value, key
    assert theirs.config.rope_parameters["rope_theta"] == ours.config["rope_theta"]
