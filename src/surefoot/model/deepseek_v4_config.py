"""Configs of DeepSeek V4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.errors import ModelError
from surefoot.model.layers.hyper import StreamSizes
from surefoot.model.layers.latent import Compressor, IndexerSizes, LatentSizes
from surefoot.model.layers.rotary import make_partial_rotary
from surefoot.model.layers.routed import RoutedSizes
from surefoot.model.model import ConfigReader
from surefoot.weights.counts import Linears

ARCHITECTURES = ("DeepseekV4ForCausalLM",)
WINDOW, SPARSE, HEAVY = "window", "sparse", "heavy"
HASHED, BIASED = "hashed", "biased"
_KINDS = {
    "sliding_attention": WINDOW,
    "compressed_sparse_attention": SPARSE,
    "heavily_compressed_attention": HEAVY,
}
_KINDS_BY_RATIO = {0: WINDOW, 4: SPARSE, 128: HEAVY}
_ROUTERS = {"hash_moe": HASHED, "moe": BIASED}


@dataclass(frozen=True)
class LatentConfig:
    """Sizes and switches.

    Attributes:
        architecture: as the config names it.
        vocab_size: rows of the embedding.
        hidden: width of a stream.
        max_positions: longest context the model was made for, in tokens.
        eps: of all norms.
        kinds: WINDOW, SPARSE or HEAVY for each layer.
        routers: HASHED or BIASED for each layer.
        attention: heads and widths, the same in all layers.
        streams: of the hyper-connections.
        feed: the experts, the same in all layers.
        sparse: compressor of sparse layers.
        heavy: compressor of heavy layers.
        indexer: of sparse layers.
        theta: base of the rotary frequencies of window layers.
        compressed_theta: base in the other layers.
        scaling: of the frequencies in the other layers, as `make_rotary` takes it.
        promises_mtp: the config speaks of a draft head; the checkpoint may still lack it.
    """

    architecture: str
    vocab_size: int
    hidden: int
    max_positions: int
    eps: float
    kinds: tuple[str, ...]
    routers: tuple[str, ...]
    attention: LatentSizes
    streams: StreamSizes
    feed: RoutedSizes
    sparse: Compressor
    heavy: Compressor
    indexer: IndexerSizes
    theta: float
    compressed_theta: float
    scaling: Mapping[str, object]
    promises_mtp: bool

    def compressor(self, kind: str) -> Compressor | None:
        """The compressor of layers of this kind."""
        return {SPARSE: self.sparse, HEAVY: self.heavy}.get(kind)

    def parameters(self, mtp: bool) -> int:
        """How many numbers the weights are, with or without the draft head.

        Tables of hashed routers are not counted: they are chosen, not trained.
        """
        hidden = self.hidden
        ends = 2 * self.vocab_size * hidden + hidden + self.streams.head_parameters(hidden)
        count = ends
        for kind, router in zip(self.kinds, self.routers, strict=True):
            count += self._layer(kind, router)
        if mtp:
            own = 2 * hidden * hidden + 3 * hidden + self.streams.head_parameters(hidden)
            count += self._layer(WINDOW, BIASED) + own
        return count

    def _layer(self, kind: str, router: str) -> int:
        hidden, compressor = self.hidden, self.compressor(kind)
        count = self.attention.parameters(hidden) + 2 * hidden
        count += 2 * self.streams.parameters(hidden)
        count += self.feed.parameters(hidden) + (self.feed.experts if router == BIASED else 0)
        if compressor is not None:
            count += compressor.parameters(hidden, self.attention.size)
        if kind == SPARSE:
            count += self.indexer.parameters(hidden, self.attention.query_rank)
            count += self.sparse.parameters(hidden, self.indexer.size)
        return count

    def linears(self, mtp: bool) -> Linears:
        """What W8A8 makes int8, with or without the draft head."""
        hidden = self.hidden
        layer = self.attention.linears(hidden) + self.feed.linears(hidden)
        count = layer * (len(self.kinds) + mtp) + Linears.head(self.vocab_size, hidden, tied=False)
        count += self.indexer.linears(self.attention.query_rank) * self.kinds.count(SPARSE)
        return count + Linears.of(hidden, hidden, hidden) * mtp


def read_config(config: Mapping[str, object]) -> LatentConfig:
    """Check and translate a config.json.

    Raises:
        ModelError: an entry is missing, of the wrong type or size, or asks for what is not
            supported.
    """
    read = ConfigReader(config)
    _refuse_variants(read)
    layers, rates = read.count("num_hidden_layers"), _rates(read)
    plain, compressed = _ropes(read)
    known = LatentConfig(
        architecture=read.strings("architectures")[0],
        vocab_size=read.count("vocab_size"),
        hidden=read.count("hidden_size"),
        max_positions=read.count("max_position_embeddings"),
        eps=read.number("rms_norm_eps", 1e-6),
        kinds=_kinds(read, config, layers),
        routers=_routers(read, layers),
        attention=_attention(read, plain),
        streams=StreamSizes(
            count=read.count("hc_mult"),
            rounds=read.count("hc_sinkhorn_iters", 20),
            eps=read.number("hc_eps", 1e-6),
        ),
        feed=_feed(read),
        sparse=Compressor(rates["compressed_sparse_attention"], overlapped=True),
        heavy=Compressor(rates["heavily_compressed_attention"], overlapped=False),
        indexer=IndexerSizes(
            heads=read.count("index_n_heads"),
            size=read.count("index_head_dim"),
            chosen=read.count("index_topk"),
        ),
        theta=_theta(plain, read.number("rope_theta", 10000.0)),
        compressed_theta=_theta(compressed, read.number("compress_rope_theta", 160000.0)),
        scaling=_scaling(compressed),
        promises_mtp=read.integer("num_nextn_predict_layers", 0) > 0,
    )
    # Sizes that rope cannot turn are told here, where no weights are needed.
    make_partial_rotary(known.attention.size, known.attention.rotated, known.theta, {})
    if SPARSE in known.kinds:
        make_partial_rotary(known.indexer.size, known.attention.rotated, known.theta, {})
    return known


def _ropes(read: ConfigReader) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """Rope entries of window layers and of the others, wherever the config has them.

    A config may name both kinds, or speak of the compressed kind alone, as `rope_parameters` or as
    `rope_scaling`.
    """
    ropes = read.mapping("rope_parameters")
    if "main" in ropes or "compress" in ropes:
        kinds = ConfigReader(ropes)
        return kinds.mapping("main"), kinds.mapping("compress")
    return {}, ropes or read.mapping("rope_scaling")


def _theta(rope: Mapping[str, object], outside: float) -> float:
    """The base of the frequencies; what stands in the rope's own entries counts."""
    if (theta := ConfigReader(rope).number("rope_theta", outside)) <= 0:
        raise ModelError(f"config.json: rope_theta must be above 0, not {theta}")
    return theta


def _scaling(rope: Mapping[str, object]) -> Mapping[str, object]:
    """The scaling of the compressed kind, which never scales the attention."""
    factor = ConfigReader(rope).number("attention_factor", 1.0)
    if factor != 1.0:
        raise ModelError(f"config.json: attention_factor must be 1.0, not {factor}")
    left_out = ("partial_rotary_factor", "mscale", "mscale_all_dim", "rope_theta")
    kept = {name: value for name, value in rope.items() if name not in left_out}
    if ConfigReader(kept).number("factor", 1.0) <= 0:
        raise ModelError(f"config.json: rope factor must be above 0, not {kept['factor']}")
    return {**kept, "attention_factor": 1.0}


def _refuse_variants(read: ConfigReader) -> None:
    texts = {"hidden_act": "silu", "scoring_func": "sqrtsoftplus"}
    for name, known in texts.items():
        if (value := read.text(name, known)) != known:
            raise ModelError(f"config.json: {name} {value!r} is not supported; known is {known!r}")
    flags = {
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
    }
    for name, wanted in flags.items():
        if read.flag(name, wanted) is not wanted:
            raise ModelError(f"config.json: {name} {not wanted} is not supported, only {wanted}")
    for name in ("num_key_value_heads", "n_shared_experts"):
        if (count := read.integer(name, 1)) != 1:
            raise ModelError(f"config.json: {name} {count} is not supported, only 1")
    if (heads := read.integer("num_nextn_predict_layers", 0)) > 1:
        raise ModelError(
            f"config.json: num_nextn_predict_layers {heads} is not supported; one layer is used "
            "again and again for any depth"
        )


def _kinds(read: ConfigReader, config: Mapping[str, object], layers: int) -> tuple[str, ...]:
    """The kind of each layer: by name, or by its ratio, of which the draft head has one too."""
    named = read.strings("layer_types")
    if named:
        if set(named) - _KINDS.keys() or len(named) < layers:
            raise ModelError(
                f"config.json: layer_types must name {layers} known kinds "
                f"({', '.join(_KINDS)}), not {len(named)} of {sorted(set(named))}"
            )
        return tuple(_KINDS[kind] for kind in named[:layers])
    ratios = config.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < layers:
        raise ModelError(
            f"config.json: layer_types or compress_ratios must tell the kinds of {layers} layers"
        )
    if any(type(ratio) is not int or ratio not in _KINDS_BY_RATIO for ratio in ratios):
        raise ModelError(
            f"config.json: compress_ratios must be of {list(_KINDS_BY_RATIO)}, not {ratios}"
        )
    if any(ratios[layers:]):
        raise ModelError(
            f"config.json: compress_ratios has {ratios[layers:]} for the draft head, "
            "which is supported with a window only (0)"
        )
    return tuple(_KINDS_BY_RATIO[ratio] for ratio in ratios[:layers])


def _routers(read: ConfigReader, layers: int) -> tuple[str, ...]:
    named = read.strings("mlp_layer_types")
    if not named:
        hashed = read.integer("num_hash_layers", read.integer("n_hash_layers", 3))
        if hashed < 0:
            raise ModelError(f"config.json: num_hash_layers must be at least 0, not {hashed}")
        return (HASHED,) * min(hashed, layers) + (BIASED,) * max(0, layers - hashed)
    if set(named) - _ROUTERS.keys() or len(named) < layers:
        raise ModelError(
            f"config.json: mlp_layer_types must name {layers} known kinds "
            f"({', '.join(_ROUTERS)}), not {len(named)} of {sorted(set(named))}"
        )
    return tuple(_ROUTERS[kind] for kind in named[:layers])


def _rates(read: ConfigReader) -> dict[str, int]:
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    given = ConfigReader(read.mapping("compress_rates"))
    short = {"compressed_sparse_attention": "csa", "heavily_compressed_attention": "hca"}
    for kind, default in rates.items():
        rate = read.integer(f"compress_rate_{short[kind]}", default)
        rates[kind] = given.integer(kind, given.integer(short[kind], rate))
        if rates[kind] < 1:
            raise ModelError(f"config.json: {kind} cannot join {rates[kind]} tokens to an entry")
    return rates


def _attention(read: ConfigReader, rope: Mapping[str, object]) -> LatentSizes:
    size, heads = read.count("head_dim"), read.count("num_attention_heads")
    outside = read.number("partial_rotary_factor", 64 / 512)
    share = ConfigReader(rope).number("partial_rotary_factor", outside)
    sizes = LatentSizes(
        heads=heads,
        size=size,
        rotated=read.count("qk_rope_head_dim", round(size * share)),
        query_rank=read.count("q_lora_rank"),
        groups=read.count("o_groups"),
        output_rank=read.count("o_lora_rank"),
        window=read.count("sliding_window"),
    )
    if heads % sizes.groups:
        raise ModelError(f"config.json: {heads} heads cannot form {sizes.groups} o_groups")
    return sizes


def _feed(read: ConfigReader) -> RoutedSizes:
    sizes = RoutedSizes(
        experts=read.count("n_routed_experts"),
        chosen=read.count("num_experts_per_tok"),
        inner=read.count("moe_intermediate_size"),
        scale=read.number("routed_scaling_factor", 1.5),
        limit=read.number("swiglu_limit"),
    )
    if sizes.chosen > sizes.experts:
        raise ModelError(
            f"config.json: a token cannot take {sizes.chosen} of {sizes.experts} experts"
        )
    if sizes.limit <= 0:
        raise ModelError(f"config.json: swiglu_limit must be above 0, not {sizes.limit}")
    return sizes
