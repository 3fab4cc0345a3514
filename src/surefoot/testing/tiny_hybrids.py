"""Writes small checkpoints of hybrid models with seeded random weights, for tests.

Random weights never accept a draft by themselves. With `dial` the model becomes a table of next
tokens plus dial times what its layers say, and so does its draft head, whose one layer says
something else: at 0 every draft is accepted, and the larger the dial, the fewer. All of it is
ordinary weights: embeddings are codes, the row of the head for a token is the code of the token
before it in the table, and whatever a layer adds to the stream is scaled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from surefoot.testing.seeded import SeededNumbers, codes_of, table_head
from surefoot.testing.tiny_models import LEAST_TEXT_VOCAB, write_tokenizer

DENSE = "Qwen3_5ForCausalLM"
NEXT = "Qwen3NextForCausalLM"
_WRAPPERS = {
    "Qwen3_5ForConditionalGeneration": DENSE,
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
_MODEL_TYPES = {
    NEXT: "qwen3_next",
    DENSE: "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
HYBRIDS = tuple(_MODEL_TYPES)


@dataclass(frozen=True, kw_only=True)
class TinyHybridSizes:
    """How large the model is and which numbers it gets.

    Attributes:
        vocab: token ids.
        hidden: width of the stream.
        inner: width of a dense feed-forward.
        layers: how many.
        interval: every so many layers, the last is full attention.
        heads: query heads.
        key_heads: key and value heads.
        head_dim: size of a head.
        rotary: share of a head that turns with the position.
        linear_key_heads: query and key heads of recurrent layers.
        linear_value_heads: their value heads.
        linear_key_size: size of their queries and keys.
        linear_value_size: size of their values.
        taps: tokens that their convolution sees.
        experts: how many there are, where the architecture has them.
        chosen: how many a token takes.
        expert_inner: width of an expert.
        shared_inner: width of the expert that all tokens share.
        positions: longest context.
        seed: key of the weights.
        drift: how much of other random weights is mixed in, as a fraction of their size.
        sharpness: factor on the logits; with 0 all tokens are alike.
        tied: the head shares the embedding; a dial then says each token again.
    """

    vocab: int = 64
    hidden: int = 32
    inner: int = 48
    layers: int = 4
    interval: int = 4
    heads: int = 4
    key_heads: int = 2
    head_dim: int = 8
    rotary: float = 0.5
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_key_size: int = 8
    linear_value_size: int = 12
    taps: int = 4
    experts: int = 6
    chosen: int = 3
    expert_inner: int = 16
    shared_inner: int = 24
    positions: int = 512
    seed: int = 0
    drift: float = 0.0
    sharpness: float = 2.5
    tied: bool = False


def write_tiny_hybrid(
    folder: Path,
    architecture: str,
    *,
    mtp: bool = True,
    tokenizer: bool = False,
    dial: float | None = None,
    **sizes: int | float | bool,
) -> Path:
    """Write config.json and model.safetensors, in float32, under transformers' names.

    Args:
        folder: made if it is not there.
        architecture: one of HYBRIDS.
        mtp: with a draft head.
        tokenizer: also write a byte-level tokenizer and a chat template; the vocabulary is then
            at least LEAST_TEXT_VOCAB.
        dial: see above; None leaves the weights random.
        sizes: fields of TinyHybridSizes.

    Returns:
        The folder.
    """
    size = TinyHybridSizes(**sizes)  # type: ignore[arg-type]
    if tokenizer:
        size = replace(size, vocab=max(size.vocab, LEAST_TEXT_VOCAB))
    folder.mkdir(parents=True, exist_ok=True)
    config = make_hybrid_config(architecture, size, mtp)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = dict(_Writer(architecture, size, 1.0 if dial is None else dial).tensors(mtp))
    if dial is not None:
        tensors |= _table(tensors, architecture, size, dial, mtp)
    save_file(tensors, folder / "model.safetensors")
    if tokenizer:
        write_tokenizer(folder, size.vocab)
    return folder


def make_hybrid_config(
    architecture: str, size: TinyHybridSizes, mtp: bool = True
) -> dict[str, object]:
    """A transformers-style config.json; flat, or with the text model's part in `text_config`."""
    inner = _WRAPPERS.get(architecture, architecture)
    config: dict[str, object] = {
        "model_type": _MODEL_TYPES[inner],
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "full_attention_interval": size.interval,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_heads,
        "head_dim": size.head_dim,
        "linear_num_key_heads": size.linear_key_heads,
        "linear_num_value_heads": size.linear_value_heads,
        "linear_key_head_dim": size.linear_key_size,
        "linear_value_head_dim": size.linear_value_size,
        "linear_conv_kernel_dim": size.taps,
        "max_position_embeddings": size.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": size.tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": size.rotary,
        },
    }
    config |= _feed_entries(inner, size)
    if inner != NEXT:
        config["mtp_num_hidden_layers"] = int(mtp)
    names: dict[str, object] = {"architectures": [architecture]}
    if inner == architecture:
        return names | config
    outer = {"model_type": _MODEL_TYPES[architecture], "tie_word_embeddings": size.tied}
    return names | outer | {"text_config": config}


def _feed_entries(architecture: str, size: TinyHybridSizes) -> Mapping[str, object]:
    dense: dict[str, object] = {"intermediate_size": size.inner}
    sparse: dict[str, object] = {
        "num_experts": size.experts,
        "num_experts_per_tok": size.chosen,
        "moe_intermediate_size": size.expert_inner,
        "shared_expert_intermediate_size": size.shared_inner,
    }
    extras: dict[str, object] = {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    }
    both = {NEXT: dense | sparse | extras, "Qwen3_5MoeForCausalLM": sparse}
    return both.get(architecture, dense)


Tensors = Iterator[tuple[str, Tensor]]


class _Writer:
    """Draws the tensors of one checkpoint, in the layout that its architecture is released in."""

    def __init__(self, architecture: str, size: TinyHybridSizes, gain: float) -> None:
        """`gain` scales what layers add to the stream."""
        self._size, self._gain = size, gain
        self._next = architecture == NEXT
        self._wrapped = architecture in _WRAPPERS
        self._sparse = self._next or "Moe" in architecture
        self._numbers = SeededNumbers(size.seed, size.drift)
        self._matrix, self._vector = self._numbers.matrix, self._numbers.vector

    def tensors(self, mtp: bool) -> Tensors:
        """Names and tensors."""
        size = self._size
        trunk = "model.language_model." if self._wrapped else "model."
        yield trunk + "embed_tokens.weight", self._matrix(size.vocab, size.hidden, size.hidden**0.5)
        for layer in range(size.layers):
            name = f"{trunk}layers.{layer}."
            full = (layer + 1) % size.interval == 0
            yield from self._layer(name, full, self._sparse and not (self._next and layer == 0))
        yield trunk + "norm.weight", self._vector(size.hidden)
        if self._wrapped:
            yield "model.visual.blocks.0.attn.qkv.weight", self._matrix(6, 2)
        if not size.tied:
            yield "lm_head.weight", self._matrix(size.vocab, size.hidden, size.sharpness)
        if mtp:
            for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
                yield f"mtp.{part}.weight", self._vector(size.hidden)
            yield "mtp.fc.weight", self._matrix(size.hidden, 2 * size.hidden)
            yield from self._layer("mtp.layers.0.", True, self._sparse)

    def _layer(self, name: str, full: bool, sparse: bool) -> Tensors:
        yield from (
            self._attention(name + "self_attn.") if full else self._delta(name + "linear_attn.")
        )
        for part in ("input", "post_attention"):
            yield f"{name}{part}_layernorm.weight", self._vector(self._size.hidden)
        if sparse:
            yield from self._experts(name + "mlp.")
        else:
            yield from self._gated(name + "mlp.", self._size.inner)

    def _attention(self, name: str) -> Tensors:
        size, wide = self._size, self._size.heads * self._size.head_dim
        for part, heads in (("q", 2 * size.heads), ("k", size.key_heads), ("v", size.key_heads)):
            yield f"{name}{part}_proj.weight", self._matrix(heads * size.head_dim, size.hidden, 1.5)
        yield name + "o_proj.weight", self._matrix(size.hidden, wide, 2 * self._gain)
        for part in ("q", "k"):
            yield f"{name}{part}_norm.weight", self._vector(size.head_dim)

    def _delta(self, name: str) -> Tensors:
        size = self._size
        keys = size.linear_key_heads * size.linear_key_size
        values = size.linear_value_heads * size.linear_value_size
        channels, heads = 2 * keys + values, size.linear_value_heads
        split = {"qkv": channels, "z": values, "b": heads, "a": heads}
        grouped = {"qkvz": channels + values, "ba": 2 * heads}
        for part, outputs in (grouped if self._next else split).items():
            yield f"{name}in_proj_{part}.weight", self._matrix(outputs, size.hidden, 1.5)
        yield name + "conv1d.weight", self._matrix(channels, size.taps)[:, None].contiguous() * 1.5
        yield name + "A_log", self._vector(heads) * 10
        yield name + "dt_bias", self._vector(heads) * 10 - 1
        yield name + "norm.weight", 1 + self._vector(size.linear_value_size)
        yield name + "out_proj.weight", self._matrix(size.hidden, values, 1.5 * self._gain)

    def _gated(self, name: str, inner: int) -> Tensors:
        hidden = self._size.hidden
        for part in ("gate", "up"):
            yield f"{name}{part}_proj.weight", self._matrix(inner, hidden)
        yield name + "down_proj.weight", self._matrix(hidden, inner, 1.5 * self._gain)

    def _experts(self, name: str) -> Tensors:
        size = self._size
        yield name + "gate.weight", self._matrix(size.experts, size.hidden, 2)
        yield name + "shared_expert_gate.weight", self._matrix(1, size.hidden)
        yield from self._gated(name + "shared_expert.", size.shared_inner)
        single = [
            dict(self._gated(f"{name}experts.{expert}.", size.expert_inner))
            for expert in range(size.experts)
        ]
        if self._next:
            for tensors in single:
                yield from tensors.items()
            return
        gates, ups, downs = zip(*(tensors.values() for tensors in single), strict=True)
        yield name + "experts.gate_up_proj", torch.cat((torch.stack(gates), torch.stack(ups)), 1)
        yield name + "experts.down_proj", torch.stack(downs)


def _table(
    tensors: Mapping[str, Tensor], architecture: str, size: TinyHybridSizes, dial: float, mtp: bool
) -> dict[str, Tensor]:
    """The tensors that make a model the table plus dial times its layers."""
    trunk = "model.language_model." if architecture in _WRAPPERS else "model."
    codes = codes_of(tensors[trunk + "embed_tokens.weight"])
    changed = {
        trunk + "embed_tokens.weight": codes,
        trunk + "norm.weight": torch.zeros(size.hidden),
    }
    if not size.tied:
        changed["lm_head.weight"] = table_head(codes, size.seed, size.sharpness)
    if mtp:
        changed |= _table_head(tensors, size, dial)
    return changed


def _table_head(
    tensors: Mapping[str, Tensor], size: TinyHybridSizes, dial: float
) -> dict[str, Tensor]:
    """A draft head that hands the token's code through, and adds what the dial lets it."""
    before = tensors["mtp.fc.weight"][:, size.hidden :] * dial
    changed = {"mtp.fc.weight": torch.cat((torch.eye(size.hidden), before), dim=1)}
    for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        changed[f"mtp.{part}.weight"] = torch.zeros(size.hidden)
    return changed
