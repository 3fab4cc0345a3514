"""Writes small checkpoint folders with seeded random weights, for tests.

Random weights never accept a draft by themselves. `drift` is the dial: a draft model with the
target's seed and a little drift guesses right now and then, which is where faults live.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

BYTES = 256
END, BEGIN, PAD = "<end>", "<begin>", "<pad>"
SPECIAL = (END, BEGIN, PAD)
LEAST_TEXT_VOCAB = BYTES + len(SPECIAL)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """How large the model is and which numbers it gets.

    Attributes:
        vocab: token ids.
        hidden: width of the stream.
        inner: width of the feed-forward.
        layers: how many.
        heads: query heads.
        key_heads: key and value heads.
        head_dim: size of a head.
        positions: longest context.
        window: positions that a sliding-window layer sees.
        seed: key of the weights.
        drift: how much of other random weights is mixed in, as a fraction of their size.
        sharpness: factor on the logits; with 0 all tokens are alike.
        tied: the head shares the embedding.
    """

    vocab: int = 64
    hidden: int = 32
    inner: int = 48
    layers: int = 2
    heads: int = 4
    key_heads: int = 2
    head_dim: int = 8
    positions: int = 512
    window: int = 8
    seed: int = 0
    drift: float = 0.0
    sharpness: float = 2.5
    tied: bool = False


@dataclass(frozen=True)
class _Kind:
    """What tells one architecture from another."""

    model_type: str
    qkv_bias: bool = False
    head_norms: bool = False
    windowed: tuple[str, ...] = field(default=())


_FULL, _SLIDING = "full_attention", "sliding_attention"
_KINDS = {
    "LlamaForCausalLM": _Kind("llama"),
    "Qwen2ForCausalLM": _Kind("qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": _Kind("qwen3", head_norms=True),
    "MistralForCausalLM": _Kind("mistral", windowed=(_SLIDING,)),
}
ARCHITECTURES = tuple(_KINDS)


def write_tiny_llama(folder: Path, *, tokenizer: bool = False, **sizes: int | float | bool) -> Path:
    """`write_tiny` for a plain Llama."""
    return write_tiny(folder, "LlamaForCausalLM", tokenizer=tokenizer, mixed=False, **sizes)


def write_tiny(
    folder: Path,
    architecture: str,
    *,
    tokenizer: bool = False,
    mixed: bool = False,
    **sizes: int | float | bool,
) -> Path:
    """Write config.json and model.safetensors, in float32.

    Args:
        folder: made if it is not there.
        architecture: one of ARCHITECTURES.
        tokenizer: also write a byte-level tokenizer and a chat template; the vocabulary is then
            at least LEAST_TEXT_VOCAB, and its first 256 tokens are single bytes.
        mixed: only every second layer of a sliding-window model sees a window.
        sizes: fields of TinySizes.

    Returns:
        The folder.
    """
    size = TinySizes(**sizes)  # type: ignore[arg-type]
    if tokenizer and size.vocab < LEAST_TEXT_VOCAB:
        size = TinySizes(**{**sizes, "vocab": LEAST_TEXT_VOCAB})  # type: ignore[arg-type]
    folder.mkdir(parents=True, exist_ok=True)
    config = make_tiny_config(architecture, size, mixed)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(dict(_weights(_KINDS[architecture], size)), folder / "model.safetensors")
    if tokenizer:
        write_tokenizer(folder, size.vocab)
    return folder


def make_tiny_config(architecture: str, size: TinySizes, mixed: bool = False) -> dict[str, object]:
    """A transformers-style config.json."""
    kind = _KINDS[architecture]
    config: dict[str, object] = {
        "architectures": [architecture],
        "model_type": kind.model_type,
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": size.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": size.tied,
    }
    if kind.windowed:
        config["sliding_window"] = size.window
        if mixed:
            kinds = [(_FULL, _SLIDING)[layer % 2] for layer in range(size.layers)]
            config["layer_types"] = kinds
    return config


def _weights(kind: _Kind, size: TinySizes) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a checkpoint."""
    table = (size.vocab, size.hidden)
    draw = _Draw(size.seed, size.drift)
    yield "model.embed_tokens.weight", draw.matrix(*table) * size.hidden**0.5
    for layer in range(size.layers):
        yield from _layer(kind, size, draw, f"model.layers.{layer}.")
    yield "model.norm.weight", draw.near_one(size.hidden)
    if not size.tied:
        yield "lm_head.weight", draw.matrix(*table) * size.sharpness


def _layer(kind: _Kind, size: TinySizes, draw: _Draw, prefix: str) -> Iterator[tuple[str, Tensor]]:
    attention, wide = prefix + "self_attn.", size.heads * size.head_dim
    for part, heads in (("q", size.heads), ("k", size.key_heads), ("v", size.key_heads)):
        name, outputs = f"{attention}{part}_proj", heads * size.head_dim
        yield name + ".weight", draw.matrix(outputs, size.hidden) * 1.5
        if kind.qkv_bias:
            yield name + ".bias", draw.vector(outputs)
    yield attention + "o_proj.weight", draw.matrix(size.hidden, wide) * 1.5
    if kind.head_norms:
        yield attention + "q_norm.weight", draw.near_one(size.head_dim)
        yield attention + "k_norm.weight", draw.near_one(size.head_dim)
    for part in ("gate", "up"):
        yield f"{prefix}mlp.{part}_proj.weight", draw.matrix(size.inner, size.hidden)
    yield prefix + "mlp.down_proj.weight", draw.matrix(size.hidden, size.inner) * 1.5
    for part in ("input", "post_attention"):
        yield f"{prefix}{part}_layernorm.weight", draw.near_one(size.hidden)


class _Draw:
    """Seeded random tensors, with some drift away from them."""

    def __init__(self, seed: int, drift: float) -> None:
        self._drift = drift
        self._own = torch.Generator().manual_seed(2 * seed)
        self._other = torch.Generator().manual_seed(2 * seed + 1)

    def matrix(self, outputs: int, inputs: int) -> Tensor:
        return self._normal(outputs, inputs).div(math.sqrt(inputs))

    def vector(self, size: int) -> Tensor:
        return self._normal(size) * 0.5

    def near_one(self, size: int) -> Tensor:
        return 1 + self._normal(size) * 0.1

    def _normal(self, *shape: int) -> Tensor:
        own, other = (torch.randn(shape, generator=g) for g in (self._own, self._other))
        return own.add(other, alpha=self._drift)


def make_byte_tokenizer(vocab: int) -> Tokenizer:
    """One token per byte (token id = byte), then the special tokens, then fillers."""
    spelled = _byte_letters()
    names = {letter: byte for byte, letter in enumerate(spelled)}
    names |= {f"<filler {extra}>": extra for extra in range(LEAST_TEXT_VOCAB, vocab)}
    names |= {text: BYTES + place for place, text in enumerate(SPECIAL)}
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = (byte for byte in range(BYTES) if byte not in printable)
    moved = {byte: BYTES + place for place, byte in enumerate(hidden)}
    return [chr(moved.get(byte, byte)) for byte in range(BYTES)]


def write_tokenizer(folder: Path, vocab: int, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write a byte-level tokenizer and a chat template; `vocab` is at least LEAST_TEXT_VOCAB."""
    make_byte_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    settings = {
        "eos_token": END,
        "bos_token": BEGIN,
        "pad_token": PAD,
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
