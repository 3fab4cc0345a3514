"""What GGUF metadata says about a model, and which options are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from surefoot.errors import ModelError, WeightsError
from surefoot.weights.gguf import GgufCheckpoint
from surefoot.weights.load import read_config
from tests.unit.weights.files import embedding, gguf_keys, write_gguf


def _checkpoint(path: Path, changes: Mapping[str, object], arch: str = "llama") -> GgufCheckpoint:
    keys = gguf_keys(arch, changes)
    return GgufCheckpoint(write_gguf(path / "t.gguf", arch, keys, embedding()))


def test_metadata_serves_the_tokenizer_even_after_closing(tmp_path: Path) -> None:
    keys = gguf_keys() | {
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "t.gguf", "llama", keys, embedding()))
    checkpoint.close()
    assert checkpoint.metadata()["tokenizer.ggml.tokens"] == ["a", "b"]
    assert checkpoint.config["bos_token_id"] == 1
    assert checkpoint.config["eos_token_id"] == 0
    assert "pad_token_id" not in checkpoint.config
    assert checkpoint.generation == {"temperature": 0.5, "top_k": 20}
    assert not checkpoint.names()


def test_read_config_of_a_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", "llama", gguf_keys(), embedding())
    config = read_config(path)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 8
    assert config["vocab_size"] == 48
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert config["rope_scaling"] is None


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    reason = r"t\.gguf: architecture 'gemma3' is not supported.*: llama, qwen2, qwen3"
    with pytest.raises(ModelError, match=reason):
        _checkpoint(tmp_path, {}, arch="gemma3")


def test_a_sliding_window_makes_a_mistral(tmp_path: Path) -> None:
    config = _checkpoint(tmp_path, {"attention.sliding_window": 16}).config
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 16


def test_a_sliding_window_of_qwen_covers_all_layers(tmp_path: Path) -> None:
    config = _checkpoint(tmp_path, {"attention.sliding_window": 16}, arch="qwen3").config
    layers = Qwen3Config.from_dict(dict(config)).layer_types
    assert layers == ["sliding_attention"] * 2


def test_equal_values_per_layer_count_as_one(tmp_path: Path) -> None:
    config = _checkpoint(tmp_path, {"attention.head_count_kv": [2, 2]}).config
    assert config["num_key_value_heads"] == 2


def test_head_count_kv_defaults_to_all_heads(tmp_path: Path) -> None:
    config = _checkpoint(tmp_path, {"attention.head_count_kv": None}).config
    assert config["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_count": None}, r"llama\.block_count must be a whole number above 0, not None"),
        ({"block_count": 0}, r"llama\.block_count must be a whole number above 0, not 0"),
        ({"block_count": "2"}, r"llama\.block_count must be a whole number above 0, not '2'"),
        ({"block_count": True}, r"llama\.block_count must be a whole number above 0, not True"),
        ({"rope.freq_base": -1.0}, r"llama\.rope\.freq_base must be a number above 0"),
        ({"rope.freq_base": float("nan")}, r"llama\.rope\.freq_base must be a number above 0"),
        ({"rope.freq_base": float("inf")}, r"llama\.rope\.freq_base must be a number above 0"),
        ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon must be a number"),
        ({"feed_forward_length": [64, 32]}, r"llama\.feed_forward_length differs by layer"),
        ({"attention.value_length": 4}, r"value_length is 4 where the head size is 8"),
        ({"rope.dimension_count": 4}, r"dimension_count is 4 where the head size is 8"),
        ({"expert_count": 8}, r"llama\.expert_count is 8, which is not supported"),
        ({"attention.scale": 0.5}, r"llama\.attention\.scale is 0\.5, which is not supported"),
        ({"rope.scaling.type": "longrope"}, r"rope\.scaling\.type 'longrope' is not supported"),
    ],
)
def test_options_that_are_not_supported(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(ModelError, match=rf"t\.gguf: {reason}|t\.gguf: .*{reason}"):
        _checkpoint(tmp_path, changes)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("split.count", 3, "one of 3 parts"),
        ("general.type", "adapter", "holds 'adapter', not a whole model"),
    ],
)
def test_files_that_are_no_whole_model(
    tmp_path: Path, key: str, value: object, reason: str
) -> None:
    path = write_gguf(tmp_path / "t.gguf", "llama", gguf_keys() | {key: value}, embedding())
    with pytest.raises(ModelError, match=reason):
        GgufCheckpoint(path)


def test_a_model_without_embedding_is_refused(tmp_path: Path) -> None:
    tensors = {"output_norm.weight": np.ones(32, np.float32)}
    path = write_gguf(tmp_path / "t.gguf", "llama", gguf_keys(), tensors)
    with pytest.raises(ModelError, match=r"'token_embd\.weight' is missing"):
        GgufCheckpoint(path)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_rotary_scaling_in_metadata(
    tmp_path: Path, changes: dict[str, object], wanted: object
) -> None:
    assert _checkpoint(tmp_path, changes).config["rope_scaling"] == wanted


def test_yarn_with_its_own_attention_factor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"rope\.scaling\.attn_factor is 0\.5"):
        _checkpoint(tmp_path, {"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 0.5})


def _llama3(factor: float, theta: float = 500000.0, **changes: object) -> LlamaConfig:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": theta,
    }
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 131072,
    }
    return LlamaConfig.from_dict({**sizes, "rope_parameters": scaling | changes})


def _frequencies(config: LlamaConfig) -> torch.Tensor:
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return frequencies


def _rope_factors(config: LlamaConfig, theta: float = 500000.0) -> npt.NDArray[np.float32]:
    """What a converter stores: plain frequencies over scaled ones, by transformers' code."""
    plain = 1 / theta ** (torch.arange(0, 64, 2).float() / 64)
    return (plain / _frequencies(config)).numpy()


def _with_factors(
    path: Path,
    factors: npt.NDArray[np.generic],
    changes: Mapping[str, object] = MappingProxyType({}),
) -> GgufCheckpoint:
    sizes = {"rope.freq_base": 500000.0, "attention.key_length": 64}
    keys = gguf_keys("llama", {**sizes, **changes})
    tensors = embedding() | {"rope_freqs.weight": factors}
    return GgufCheckpoint(write_gguf(path / "t.gguf", "llama", keys, tensors))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_factors_of_llama_3_are_recognised(tmp_path: Path, factor: float) -> None:
    factors = _rope_factors(_llama3(factor))
    assert len(set(factors.round(4).tolist())) > 4
    checkpoint = _with_factors(tmp_path, factors, {"context_length": 131072})
    assert "rope_freqs.weight" not in checkpoint.names()
    found = LlamaConfig.from_dict(dict(checkpoint.config))
    assert torch.equal(_frequencies(found), _frequencies(_llama3(factor)))


def test_rotary_factors_of_one_change_nothing(tmp_path: Path) -> None:
    checkpoint = _with_factors(tmp_path, np.ones(32, np.float32))
    assert checkpoint.config["rope_scaling"] is None


OTHER_FACTORS = [
    _rope_factors(_llama3(8.0, high_freq_factor=3.0)),
    _rope_factors(_llama3(8.0, original_max_position_embeddings=4096)),
    _rope_factors(_llama3(8.0, theta=10000.0), 10000.0),
    np.full(32, 2, np.float32),
    np.zeros(32, np.float32),
    np.full(32, np.nan, np.float32),
]


@pytest.mark.parametrize("factors", OTHER_FACTORS)
def test_other_rotary_factors_are_refused(tmp_path: Path, factors: npt.NDArray[np.float32]) -> None:
    with pytest.raises(ModelError, match=r"'rope_freqs\.weight' is not the rotary scaling of"):
        _with_factors(tmp_path, factors)


def test_rotary_factors_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="must have 32 numbers"):
        _with_factors(tmp_path, np.ones(16, np.float32))
    with pytest.raises(WeightsError, match="must be F32, not F16"):
        _with_factors(tmp_path, np.ones(32, np.float16))
    with pytest.raises(ModelError, match=r"both 'rope_freqs\.weight' and rope\.scaling\.type"):
        _with_factors(tmp_path, np.ones(32, np.float32), {"rope.scaling.type": "linear"})


def test_longrope_factors_are_refused(tmp_path: Path) -> None:
    tensors = embedding() | {"rope_factors_long.weight": np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "t.gguf", "llama", gguf_keys(), tensors)
    with pytest.raises(ModelError, match=r"'rope_factors_long\.weight' \(longrope\)"):
        GgufCheckpoint(path)
