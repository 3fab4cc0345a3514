"""Writes small checkpoints of DeepSeek V3.2 and GLM-5 with seeded random weights, for tests.

With `dial` the model becomes a table of next tokens plus dial times what its layers say, and so
does its draft head; see `tiny_hybrids`. From a shell:

    python -m surefoot.testing.tiny_dsa FOLDER --dial 0.5 --architecture GlmMoeDsaForCausalLM
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from surefoot.testing.seeded import SeededNumbers, codes_of, table_head
from surefoot.testing.tiny_models import LEAST_TEXT_VOCAB, write_tokenizer

DEEPSEEK, GLM = "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"
_TYPES = {DEEPSEEK: "deepseek_v32", GLM: "glm_moe_dsa"}
Tensors = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class TinyDsaSizes:
    """How large the model is and which numbers it gets.

    Attributes:
        architecture: DEEPSEEK or GLM.
        vocab: token ids.
        hidden: width of the stream.
        layers: how many.
        dense: so many layers, the first ones, have no experts.
        every: every so many layers there is an indexer; 1 for all.
        one_choice: later passes of a draft look where the first pass has looked.
        yarn: the rotary frequencies are scaled.
        heads: query heads.
        plain: numbers of a head that do not turn.
        turned: numbers of a head that turn with the position.
        value: numbers of a head's value.
        query_rank: width between the products of queries.
        rank: numbers of a latent.
        index_heads: heads of the indexer.
        index_dim: their size.
        index_chosen: most positions a token looks at.
        experts: how many there are.
        groups: groups of experts.
        chosen_groups: groups a token takes experts from.
        chosen: how many a token takes.
        inner: width of an expert.
        wide: width of a feed-forward without experts.
        positions: longest context.
        seed: key of the weights.
        drift: how much of other random weights is mixed in, as a fraction of their size.
        sharpness: factor on the logits.
    """

    architecture: str = DEEPSEEK
    vocab: int = 64
    hidden: int = 32
    layers: int = 3
    dense: int = 1
    every: int = 1
    one_choice: bool = False
    yarn: bool = False
    heads: int = 3
    plain: int = 12
    turned: int = 8
    value: int = 10
    query_rank: int = 20
    rank: int = 24
    index_heads: int = 4
    index_dim: int = 16
    index_chosen: int = 16
    experts: int = 8
    groups: int = 4
    chosen_groups: int = 2
    chosen: int = 3
    inner: int = 16
    wide: int = 40
    positions: int = 512
    seed: int = 0
    drift: float = 0.0
    sharpness: float = 2.5

    def has_indexer(self, layer: int) -> bool:
        """Whether this layer has one."""
        return layer % self.every == 0


DEFAULT_SIZES = TinyDsaSizes()


def write_tiny_dsa(
    folder: Path,
    size: TinyDsaSizes = DEFAULT_SIZES,
    *,
    mtp: bool = True,
    tokenizer: bool = False,
    dial: float | None = None,
) -> Path:
    """Write config.json and model.safetensors, in float32, under the releases' names.

    Args:
        folder: made if it is not there.
        size: how large, and which numbers.
        mtp: with a draft head, and the copies of embedding and output head that it brings along.
        tokenizer: also write a byte-level tokenizer without a chat template; the vocabulary is then
            at least LEAST_TEXT_VOCAB.
        dial: see above; None leaves the weights random.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        size = replace(size, vocab=max(size.vocab, LEAST_TEXT_VOCAB))
        write_tokenizer(folder, size.vocab, chat_template=None)
    (folder / "config.json").write_text(json.dumps(make_dsa_config(size, mtp), indent=1))
    tensors = dict(_Writer(size, 1.0 if dial is None else dial).tensors(mtp))
    head = f"model.layers.{size.layers}."
    if dial is not None:
        tensors |= _table(tensors, size, dial, head if mtp else "")
    if mtp:
        tensors[head + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[head + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    whole = {name: value.contiguous() for name, value in tensors.items()}
    save_file(whole, folder / "model.safetensors")
    return folder


def make_dsa_config(size: TinyDsaSizes, mtp: bool = True) -> dict[str, object]:
    """A config.json."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": 10000.0}
    if size.yarn:
        rope |= {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    shared: dict[str, object] = {}
    if size.every > 1:
        shared = {"index_topk_freq": size.every, "index_skip_topk_offset": 1}
    return {
        "architectures": [size.architecture],
        "model_type": _TYPES[size.architecture],
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "q_lora_rank": size.query_rank,
        "kv_lora_rank": size.rank,
        "qk_nope_head_dim": size.plain,
        "qk_rope_head_dim": size.turned,
        "v_head_dim": size.value,
        "index_n_heads": size.index_heads,
        "index_head_dim": size.index_dim,
        "index_topk": size.index_chosen,
        **shared,
        "index_share_for_mtp_iteration": size.one_choice,
        "intermediate_size": size.wide,
        "moe_intermediate_size": size.inner,
        "n_routed_experts": size.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": size.chosen,
        "n_group": size.groups,
        "topk_group": size.chosen_groups,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": size.dense,
        "rms_norm_eps": 1e-6 if size.architecture == DEEPSEEK else 1e-5,
        "rope_parameters": rope,
        "max_position_embeddings": size.positions,
        "num_nextn_predict_layers": int(mtp),
        "tie_word_embeddings": False,
    }


class _Writer:
    """Draws the tensors of one checkpoint."""

    def __init__(self, size: TinyDsaSizes, gain: float) -> None:
        """`gain` scales what layers add to the stream."""
        self._size, self._gain = size, gain
        self._numbers = SeededNumbers(size.seed, size.drift)
        self._matrix, self._vector = self._numbers.matrix, self._numbers.vector

    def tensors(self, mtp: bool) -> Tensors:
        """Names and tensors."""
        size = self._size
        yield "model.embed_tokens.weight", self._matrix(size.vocab, size.hidden, size.hidden**0.5)
        for layer in range(size.layers):
            name = f"model.layers.{layer}."
            yield from self._layer(name, size.has_indexer(layer), layer < size.dense)
        yield "model.norm.weight", 1 + self._vector(size.hidden)
        yield "lm_head.weight", self._matrix(size.vocab, size.hidden, size.sharpness)
        if mtp:
            name = f"model.layers.{size.layers}."
            for part in ("enorm", "hnorm", "shared_head.norm"):
                yield f"{name}{part}.weight", 1 + self._vector(size.hidden)
            yield name + "eh_proj.weight", self._matrix(size.hidden, 2 * size.hidden)
            yield from self._layer(name, indexer=True, dense=False)

    def _layer(self, name: str, indexer: bool, dense: bool) -> Tensors:
        yield from self._attention(name + "self_attn.")
        if indexer:
            yield from self._indexer(name + "self_attn.indexer.")
        for part in ("input", "post_attention"):
            yield f"{name}{part}_layernorm.weight", 1 + self._vector(self._size.hidden)
        if dense:
            yield from self._pair(name + "mlp.", self._size.wide)
        else:
            yield from self._experts(name + "mlp.")

    def _attention(self, name: str) -> Tensors:
        size = self._size
        wide = size.heads * (size.plain + size.turned)
        yield name + "q_a_proj.weight", self._matrix(size.query_rank, size.hidden)
        yield name + "q_a_layernorm.weight", 1 + self._vector(size.query_rank)
        yield name + "q_b_proj.weight", self._matrix(wide, size.query_rank, 1.5)
        latent = self._matrix(size.rank + size.turned, size.hidden)
        yield name + "kv_a_proj_with_mqa.weight", latent
        yield name + "kv_a_layernorm.weight", 1.5 + self._vector(size.rank)
        spread = self._matrix(size.heads * (size.plain + size.value), size.rank, 1.5)
        yield name + "kv_b_proj.weight", spread
        outputs = self._matrix(size.hidden, size.heads * size.value, 2 * self._gain)
        yield name + "o_proj.weight", outputs

    def _indexer(self, name: str) -> Tensors:
        size, wide = self._size, self._size.index_heads * self._size.index_dim
        yield name + "wq_b.weight", self._matrix(wide, size.query_rank)
        yield name + "wk.weight", self._matrix(size.index_dim, size.hidden)
        yield name + "k_norm.weight", 1 + self._vector(size.index_dim)
        yield name + "k_norm.bias", self._vector(size.index_dim)
        yield name + "weights_proj.weight", self._matrix(size.index_heads, size.hidden)

    def _experts(self, name: str) -> Tensors:
        size = self._size
        yield name + "gate.weight", self._matrix(size.experts, size.hidden, 2)
        yield name + "gate.e_score_correction_bias", self._vector(size.experts)
        yield from self._pair(name + "shared_experts.", size.inner)
        for expert in range(size.experts):
            yield from self._pair(f"{name}experts.{expert}.", size.inner)

    def _pair(self, name: str, inner: int) -> Tensors:
        hidden = self._size.hidden
        for part in ("gate", "up"):
            yield f"{name}{part}_proj.weight", self._matrix(inner, hidden)
        yield name + "down_proj.weight", self._matrix(hidden, inner, 1.5 * self._gain)


def _table(
    tensors: dict[str, Tensor], size: TinyDsaSizes, dial: float, head: str
) -> dict[str, Tensor]:
    """The tensors that make a model the table plus dial times its layers; `head` is the draft's."""
    codes = codes_of(tensors["model.embed_tokens.weight"])
    changed = {
        "model.embed_tokens.weight": codes,
        "model.norm.weight": torch.ones(size.hidden),
        "lm_head.weight": table_head(codes, size.seed, size.sharpness),
    }
    if head:
        join = tensors[head + "eh_proj.weight"] * dial
        join[:, : size.hidden] = torch.eye(size.hidden)
        changed |= {
            head + "eh_proj.weight": join,
            head + "enorm.weight": torch.ones(size.hidden),
            head + "shared_head.norm.weight": torch.ones(size.hidden),
        }
    return changed


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a checkpoint as the command line says, or as `arguments` do."""
    reader = argparse.ArgumentParser(description="write a small checkpoint for tests")
    reader.add_argument("folder", type=Path)
    reader.add_argument("--architecture", choices=sorted(_TYPES), default=DEEPSEEK)
    reader.add_argument("--dial", type=float, help="0 to 1; without it, weights are random")
    reader.add_argument("--every", type=int, default=1, help="an indexer every so many layers")
    reader.add_argument("--one-choice", action="store_true", help="drafts choose positions once")
    reader.add_argument("--positions", type=int, default=4096)
    given = reader.parse_args(arguments)
    size = TinyDsaSizes(
        architecture=given.architecture,
        every=given.every,
        one_choice=given.one_choice,
        positions=given.positions,
    )
    write_tiny_dsa(given.folder, size, tokenizer=True, dial=given.dial)


if __name__ == "__main__":
    main()
