"""Configs of the hybrid family: Qwen3-Next, Qwen3.5 and Qwen3.6, dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.errors import ModelError
from surefoot.model.layers.attention import AttentionSizes
from surefoot.model.layers.delta import DeltaSizes
from surefoot.model.layers.feed import DenseSizes, ExpertSizes, FeedSizes
from surefoot.model.model import ConfigReader
from surefoot.weights.counts import Linears

_NEXT = "Qwen3NextForCausalLM"
_EXPERTS_EVERYWHERE = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
ARCHITECTURES = (
    _NEXT,
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    *_EXPERTS_EVERYWHERE,
)
FULL, RECURRENT = "full", "recurrent"
_KINDS = {"full_attention": FULL, "linear_attention": RECURRENT}
# An image's three axes of position are equal in text, where this is the plain rotation.
_PLAIN_ROPES = ("default", "mrope")


@dataclass(frozen=True)
class HybridConfig:
    """Sizes and switches of the text model.

    Attributes:
        architecture: as the config names it.
        vocab_size: rows of the embedding.
        hidden: width of the stream.
        max_positions: longest context the model was made for, in tokens.
        eps: of all norms.
        theta: base of the rotary frequencies.
        scaling: the config's `rope_parameters` or `rope_scaling`.
        tied: the head shares the embedding. Where the text model's part is wrapped, the wrapper's
            word counts, and the part's only where the wrapper says nothing.
        kinds: FULL or RECURRENT for each layer.
        attention: heads of full layers.
        delta: heads of recurrent layers.
        feeds: the feed-forward of each layer.
        promises_mtp: the config speaks of a draft head; the checkpoint may still lack it.
    """

    architecture: str
    vocab_size: int
    hidden: int
    max_positions: int
    eps: float
    theta: float
    scaling: Mapping[str, object]
    tied: bool
    kinds: tuple[str, ...]
    attention: AttentionSizes
    delta: DeltaSizes
    feeds: tuple[FeedSizes, ...]
    promises_mtp: bool

    @property
    def mtp_feed(self) -> FeedSizes:
        """The draft head's feed-forward: experts if the model has any."""
        sparse = [feed for feed in self.feeds if isinstance(feed, ExpertSizes)]
        return sparse[0] if sparse else self.feeds[0]

    def parameters(self, mtp: bool) -> int:
        """How many numbers the weights are, with or without the draft head."""
        hidden, table = self.hidden, self.vocab_size * self.hidden
        count = table * (1 if self.tied else 2) + hidden
        for kind, feed in zip(self.kinds, self.feeds, strict=True):
            mixer = self.attention if kind == FULL else self.delta
            count += mixer.parameters(hidden) + feed.parameters(hidden) + 2 * hidden
        if mtp:
            layer = self.attention.parameters(hidden) + self.mtp_feed.parameters(hidden)
            count += layer + 2 * hidden + 2 * hidden * hidden + 3 * hidden
        return count

    def linears(self, mtp: bool) -> Linears:
        """What W8A8 makes int8, with or without the draft head."""
        hidden = self.hidden
        count = Linears.head(self.vocab_size, hidden, self.tied)
        for kind, feed in zip(self.kinds, self.feeds, strict=True):
            mixer = self.attention if kind == FULL else self.delta
            count += mixer.linears(hidden) + feed.linears(hidden)
        if mtp:
            count += self.attention.linears(hidden) + self.mtp_feed.linears(hidden)
            count += Linears.of(2 * hidden, hidden)
        return count


def read_config(config: Mapping[str, object]) -> HybridConfig:
    """Check and translate a config.json, flat or with the text model's part in `text_config`.

    Raises:
        ModelError: an entry is missing, of the wrong type, or asks for what is not supported.
    """
    outer = ConfigReader(config)
    text = outer.mapping("text_config") or config
    read = ConfigReader(text)
    architecture = outer.strings("architectures")[0]
    _refuse_variants(read)
    kinds = _kinds(read)
    attention = _attention(read)
    rope = dict(read.mapping("rope_scaling")) | dict(read.mapping("rope_parameters"))
    if rope.get("rope_type", rope.get("type", "default")) in _PLAIN_ROPES:
        rope |= {"rope_type": "default"}
    theta = {"rope_theta": rope.get("rope_theta", read.number("rope_theta", 10000.0))}
    return HybridConfig(
        architecture=architecture,
        vocab_size=read.integer("vocab_size"),
        hidden=read.integer("hidden_size"),
        max_positions=read.integer("max_position_embeddings"),
        eps=read.number("rms_norm_eps", 1e-6),
        theta=ConfigReader(theta).number("rope_theta"),
        scaling=rope,
        tied=outer.flag("tie_word_embeddings", read.flag("tie_word_embeddings", False)),
        kinds=kinds,
        attention=attention,
        delta=_delta(read),
        feeds=_feeds(read, architecture, len(kinds), text.get("mlp_only_layers")),
        promises_mtp=read.integer("mtp_num_hidden_layers", 0) > 0,
    )


def _refuse_variants(read: ConfigReader) -> None:
    activation = read.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(
            f"config.json: hidden_act {activation!r} is not supported; known is 'silu'"
        )
    wanted = {
        "attention_bias": False,
        "attn_output_gate": True,
        "mtp_use_dedicated_embeddings": False,
    }
    for name, value in wanted.items():
        if read.flag(name, value) is not value:
            raise ModelError(f"config.json: {name} {not value} is not supported, only {value}")
    if (heads := read.integer("mtp_num_hidden_layers", 0)) > 1:
        raise ModelError(
            f"config.json: mtp_num_hidden_layers {heads} is not supported; one layer is used again "
            "and again for any depth"
        )


def _kinds(read: ConfigReader) -> tuple[str, ...]:
    layers = read.integer("num_hidden_layers")
    named = read.strings("layer_types")
    if not named:
        interval = read.integer("full_attention_interval", 4)
        if interval < 1:
            raise ModelError("config.json: full_attention_interval must be at least 1")
        return tuple(RECURRENT if (i + 1) % interval else FULL for i in range(layers))
    if set(named) - _KINDS.keys() or len(named) != layers:
        raise ModelError(
            f"config.json: layer_types must name {layers} known kinds "
            f"({', '.join(_KINDS)}), not {list(named)}"
        )
    return tuple(_KINDS[kind] for kind in named)


def _attention(read: ConfigReader) -> AttentionSizes:
    heads = read.integer("num_attention_heads")
    key_heads = read.integer("num_key_value_heads", heads)
    if heads % key_heads:
        raise ModelError(f"config.json: {heads} attention heads cannot share {key_heads} key heads")
    size = read.integer("head_dim", 256)
    rope = dict(read.mapping("rope_scaling")) | dict(read.mapping("rope_parameters"))
    outside = read.number("partial_rotary_factor", 0.25)
    share = {"partial_rotary_factor": rope.get("partial_rotary_factor", outside)}
    rotated = int(size * ConfigReader(share).number("partial_rotary_factor"))
    return AttentionSizes(heads, key_heads, size, rotated)


def _delta(read: ConfigReader) -> DeltaSizes:
    sizes = DeltaSizes(
        key_heads=read.integer("linear_num_key_heads"),
        value_heads=read.integer("linear_num_value_heads"),
        key_size=read.integer("linear_key_head_dim"),
        value_size=read.integer("linear_value_head_dim"),
        taps=read.integer("linear_conv_kernel_dim", 4),
    )
    if sizes.value_heads % sizes.key_heads:
        raise ModelError(
            f"config.json: {sizes.value_heads} linear value heads cannot share "
            f"{sizes.key_heads} linear key heads"
        )
    return sizes


def _feeds(
    read: ConfigReader, architecture: str, layers: int, dense_layers: object
) -> tuple[FeedSizes, ...]:
    """The feed-forward of each layer; `dense_layers` is the entry mlp_only_layers."""
    if architecture in _EXPERTS_EVERYWHERE:
        return (_experts(read, renormalised=True),) * layers
    if architecture != _NEXT or read.integer("num_experts", 0) == 0:
        return (DenseSizes(read.integer("intermediate_size")),) * layers
    step, excepted = read.integer("decoder_sparse_step", 1), dense_layers or []
    if step < 1 or not isinstance(excepted, list):
        raise ModelError(
            "config.json: decoder_sparse_step must be at least 1 and mlp_only_layers a list, "
            f"not {step} and {excepted!r}"
        )
    sparse = [(i + 1) % step == 0 and i not in excepted for i in range(layers)]
    experts = _experts(read, renormalised=read.flag("norm_topk_prob", True))
    if all(sparse):
        return (experts,) * layers
    dense = DenseSizes(read.integer("intermediate_size"))
    return tuple(experts if chosen else dense for chosen in sparse)


def _experts(read: ConfigReader, renormalised: bool) -> ExpertSizes:
    sizes = ExpertSizes(
        experts=read.integer("num_experts"),
        chosen=read.integer("num_experts_per_tok"),
        inner=read.integer("moe_intermediate_size"),
        shared=read.integer("shared_expert_intermediate_size"),
        renormalised=renormalised,
    )
    if not 0 < sizes.chosen <= sizes.experts:
        raise ModelError(
            f"config.json: a token cannot take {sizes.chosen} of {sizes.experts} experts"
        )
    return sizes
