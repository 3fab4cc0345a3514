"""DeepSeek V4 checkpoints: the original release's names, and its mix of 8-bit and 4-bit floats."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

from surefoot.errors import WeightsError
from surefoot.weights.checkpoint import Checkpoint, EncodedCheckpoint
from surefoot.weights.fp8 import BlockScaledCheckpoint
from surefoot.weights.modelslim import COMPANIONS
from surefoot.weights.mxfp4 import Fp4Checkpoint

_ARCHITECTURE = "DeepseekV4ForCausalLM"
_BLOCK = (128, 128)

_SUFFIXES = {"weight": "weight", "scale": "weight_scale_inv", **{name: name for name in COMPANIONS}}
_EXPERT = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# What has a weight and maybe a scale, outside of the layers, in one, and in the draft head.
_OUTER_MODULES = {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.norm": "self_attn.kv_norm",  # as transformers writes it
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.compressor.norm": "self_attn.compressor.kv_norm",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.compressor.norm": "self_attn.compressor.indexer.kv_norm",
    "ffn.gate": "mlp.gate",
    **{f"ffn.shared_experts.{old}": f"mlp.shared_experts.{new}" for old, new in _EXPERT.items()},
}
_HEAD_MODULES = {
    **_LAYER_MODULES,
    **{name: name for name in ("e_proj", "h_proj", "enorm", "hnorm", "norm")},
}
# What is a tensor by itself.
_COLLAPSE = {f"hc_head_{part}": f"hc_head.hc_{part}" for part in ("fn", "base", "scale")}
_OUTER_TENSORS = {old: f"model.{new}" for old, new in _COLLAPSE.items()}
_LAYER_TENSORS = {
    **{f"hc_attn_{part}": f"attn_hc.{part}" for part in ("fn", "base", "scale")},
    **{f"hc_ffn_{part}": f"ffn_hc.{part}" for part in ("fn", "base", "scale")},
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
}
_HEAD_TENSORS = {**_LAYER_TENSORS, **_COLLAPSE}

# Transformers' own files have its names outside of the layers and the release's in them.
_LAYER_NAME = re.compile(r"(?:model\.)?layers\.(0|[1-9]\d*)\.(.+)")
_HEAD_NAME = re.compile(r"(mtp\.(?:0|[1-9]\d*)\.)(.+)")
_EXPERT_NAME = re.compile(
    rf"ffn\.experts\.(0|[1-9]\d*)\.(w[123])\.({'|'.join(map(re.escape, _SUFFIXES))})"
)
# Some files carry the target's embedding and output layer once more, with the draft head.
_COPIES = re.compile(r"mtp\.(?:0|[1-9]\d*)\.(?:emb\.tok_emb|head)\.weight")


class RenamedCheckpoint:
    """A checkpoint in the release's names under transformers' names.

    Each name is seen by itself: one of the release's is translated and any other stays, so files
    in transformers' names, and the mix of both that it writes, read as well. A tensor that such a
    model does not have keeps its name and is reported as unused. Copies of the target's tensors in
    the draft head do not show.

    Attributes:
        config: see Checkpoint.
        generation: see Checkpoint.

    Raises:
        WeightsError: two stored tensors have the same name in transformers.
    """

    def __init__(self, stored: EncodedCheckpoint) -> None:
        self.config: Mapping[str, object] = stored.config
        self.generation: Mapping[str, object] = stored.generation
        self._stored = stored
        self._homes = _renamed(name for name in stored.names() if not _COPIES.fullmatch(name))

    def names(self) -> Collection[str]:
        """All tensors that are stored, under transformers' names."""
        return self._homes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one stored tensor, without reading it."""
        return self._stored.shape(self._homes[name])

    def encoding(self, name: str) -> str:
        """How one tensor is stored, without reading it."""
        return self._stored.encoding(self._homes[name])

    def stored_name(self, name: str) -> str:
        """What one tensor is called in the files."""
        return self._homes[name]

    def read(self, name: str) -> Tensor:
        """One tensor in its stored dtype; it may be a view of the file."""
        return self._stored.read(self._homes[name])

    def close(self) -> None:
        """Let go of the files."""
        self._stored.close()
        self._homes = {}


def is_deepseek_v4(config: Mapping[str, object]) -> bool:
    """Whether a config is that of a DeepSeek V4 model."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and _ARCHITECTURE in architectures


def open_deepseek_v4(stored: EncodedCheckpoint, block: tuple[int, int] | None) -> Checkpoint:
    """Read a DeepSeek V4 folder under transformers' names, with its weights expanded.

    The config knows one block for all weights, and the experts have another form. So what is
    stored decides for each weight; `block`, if there is one, is only tried first.
    """
    packed = Fp4Checkpoint(RenamedCheckpoint(stored))
    return BlockScaledCheckpoint(packed, block or _BLOCK, other_squares=True)


def transformers_name(release_name: str) -> str | None:
    """Translate a name of the release, e.g. `layers.3.attn.wq_a.weight`.

    The draft head, which transformers does not have, keeps its prefix: what is inside of it is
    named like a layer, e.g. `mtp.0.self_attn.q_a_proj.weight`.

    Returns:
        The name transformers gives it, or None if it is not a name of the release.
    """
    if found := _LAYER_NAME.fullmatch(release_name):
        inner = _in_layer(found[2], _LAYER_MODULES, _LAYER_TENSORS)
        return inner and f"model.layers.{found[1]}.{inner}"
    if found := _HEAD_NAME.fullmatch(release_name):
        inner = _in_layer(found[2], _HEAD_MODULES, _HEAD_TENSORS)
        return inner and found[1] + inner
    return _looked_up(release_name, _OUTER_MODULES, _OUTER_TENSORS)


def _in_layer(name: str, modules: Mapping[str, str], tensors: Mapping[str, str]) -> str | None:
    if found := _EXPERT_NAME.fullmatch(name):
        return f"mlp.experts.{found[1]}.{_EXPERT[found[2]]}.{_SUFFIXES[found[3]]}"
    return _looked_up(name, modules, tensors)


def _looked_up(name: str, modules: Mapping[str, str], tensors: Mapping[str, str]) -> str | None:
    if name in tensors:
        return tensors[name]
    module, _, suffix = name.rpartition(".")
    known = module in modules and suffix in _SUFFIXES
    return f"{modules[module]}.{_SUFFIXES[suffix]}" if known else None


def _renamed(stored_names: Iterable[str]) -> dict[str, str]:
    """Map transformers' names to those in the files."""
    homes: dict[str, str] = {}
    for stored in stored_names:
        name = transformers_name(stored) or stored
        if name in homes:
            first, second = sorted((homes[name], stored))
            raise WeightsError(
                f"the checkpoint holds {first!r} and {second!r}, which are two names of one "
                f"tensor, {name!r}"
            )
        homes[name] = stored
    return homes
