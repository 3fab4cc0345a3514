"""Translates the hyper-parameters in GGUF metadata to the config transformers would have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from surefoot.errors import ModelError

ROPE_FACTORS = "rope_freqs.weight"

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Options that change a model's arithmetic, with the values that leave it as it is.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window_pattern": (),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
}
_YARN_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Header:
    """What a config is made from.

    Attributes:
        file: named in errors.
        metadata: all keys of the file.
        shapes: of all tensors, by GGUF name, rows first.
        rope_factors: float32 [head_dim / 2], by which rotary frequencies are divided, or None.
    """

    file: str
    metadata: Mapping[str, object]
    shapes: Mapping[str, tuple[int, ...]]
    rope_factors: npt.NDArray[np.float32] | None

    @property
    def architecture(self) -> str:
        """One of `ARCHITECTURES`.

        Raises:
            ModelError: it is another one.
        """
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise self.error(
                f"architecture {name!r} is not supported in GGUF files; "
                f"these are: {', '.join(ARCHITECTURES)}"
            )
        return name

    def error(self, reason: str) -> ModelError:
        """An error that names the file."""
        return ModelError(f"{self.file}: {reason}")

    def value(self, key: str) -> object:
        """The value under the architecture's prefix, None if absent; equal layers count as one."""
        found = self.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(found, list):
            return found
        if not found or any(item != found[0] for item in found):
            raise self.error(f"{self.architecture}.{key} differs by layer, which is not supported")
        first: object = found[0]
        return first

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number above 0.

        Raises:
            ModelError: it is absent and there is no default, or it is something else.
        """
        found = self.value(key)
        chosen = default if found is None else found
        if not isinstance(chosen, int) or isinstance(chosen, bool) or chosen < 1:
            raise self.error(
                f"{self.architecture}.{key} must be a whole number above 0, not {chosen!r}"
            )
        return chosen

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; raises as `integer` does."""
        found = self.value(key)
        chosen = default if found is None else found
        numeric = isinstance(chosen, int | float) and not isinstance(chosen, bool)
        if not numeric or not isinstance(chosen, int | float) or not 0 < chosen < float("inf"):
            raise self.error(f"{self.architecture}.{key} must be a number above 0, not {chosen!r}")
        return chosen

    def refuse(self, neutral: Mapping[str, tuple[object, ...]]) -> None:
        """Refuse keys that change the model's arithmetic in a way that is not implemented."""
        for key, harmless in neutral.items():
            found = self.value(key)
            if found is not None and found not in harmless:
                raise self.error(f"{self.architecture}.{key} is {found!r}, which is not supported")


def translate(header: Header) -> dict[str, object]:
    """Return the config that transformers would have for this file.

    Raises:
        ModelError: the architecture or one of its options is not supported, or a value is absent
            or impossible; the error names file and key.
    """
    header.refuse(_NEUTRAL)
    family = header.architecture
    if family == "llama" and header.value("attention.sliding_window") is not None:
        family = "mistral"
    heads = header.integer("attention.head_count")
    config: dict[str, object] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": header.integer("embedding_length"),
        "intermediate_size": header.integer("feed_forward_length"),
        "num_hidden_layers": header.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.integer("attention.head_count_kv", heads),
        "head_dim": _head_size(header),
        "max_position_embeddings": header.integer("context_length"),
        "rms_norm_eps": header.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": header.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header),
        "vocab_size": _vocabulary(header),
        "tie_word_embeddings": "output.weight" not in header.shapes,
    }
    return config | _biases(header, family) | _window(header, family) | _special_tokens(header)


def sampling_defaults(metadata: Mapping[str, object]) -> dict[str, object]:
    """Return the file's sampling defaults under the names of generation_config.json."""
    keyed = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {name: value for name, value in keyed.items() if value is not None}


def _head_size(header: Header) -> int:
    hidden, heads = header.integer("embedding_length"), header.integer("attention.head_count")
    size = header.integer("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := header.integer(key, size)) != size:
            raise header.error(
                f"{header.architecture}.{key} is {found} where the head size is {size}; "
                "heads whose parts differ are not supported"
            )
    return size


def _vocabulary(header: Header) -> int:
    """Rows of the embedding: metadata counts tokens, and the embedding may be padded."""
    if (shape := header.shapes.get("token_embd.weight")) is None:
        raise header.error("tensor 'token_embd.weight' is missing; this is not a whole model")
    return shape[0]


def _biases(header: Header, family: str) -> dict[str, object]:
    options = {"llama": ("attention", "mlp"), "qwen3": ("attention",)}.get(family, ())
    tensors = {"attention": "blk.0.attn_q.bias", "mlp": "blk.0.ffn_gate.bias"}
    return {f"{part}_bias": tensors[part] in header.shapes for part in options}


def _window(header: Header, family: str) -> dict[str, object]:
    if header.value("attention.sliding_window") is None:
        return {}
    window: dict[str, object] = {"sliding_window": header.integer("attention.sliding_window")}
    if family.startswith("qwen"):
        window |= {"use_sliding_window": True, "max_window_layers": 0}
    return window


def _special_tokens(header: Header) -> dict[str, object]:
    keyed = {
        f"{name}_token_id": header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {name: value for name, value in keyed.items() if value is not None}


def _rope_scaling(header: Header) -> dict[str, object] | None:
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in header.shapes:
            raise header.error(f"tensor {name!r} (longrope) is not supported")
    kind = header.value("rope.scaling.type")
    if header.rope_factors is not None:
        if kind not in (None, "none"):
            raise header.error(f"it has both {ROPE_FACTORS!r} and rope.scaling.type {kind!r}")
        return _llama3(header, header.rope_factors)
    if kind == "yarn":
        return _yarn(header)
    if kind == "linear" or header.value("rope.scale_linear") is not None:
        factor = header.number("rope.scaling.factor", header.number("rope.scale_linear", 1.0))
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if kind not in (None, "none"):
        raise header.error(f"rope.scaling.type {kind!r} is not supported")
    return None


def _yarn(header: Header) -> dict[str, object]:
    header.refuse(_YARN_NEUTRAL)
    scaling: dict[str, object] = {
        "rope_type": "yarn",
        "factor": header.number("rope.scaling.factor"),
        "original_max_position_embeddings": header.integer("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if header.value(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = header.number(f"rope.scaling.yarn_{name}")
    return scaling


def _llama3(header: Header, factors: npt.NDArray[np.float32]) -> dict[str, object] | None:
    """Recognise the factors of Llama 3's rotary scaling, the only ones that config can express."""
    head_size = _head_size(header)
    if factors.shape != (head_size // 2,):
        raise header.error(f"tensor {ROPE_FACTORS!r} must have {head_size // 2} numbers")
    if np.all(factors == 1):
        return None
    largest = float(factors.max())
    base = header.number("rope.freq_base", 10000.0)
    known = largest > 1 and np.allclose(
        factors, _llama3_factors(head_size, base, largest), rtol=1e-4, atol=0
    )
    if not known:
        raise header.error(
            f"tensor {ROPE_FACTORS!r} is not the rotary scaling of Llama 3; no other is supported"
        )
    return {"rope_type": "llama3", "factor": largest} | _LLAMA3


def _llama3_factors(head_size: int, base: float, factor: float) -> npt.NDArray[np.float64]:
    """Divisors of the rotary frequencies under Llama 3's scaling, float64 [head_size / 2].

    Frequencies that turn less than `low` times over the original context are divided by `factor`,
    those that turn more than `high` times are kept, and in between the inverse is interpolated.
    """
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    frequency = base ** (-np.arange(0, head_size, 2) / head_size)
    turns = _LLAMA3["original_max_position_embeddings"] * frequency / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    divisors: npt.NDArray[np.float64] = 1 / ((1 - kept) / factor + kept)
    return divisors
