"""Names of tensors: GGUF's against transformers', and which names look alike."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")
_OUTER = re.compile(r"(\w+)\.(weight|bias)")


def transformers_name(gguf_name: str) -> str | None:
    """Translate the name of a tensor of a dense decoder, e.g. `blk.3.attn_q.weight`.

    Returns:
        The name transformers gives it, e.g. `model.layers.3.self_attn.q_proj.weight`, or None
        for a tensor that such a decoder does not have.
    """
    if found := _LAYER.fullmatch(gguf_name):
        layer, module, kind = found.groups()
        inner = _LAYER_MODULES.get(module)
        return inner and f"model.layers.{layer}.{inner}.{kind}"
    if found := _OUTER.fullmatch(gguf_name):
        outer = _MODULES.get(found[1])
        return outer and f"{outer}.{found[2]}"
    return None


def near_names(wanted: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` of the names that look most like `wanted`, best first."""
    return difflib.get_close_matches(wanted, sorted(names), n=count, cutoff=0.7)


def listed(names: Collection[str], shown: int = 8) -> str:
    """The first of the names in their order, and how many more there are."""
    first = sorted(names)[:shown]
    more = len(names) - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")
