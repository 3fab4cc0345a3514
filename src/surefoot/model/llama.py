"""Dense decoders of the Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3.

They differ in biases, in a norm on queries and keys, and in which layers see only a window.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surefoot.backend.operands import Fold, Placing
from surefoot.backend.protocol import Backend, Linear
from surefoot.backend.row_operators import RowOperators
from surefoot.errors import ModelError
from surefoot.model.layers.finite import finite_drafts
from surefoot.model.layers.head import take_head
from surefoot.model.layers.rotary import make_rotary
from surefoot.model.layers.weights import take_linears
from surefoot.model.model import ConfigReader, Description, DraftHead
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec, Held, Paged, Part, Ring
from surefoot.step import Batch
from surefoot.weights.counts import Linears
from surefoot.weights.load import TensorTaker

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_QKV_BIAS_ALWAYS = ("Qwen2ForCausalLM",)
_HEAD_NORMS = ("Qwen3ForCausalLM",)
_WINDOW_SWITCHED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
_EMBEDDING = "model.embed_tokens.weight"

INT8_LINEARS = re.compile(
    r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight"
    r"|lm_head\.weight"
)
"""Names of what W8A8 makes int8."""


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches, named as in the checkpoint's config.json.

    `windows` holds for each layer the positions it sees, or None for all.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    key_heads: int
    head_dim: int
    max_positions: int
    eps: float
    theta: float
    scaling: Mapping[str, object]
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    windows: tuple[int | None, ...]

    @property
    def parameters(self) -> int:
        """How many numbers the weights are."""
        width = (self.heads + 2 * self.key_heads) * self.head_dim
        layer = self.hidden_size * (width + self.heads * self.head_dim)
        layer += 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        layer += self.qkv_bias * width + self.output_bias * self.hidden_size
        layer += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        layer += self.head_norms * 2 * self.head_dim
        table = self.vocab_size * self.hidden_size
        return len(self.windows) * layer + table * (1 if self.tied else 2) + self.hidden_size

    @property
    def linears(self) -> Linears:
        """What W8A8 makes int8."""
        hidden, wide = self.hidden_size, self.intermediate_size
        keys, queries = self.key_heads * self.head_dim, self.heads * self.head_dim
        layer = Linears.of(hidden, queries, keys, keys) + Linears.of(queries, hidden)
        layer += Linears.feed(hidden, wide)
        return layer * len(self.windows) + Linears.head(self.vocab_size, hidden, self.tied)


def read_config(config: Mapping[str, object]) -> LlamaConfig:
    """Check and translate a config.json.

    Raises:
        ModelError: an entry is missing, of the wrong type, or asks for what is not supported.
    """
    read = ConfigReader(config)
    architecture = read.strings("architectures")[0]
    activation = read.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(
            f"config.json: hidden_act {activation!r} is not supported; known is 'silu'"
        )
    heads = read.integer("num_attention_heads")
    key_heads = read.integer("num_key_value_heads", heads)
    hidden = read.integer("hidden_size")
    if heads % key_heads:
        raise ModelError(f"config.json: {heads} attention heads cannot share {key_heads} key heads")
    attention_bias = read.flag("attention_bias", False)
    rope = dict(read.mapping("rope_scaling")) | dict(read.mapping("rope_parameters"))
    theta = read.number("rope_theta", 10000.0) if "rope_theta" not in rope else rope["rope_theta"]
    return LlamaConfig(
        architecture=architecture,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        heads=heads,
        key_heads=key_heads,
        head_dim=read.integer("head_dim", hidden // heads),
        max_positions=read.integer("max_position_embeddings"),
        eps=read.number("rms_norm_eps", 1e-6),
        theta=ConfigReader({"rope_theta": theta}).number("rope_theta"),
        scaling=rope,
        tied=read.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias or architecture in _QKV_BIAS_ALWAYS,
        output_bias=attention_bias,
        mlp_bias=read.flag("mlp_bias", False),
        head_norms=architecture in _HEAD_NORMS,
        windows=_windows(read, architecture),
    )


def _windows(read: ConfigReader, architecture: str) -> tuple[int | None, ...]:
    layers = read.integer("num_hidden_layers")
    # Mistral's config leaves the key out where it means 4096, and writes null where it means none.
    silent = 4096 if architecture == "MistralForCausalLM" and "sliding_window" not in read else 0
    window = read.integer("sliding_window", silent) or None
    if architecture in _WINDOW_SWITCHED and not read.flag("use_sliding_window", False):
        window = None
    kinds = read.strings("layer_types")
    if kinds:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) != layers:
            raise ModelError(
                f"config.json: layer_types must name {layers} known kinds, not {list(kinds)}"
            )
        if window is None and "sliding_attention" in kinds:
            raise ModelError(
                "config.json: layer_types has sliding_attention but there is no sliding_window"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = read.integer("max_window_layers", 28) if architecture in _WINDOW_SWITCHED else 0
    return tuple(window if layer >= first else None for layer in range(layers))


def describe(config: Mapping[str, object], dtype: str, prefix: str) -> Description:
    """What the config tells; cache names start with `prefix`, entries have `dtype`."""
    return _describe(read_config(config), dtype, prefix)


def _describe(config: LlamaConfig, dtype: str, prefix: str) -> Description:
    return Description(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        parameters=config.parameters,
        layers=tuple("full" if window is None else f"window {window}" for window in config.windows),
        caches=_caches(config, dtype, prefix),
        draft_head=None,
        draft_caches=(),
        hidden_shape=(config.hidden_size,),
        linears=config.linears,
    )


def _caches(config: LlamaConfig, dtype: str, prefix: str) -> tuple[CacheSpec, ...]:
    shape = (config.key_heads, config.head_dim)
    parts = (Part("k", shape, dtype), Part("v", shape, dtype))
    caches: list[CacheSpec] = []
    full = sum(window is None for window in config.windows)
    if full:
        caches.append(Paged(prefix + "kv", full, parts))
    for window in {window for window in config.windows if window is not None}:
        layers = sum(other == window for other in config.windows)
        caches.append(Ring(prefix + "window", layers, parts, window, Held(window)))
    return tuple(caches)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention with rotary positions, over pages or over a window."""

    config: LlamaConfig
    qkv: Linear
    output: Linear
    norms: Tensor | None
    window: int | None
    cache: str
    layer: int
    backend: Backend

    norm: Tensor

    def __call__(
        self, stream: Tensor, angles: tuple[Tensor, Tensor], batch: Batch, pools: Pools
    ) -> Tensor:
        """Map the stream [T, hidden] to the stream after attention."""
        config = self.config
        x = self.backend.rms_norm(stream, self.norm, config.eps)
        heads, keys, size = config.heads, config.key_heads, config.head_dim
        fused = finite_drafts(self.qkv(x), batch.tentative, self.backend)
        fused = fused.view(x.shape[0], heads + 2 * keys, size)
        q_and_k, v = fused[:, : heads + keys], fused[:, heads + keys :]
        placing = Placing(self.norms, config.eps, *angles)
        mixed = self._attend(q_and_k, v, placing, batch.rows, pools)
        return self.output.add(mixed.reshape(x.shape[0], heads * size), stream)

    def _attend(
        self, q_and_k: Tensor, v: Tensor, placing: Placing, rows: RowOperators, pools: Pools
    ) -> Tensor:
        scale = 1 / math.sqrt(self.config.head_dim)
        k_cache, v_cache = (pools.layers(self.cache, part)[self.layer] for part in ("k", "v"))
        if self.window is None:
            return rows.attend_pages(q_and_k, v, placing, (k_cache, v_cache), scale)
        if placing.norms is not None:
            q_and_k = self.backend.rms_norm(q_and_k, placing.norms, placing.eps)
        q_and_k = self.backend.rotary(q_and_k, placing.cos, placing.sin)
        q, k = q_and_k.split((self.config.heads, self.config.key_heads), dim=1)
        mixed = rows.window_attention(q, (k, v), (k_cache, v_cache), self.window, scale)
        rows.ring_write(k_cache, k)
        rows.ring_write(v_cache, v)
        return mixed


@dataclass(frozen=True)
class Layer:
    """Attention and a gated feed-forward, each behind a norm and added to the stream."""

    attention: Attention
    gated: Callable[[Tensor], Tensor]
    down: Linear
    norm: Tensor

    def __call__(
        self, x: Tensor, angles: tuple[Tensor, Tensor], batch: Batch, pools: Pools
    ) -> Tensor:
        """Map the stream [T, hidden] to the stream after this layer."""
        x = self.attention(x, angles, batch, pools)
        normed = self.attention.backend.rms_norm(x, self.norm, self.attention.config.eps)
        return self.down.add(self.gated(normed), x)


class LlamaModel:
    """A loaded model of the family."""

    def __init__(
        self, take: TensorTaker, config: Mapping[str, object], backend: Backend, prefix: str
    ) -> None:
        """Take all tensors of the checkpoint and pack them for `backend`.

        Args:
            take: where tensors come from; also says their element type.
            config: the checkpoint's config.json.
            backend: where the model will run.
            prefix: put before the names of its caches.
        """
        self.config = read_config(config)
        self._backend = backend
        self._rotary = make_rotary(self.config.head_dim, self.config.theta, self.config.scaling).on(
            backend
        )
        table = (self.config.vocab_size, self.config.hidden_size)
        embedding = take.take(_EMBEDDING, table)
        self._embedding = embedding.to(backend.device)
        self._layers = [
            _take_layer(take, self.config, backend, i, prefix)
            for i in range(len(self.config.windows))
        ]
        self._norm = take.take("model.norm.weight", (self.config.hidden_size,)).to(backend.device)
        head, tied = take_head(take, _EMBEDDING, embedding, self.config.tied)
        self._head = backend.pack_linear(head, None)
        self.config = replace(self.config, tied=tied)
        dtype = str(take.dtype).removeprefix("torch.")
        self.description = _describe(self.config, dtype, prefix)

    @property
    def draft_head(self) -> DraftHead | None:
        """See Model: the family has none."""
        return None

    def fold(self, folds: Sequence[Fold], pools: Pools) -> None:
        """See Model: there are no recurrent layers."""

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        """See Model."""
        x = self._backend.pick_rows(self._embedding, batch.tokens)
        angles = self._rotary(batch.positions)
        for layer in self._layers:
            x = layer(x, angles, batch, pools)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model."""
        return self._head(self._backend.rms_norm(hidden, self._norm, self.config.eps)).float()


def _take_layer(
    take: TensorTaker, config: LlamaConfig, backend: Backend, index: int, prefix: str
) -> Layer:
    name = f"model.layers.{index}."
    hidden, wide = config.hidden_size, config.intermediate_size
    parts = {f"{name}mlp.{part}_proj": wide for part in ("gate", "up")}
    gate_up = take_linears(take, parts, hidden, config.mlp_bias)
    down = take_linears(take, {name + "mlp.down_proj": hidden}, wide, config.mlp_bias)
    norm = take.take(name + "post_attention_layernorm.weight", (hidden,))
    return Layer(
        attention=_take_attention(take, config, backend, index, prefix),
        gated=backend.pack_gated(*gate_up),
        down=backend.pack_linear(*down),
        norm=norm.to(backend.device),
    )


def _take_attention(
    take: TensorTaker, config: LlamaConfig, backend: Backend, index: int, prefix: str
) -> Attention:
    before = take.take(f"model.layers.{index}.input_layernorm.weight", (config.hidden_size,))
    name = f"model.layers.{index}.self_attn."
    hidden, heads, keys, size = (
        config.hidden_size,
        config.heads,
        config.key_heads,
        config.head_dim,
    )
    take.skip(name + "rotary_emb.inv_freq")
    parts = {f"{name}{part}_proj": n * size for part, n in (("q", heads), ("k", keys), ("v", keys))}
    qkv = take_linears(take, parts, hidden, config.qkv_bias)
    output = take_linears(take, {name + "o_proj": hidden}, heads * size, config.output_bias)
    norms = None
    if config.head_norms:
        q_norm, k_norm = (take.take(f"{name}{part}_norm.weight", (size,)) for part in ("q", "k"))
        norms = torch.cat((q_norm.expand(heads, size), k_norm.expand(keys, size))).to(
            backend.device
        )
    window = config.windows[index]
    return Attention(
        config=config,
        qkv=backend.pack_linear(*qkv),
        output=backend.pack_linear(*output),
        norms=norms,
        window=window,
        cache=prefix + ("kv" if window is None else "window"),
        layer=config.windows[:index].count(window),
        backend=backend,
        norm=before.to(backend.device),
    )
