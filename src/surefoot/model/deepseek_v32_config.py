"""Configs of DeepSeek V3.2 and GLM-5."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.errors import ModelError
from surefoot.model.layers.chosen import ChosenSizes, IndexSizes
from surefoot.model.layers.feed import DenseSizes
from surefoot.model.layers.grouped import GroupedSizes
from surefoot.model.layers.rotary import Rotary, make_partial_rotary
from surefoot.model.model import ConfigReader
from surefoot.weights.counts import Linears

# Whether the indexer turns neighbours, where the config does not say.
_NEIGHBOURS = {"DeepseekV32ForCausalLM": False, "GlmMoeDsaForCausalLM": True}
ARCHITECTURES = tuple(_NEIGHBOURS)
FULL, SHARED = "full", "shared"
_LETTERS = {"F": FULL, "S": SHARED}


@dataclass(frozen=True)
class ChosenConfig:
    """Sizes and switches.

    Attributes:
        architecture: as the config names it.
        vocab_size: rows of the embedding.
        hidden: width of the stream.
        max_positions: longest context the model was made for, in tokens.
        eps: of the norms of layers and of the last one.
        kinds: FULL for each layer with an indexer, SHARED for each that takes over the choice of
            the layer before.
        feeds: of each layer.
        mtp_feed: of the draft head.
        attention: heads and widths, the same in all layers.
        index: of the indexers.
        theta: base of the rotary frequencies.
        scaling: of the frequencies, as `make_rotary` takes it.
        promises_mtp: the config speaks of a draft head; the checkpoint may still lack it.
        one_choice: a draft's later passes take over what its first pass has chosen.
    """

    architecture: str
    vocab_size: int
    hidden: int
    max_positions: int
    eps: float
    kinds: tuple[str, ...]
    feeds: tuple[DenseSizes | GroupedSizes, ...]
    mtp_feed: GroupedSizes
    attention: ChosenSizes
    index: IndexSizes
    theta: float
    scaling: Mapping[str, object]
    promises_mtp: bool
    one_choice: bool

    def rotary(self, size: int) -> Rotary:
        """Angles for heads of `size`, of which as much turns as in attention."""
        return make_partial_rotary(size, self.attention.turned, self.theta, self.scaling)

    def parameters(self, mtp: bool) -> int:
        """How many numbers the weights are, with or without the draft head."""
        hidden = self.hidden
        count = 2 * self.vocab_size * hidden + hidden
        for kind, feed in zip(self.kinds, self.feeds, strict=True):
            count += self._layer(kind, feed)
        if mtp:
            count += self._layer(FULL, self.mtp_feed) + 2 * hidden * hidden + 3 * hidden
        return count

    def linears(self, mtp: bool) -> Linears:
        """What W8A8 makes int8, with or without the draft head."""
        hidden, rank = self.hidden, self.attention.query_rank
        count = Linears.head(self.vocab_size, hidden, tied=False)
        count += self.attention.linears(hidden) * (len(self.kinds) + mtp)
        count += self.index.linears(rank) * (self.kinds.count(FULL) + mtp)
        for feed in self.feeds:
            count += feed.linears(hidden)
        return count + (self.mtp_feed.linears(hidden) + Linears.of(2 * hidden, hidden)) * mtp

    def _layer(self, kind: str, feed: DenseSizes | GroupedSizes) -> int:
        count = self.attention.parameters(self.hidden) + 2 * self.hidden
        count += feed.parameters(self.hidden)
        if kind == FULL:
            count += self.index.parameters(self.hidden, self.attention.query_rank)
        return count


def read_config(config: Mapping[str, object]) -> ChosenConfig:
    """Check and translate a config.json.

    Raises:
        ModelError: an entry is missing, of the wrong type or size, or asks for what is not
            supported.
    """
    read = ConfigReader(config)
    _refuse_variants(read)
    layers, rope, architecture = read.count("num_hidden_layers"), _rope(read), _name(read)
    routed = _routed(read)
    known = ChosenConfig(
        architecture=architecture,
        vocab_size=read.count("vocab_size"),
        hidden=read.count("hidden_size"),
        max_positions=read.count("max_position_embeddings"),
        eps=read.number("rms_norm_eps"),
        kinds=_kinds(read, config, layers),
        feeds=_feeds(read, layers, routed),
        mtp_feed=routed,
        attention=ChosenSizes(
            heads=read.count("num_attention_heads"),
            plain=read.count("qk_nope_head_dim"),
            turned=read.count("qk_rope_head_dim"),
            value=read.count("v_head_dim"),
            query_rank=read.count("q_lora_rank"),
            rank=read.count("kv_lora_rank"),
            sharpened=_sharpened(rope),
        ),
        index=IndexSizes(
            heads=read.count("index_n_heads"),
            size=read.count("index_head_dim"),
            chosen=read.count("index_topk"),
            neighbours=read.flag("indexer_rope_interleave", _NEIGHBOURS[architecture]),
        ),
        theta=_theta(rope, read),
        scaling={name: value for name, value in rope.items() if name != "rope_theta"},
        promises_mtp=read.integer("num_nextn_predict_layers", 0) > 0,
        one_choice=read.flag("index_share_for_mtp_iteration", False),
    )
    # Sizes that rope cannot turn are told here, where no weights are needed.
    known.rotary(known.attention.turned)
    known.rotary(known.index.size)
    return known


def _name(read: ConfigReader) -> str:
    names = read.strings("architectures")
    if not names or names[0] not in _NEIGHBOURS:
        raise ModelError(f"config.json: architectures must be one of {ARCHITECTURES}, not {names}")
    return names[0]


def _refuse_variants(read: ConfigReader) -> None:
    texts = {"hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    for name, known in texts.items():
        if (value := read.text(name, known)) != known:
            raise ModelError(f"config.json: {name} {value!r} is not supported; known is {known!r}")
    for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if read.flag(name, False):
            raise ModelError(f"config.json: {name} True is not supported, only False")
    if (every := read.integer("moe_layer_freq", 1)) != 1:
        raise ModelError(f"config.json: moe_layer_freq {every} is not supported, only 1")
    if (heads := read.integer("num_nextn_predict_layers", 0)) > 1:
        raise ModelError(
            f"config.json: num_nextn_predict_layers {heads} is not supported; one layer is used "
            "again and again for any depth"
        )


def _rope(read: ConfigReader) -> Mapping[str, object]:
    """The rope's entries, as `rope_parameters` or, in older files, `rope_scaling`."""
    rope = dict(read.mapping("rope_parameters") or read.mapping("rope_scaling"))
    if ConfigReader(rope).number("factor", 1.0) <= 0:
        raise ModelError(f"config.json: rope factor must be above 0, not {rope['factor']}")
    # Where a rope says what part of a head turns, it is the part of which the sizes speak.
    rope.pop("partial_rotary_factor", None)
    return rope


def _theta(rope: Mapping[str, object], read: ConfigReader) -> float:
    """The base of the frequencies; what stands in the rope's own entries counts."""
    stored = ConfigReader(rope)
    theta = stored.number("rope_theta") if "rope_theta" in rope else read.number("rope_theta")
    if theta <= 1:
        raise ModelError(f"config.json: rope_theta must be above 1, not {theta}")
    return theta


def _sharpened(rope: Mapping[str, object]) -> float:
    """The factor on scores that YaRN asks for: (0.1 mscale_all_dim log factor + 1)^2."""
    read = ConfigReader(rope)
    kind = read.text("rope_type", read.text("type", "default"))
    factor, scale = read.number("factor", 1.0), read.number("mscale_all_dim", 0.0)
    if kind == "default" or factor <= 1:
        return 1.0
    return (0.1 * scale * math.log(factor) + 1) ** 2


def _kinds(read: ConfigReader, config: Mapping[str, object], layers: int) -> tuple[str, ...]:
    """Which layers have an indexer: by name, by a pattern of letters, or every so many layers."""
    kinds = tuple(read.strings("indexer_types"))
    where = "indexer_types"
    if not kinds:
        where, kinds = "index_topk_pattern", _by_letters(config.get("index_topk_pattern"))
    if not kinds:
        where = "index_topk_freq"
        every = max(read.integer("index_topk_freq", 1), 1)
        offset = read.integer("index_skip_topk_offset", 2)
        full = [max(layer - offset + 1, 0) % every == 0 for layer in range(layers)]
        kinds = tuple(FULL if each else SHARED for each in full)
    if set(kinds) - {FULL, SHARED} or len(kinds) < layers:
        raise ModelError(
            f"config.json: {where} must name {layers} known kinds ({FULL}, {SHARED}), not "
            f"{len(kinds)} of {sorted(set(kinds))}"
        )
    if kinds[0] != FULL:
        raise ModelError(f"config.json: {where} must begin with {FULL!r}: nothing comes before")
    return kinds[:layers]


def _by_letters(pattern: object) -> tuple[str, ...]:
    """Kinds that are written as F and S in a string, or as words in a list."""
    if pattern is None:
        return ()
    if isinstance(pattern, str | list):
        return tuple(_LETTERS.get(str(each), str(each)) for each in pattern)
    raise ModelError(
        f"config.json: 'index_topk_pattern' must be letters F and S, and it is {pattern!r}"
    )


def _feeds(
    read: ConfigReader, layers: int, routed: GroupedSizes
) -> tuple[DenseSizes | GroupedSizes, ...]:
    named: Sequence[str] = read.strings("mlp_layer_types")
    if not named:
        dense = read.integer("first_k_dense_replace")
        if dense < 0:
            raise ModelError(f"config.json: first_k_dense_replace must be 0 or more, not {dense}")
        named = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    if set(named) - {"dense", "sparse"} or len(named) < layers:
        raise ModelError(
            f"config.json: mlp_layer_types must name {layers} known kinds (dense, sparse), not "
            f"{len(named)} of {sorted(set(named))}"
        )
    own = DenseSizes(read.count("intermediate_size")) if "dense" in named else None
    return tuple(routed if kind == "sparse" or own is None else own for kind in named[:layers])


def _routed(read: ConfigReader) -> GroupedSizes:
    inner = read.count("moe_intermediate_size")
    sizes = GroupedSizes(
        experts=read.count("n_routed_experts"),
        chosen=read.count("num_experts_per_tok"),
        groups=read.count("n_group", 1),
        chosen_groups=read.count("topk_group", 1),
        inner=inner,
        shared=inner * read.count("n_shared_experts"),
        renormalised=read.flag("norm_topk_prob", True),
        scale=read.number("routed_scaling_factor"),
    )
    if sizes.experts % sizes.groups or (sizes.groups > 1 and sizes.group < 2):
        raise ModelError(
            f"config.json: {sizes.experts} experts cannot form n_group {sizes.groups} groups of "
            "two or more"
        )
    if sizes.chosen_groups > sizes.groups:
        raise ModelError(
            f"config.json: topk_group {sizes.chosen_groups} is more than n_group {sizes.groups}"
        )
    if sizes.chosen > sizes.chosen_groups * sizes.group:
        raise ModelError(
            f"config.json: num_experts_per_tok {sizes.chosen} is more than topk_group "
            f"{sizes.chosen_groups} groups have"
        )
    return sizes
