"""Writes small checkpoints of DeepSeek V4 with seeded random weights, for tests.

With `dial` the model becomes a table of next tokens plus dial times what its layers say, and so
does its draft head; see `tiny_hybrids`. All streams start as the token's code, and mixing leaves
equal streams as they are, so the code comes through to the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from surefoot.testing.seeded import SeededNumbers, codes_of, table_head
from surefoot.testing.tiny_models import LEAST_TEXT_VOCAB, write_tokenizer

ARCHITECTURE = "DeepseekV4ForCausalLM"
Tensors = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class TinyLatentSizes:
    """How large the model is and which numbers it gets.

    Attributes:
        vocab: token ids.
        hidden: width of a stream.
        streams: how many.
        ratios: of each layer: 0 for a window only, 4 or 128.
        heads: query heads.
        head_dim: size of a head.
        rotary: how many of its numbers turn with the position.
        query_rank: width between the products of queries.
        groups: groups of output heads.
        output_rank: width of a group.
        window: positions each token sees.
        heavy_ratio: what 128 stands for.
        index_heads: heads of the indexer.
        index_dim: their size.
        index_chosen: most entries a token looks at.
        experts: how many there are.
        chosen: how many a token takes.
        inner: width of an expert.
        hashed: so many layers choose experts by token id.
        positions: longest context.
        seed: key of the weights.
        drift: how much of other random weights is mixed in, as a fraction of their size.
        sharpness: factor on the logits.
    """

    vocab: int = 64
    hidden: int = 32
    streams: int = 3
    ratios: tuple[int, ...] = (0, 4, 128)
    heads: int = 4
    head_dim: int = 16
    rotary: int = 8
    query_rank: int = 16
    groups: int = 2
    output_rank: int = 12
    window: int = 8
    heavy_ratio: int = 16
    index_heads: int = 16
    index_dim: int = 12
    index_chosen: int = 4
    experts: int = 6
    chosen: int = 2
    inner: int = 16
    hashed: int = 1
    positions: int = 512
    seed: int = 0
    drift: float = 0.0
    sharpness: float = 2.5


DEFAULT_SIZES = TinyLatentSizes()


def write_tiny_latents(
    folder: Path,
    size: TinyLatentSizes = DEFAULT_SIZES,
    *,
    mtp: bool = True,
    tokenizer: bool = False,
    dial: float | None = None,
) -> Path:
    """Write config.json and model.safetensors, in float32, under transformers' names.

    Args:
        folder: made if it is not there.
        size: how large, and which numbers.
        mtp: with a draft head.
        tokenizer: also write a byte-level tokenizer, as releases do without a chat template; the
            vocabulary is then at least LEAST_TEXT_VOCAB.
        dial: see above; None leaves the weights random.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        size = replace(size, vocab=max(size.vocab, LEAST_TEXT_VOCAB))
        write_tokenizer(folder, size.vocab, chat_template=None)
    (folder / "config.json").write_text(json.dumps(make_latent_config(size, mtp), indent=1))
    tensors = dict(_Writer(size, 1.0 if dial is None else dial).tensors(mtp))
    if dial is not None:
        tensors |= _table(tensors, size, dial, mtp)
    whole = {name: value.contiguous() for name, value in tensors.items()}
    save_file(whole, folder / "model.safetensors")
    return folder


def make_latent_config(size: TinyLatentSizes, mtp: bool = True) -> dict[str, object]:
    """A config.json."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "deepseek_v4",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "num_hidden_layers": len(size.ratios),
        "num_attention_heads": size.heads,
        "num_key_value_heads": 1,
        "head_dim": size.head_dim,
        "qk_rope_head_dim": size.rotary,
        "q_lora_rank": size.query_rank,
        "o_groups": size.groups,
        "o_lora_rank": size.output_rank,
        "sliding_window": size.window,
        "compress_ratios": [*size.ratios, 0],
        "compress_rate_hca": size.heavy_ratio,
        "compress_rope_theta": 160000.0,
        "rope_theta": 10000.0,
        "max_position_embeddings": size.positions,
        "index_n_heads": size.index_heads,
        "index_head_dim": size.index_dim,
        "index_topk": size.index_chosen,
        "n_routed_experts": size.experts,
        "num_experts_per_tok": size.chosen,
        "moe_intermediate_size": size.inner,
        "num_hash_layers": size.hashed,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 2.0,
        "hc_mult": size.streams,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "num_nextn_predict_layers": int(mtp),
        "tie_word_embeddings": False,
    }


class _Writer:
    """Draws the tensors of one checkpoint."""

    def __init__(self, size: TinyLatentSizes, gain: float) -> None:
        """`gain` scales what layers add to the streams."""
        self._size, self._gain = size, gain
        self._numbers = SeededNumbers(size.seed, size.drift)
        self._matrix, self._vector = self._numbers.matrix, self._numbers.vector

    def tensors(self, mtp: bool) -> Tensors:
        """Names and tensors."""
        size = self._size
        yield "model.embed_tokens.weight", self._matrix(size.vocab, size.hidden, size.hidden**0.5)
        for layer, ratio in enumerate(size.ratios):
            yield from self._layer(f"model.layers.{layer}.", ratio, layer < size.hashed)
        yield from self._stream_head("model.hc_head.")
        yield "model.norm.weight", 1 + self._vector(size.hidden)
        yield "lm_head.weight", self._matrix(size.vocab, size.hidden, size.sharpness)
        if mtp:
            for part in ("enorm", "hnorm", "norm"):
                yield f"mtp.0.{part}.weight", 1 + self._vector(size.hidden)
            for part in ("e_proj", "h_proj"):
                yield f"mtp.0.{part}.weight", self._matrix(size.hidden, size.hidden)
            yield from self._layer("mtp.0.", 0, hashed=False)
            yield from self._stream_head("mtp.0.hc_head.")

    def _layer(self, name: str, ratio: int, hashed: bool) -> Tensors:
        yield from self._attention(name + "self_attn.", ratio)
        for part in ("input", "post_attention"):
            yield f"{name}{part}_layernorm.weight", 1 + self._vector(self._size.hidden)
        for part in ("attn", "ffn"):
            yield from self._connection(f"{name}{part}_hc.")
        yield from self._experts(name + "mlp.", hashed)

    def _attention(self, name: str, ratio: int) -> Tensors:
        size, wide = self._size, self._size.heads * self._size.head_dim
        yield name + "q_a_proj.weight", self._matrix(size.query_rank, size.hidden)
        yield name + "q_a_norm.weight", 1 + self._vector(size.query_rank)
        yield name + "q_b_proj.weight", self._matrix(wide, size.query_rank, 1.5)
        yield name + "kv_proj.weight", self._matrix(size.head_dim, size.hidden)
        yield name + "kv_norm.weight", 1.5 + self._vector(size.head_dim)
        yield name + "sinks", self._vector(size.heads) * 10
        inputs = wide // size.groups
        yield name + "o_a_proj.weight", self._matrix(size.groups * size.output_rank, inputs, 2)
        outputs = self._matrix(size.hidden, size.groups * size.output_rank, 2 * self._gain)
        yield name + "o_b_proj.weight", outputs
        if ratio:
            sparse = ratio == 4
            form = (4, 2) if sparse else (size.heavy_ratio, 1)
            yield from self._compressor(name + "compressor.", form, size.head_dim)
            if sparse:
                yield from self._indexer(name + "compressor.indexer.")

    def _compressor(self, name: str, form: tuple[int, int], dim: int) -> Tensors:
        ratio, halves = form
        for part in ("kv", "gate"):
            yield f"{name}{part}_proj.weight", self._matrix(halves * dim, self._size.hidden, 1.5)
        yield name + "position_bias", self._numbers.normal(ratio, halves * dim)
        yield name + "kv_norm.weight", 1.5 + self._vector(dim)

    def _indexer(self, name: str) -> Tensors:
        size, wide = self._size, self._size.index_heads * self._size.index_dim
        yield from self._compressor(name, (4, 2), size.index_dim)
        yield name + "q_b_proj.weight", self._matrix(wide, size.query_rank)
        yield name + "scorer.weights_proj.weight", self._matrix(size.index_heads, size.hidden)

    def _connection(self, name: str) -> Tensors:
        size, gates = self._size, self._size.streams * (self._size.streams + 2)
        yield name + "fn", self._matrix(gates, size.streams * size.hidden)
        yield name + "base", self._numbers.normal(gates)
        yield name + "scale", 1 + self._vector(3)

    def _stream_head(self, name: str) -> Tensors:
        size = self._size
        yield name + "hc_fn", self._matrix(size.streams, size.streams * size.hidden)
        yield name + "hc_base", self._numbers.normal(size.streams)
        yield name + "hc_scale", 1 + self._vector(1)

    def _experts(self, name: str, hashed: bool) -> Tensors:
        size = self._size
        yield name + "gate.weight", self._matrix(size.experts, size.hidden, 2)
        if hashed:
            keys = torch.rand(size.vocab, size.experts, generator=self._numbers.own)
            yield name + "gate.tid2eid", keys.argsort(dim=1)[:, : size.chosen]
        else:
            yield name + "gate.e_score_correction_bias", self._vector(size.experts)
        for part in ("gate", "up"):
            inner = self._matrix(size.inner, size.hidden)
            yield f"{name}shared_experts.{part}_proj.weight", inner
        outer = 1.5 * self._gain
        down = self._matrix(size.hidden, size.inner, outer)
        yield name + "shared_experts.down_proj.weight", down
        gate_up = [self._matrix(2 * size.inner, size.hidden) for _ in range(size.experts)]
        yield name + "experts.gate_up_proj", torch.stack(gate_up)
        downs = [self._matrix(size.hidden, size.inner, outer) for _ in range(size.experts)]
        yield name + "experts.down_proj", torch.stack(downs)


def _table(
    tensors: dict[str, Tensor], size: TinyLatentSizes, dial: float, mtp: bool
) -> dict[str, Tensor]:
    """The tensors that make a model the table plus dial times its layers."""
    codes = codes_of(tensors["model.embed_tokens.weight"])
    changed = {
        "model.embed_tokens.weight": codes,
        "model.norm.weight": torch.ones(size.hidden),
        "lm_head.weight": table_head(codes, size.seed, size.sharpness),
    }
    if mtp:
        changed |= {
            "mtp.0.e_proj.weight": torch.eye(size.hidden),
            "mtp.0.h_proj.weight": tensors["mtp.0.h_proj.weight"] * dial,
            "mtp.0.enorm.weight": torch.ones(size.hidden),
            "mtp.0.norm.weight": torch.ones(size.hidden),
        }
    return changed
