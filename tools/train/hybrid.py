"""The Qwen3.5 architecture in a form that trains fast on a CPU, under the public tensor names.

Shapes: B sequences, T tokens, D hidden size, H query heads, G key/value heads of full attention;
K and V key and value heads of the gated delta rule. Everything is float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train.delta import gated_delta
from tools.train.network import ModelSizes, Network


@dataclass(frozen=True)
class HybridSizes(ModelSizes):
    """What shapes the model; the names are those of the public config."""

    hidden_size: int = 256
    intermediate_size: int = 704
    layers: str = "LLLFLL"
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 16
    rope_theta: float = 10000.0
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6

    @property
    def key_width(self) -> int:
        """Channels of all key heads of the delta rule."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        """Channels of all value heads of the delta rule."""
        return self.linear_num_value_heads * self.linear_value_head_dim


@dataclass(frozen=True)
class Angles:
    """Cosine and sine of the rotary embedding, [T, rotary_dim] each."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the first components of `x` [B, T, heads, head_dim]."""
        width = self.cos.shape[-1]
        turned, kept = x[..., :width], x[..., width:]
        low, high = turned.chunk(2, dim=-1)
        turned = turned * self.cos[:, None] + torch.cat([-high, low], -1) * self.sin[:, None]
        return torch.cat([turned, kept], -1)


def angles(sizes: HybridSizes, first: int, count: int) -> Angles:
    """Angles of `count` positions from `first` on."""
    exponents = torch.arange(0, sizes.rotary_dim, 2, dtype=torch.float32) / sizes.rotary_dim
    positions = torch.arange(first, first + count, dtype=torch.float32)
    turns = torch.outer(positions, sizes.rope_theta**-exponents).repeat(1, 2)
    return Angles(turns.cos(), turns.sin())


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Norm(nn.Module):
    """Root-mean-square norm whose stored weight is the distance from 1."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * scale * (1 + self.weight)


class GatedNorm(nn.Module):
    """Root-mean-square norm with a plain weight, then times silu of a gate."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * scale * self.weight * F.silu(gate)


class LinearAttention(nn.Module):
    """Short convolution, gated delta rule, gated norm."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.sizes = sizes
        channels = 2 * sizes.key_width + sizes.value_width
        heads, taps = sizes.linear_num_value_heads, sizes.linear_conv_kernel_dim
        self.in_proj_qkv = _linear(sizes.hidden_size, channels)
        self.in_proj_z = _linear(sizes.hidden_size, sizes.value_width)
        self.in_proj_b = _linear(sizes.hidden_size, heads)
        self.in_proj_a = _linear(sizes.hidden_size, heads)
        self.conv1d = nn.Conv1d(channels, channels, taps, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        # Time constants spread over 10 .. 1000 tokens: with one for all, memory starts short.
        steps = torch.empty(heads).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        self.norm = GatedNorm(sizes.linear_value_head_dim, sizes.rms_norm_eps)
        self.out_proj = _linear(sizes.value_width, sizes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        sizes = self.sizes
        mixed = self._convolve(self.in_proj_qkv(x))
        widths = [sizes.key_width, sizes.key_width, sizes.value_width]
        query, key, value = mixed.split(widths, dim=-1)
        query, key = (
            _unit(part.unflatten(-1, (-1, sizes.linear_key_head_dim))) for part in (query, key)
        )
        value = value.unflatten(-1, (-1, sizes.linear_value_head_dim))
        write = self.in_proj_b(x).sigmoid()
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)
        read = gated_delta(query, key, value, decay, write)
        gate = self.in_proj_z(x).unflatten(-1, (-1, sizes.linear_value_head_dim))
        out: Tensor = self.out_proj(self.norm(read, gate).flatten(-2))
        return out

    def _convolve(self, x: Tensor) -> Tensor:
        taps = self.conv1d.weight[:, 0]
        count, width = x.shape[1], taps.shape[1]
        padded = F.pad(x, (0, 0, width - 1, 0))
        out = padded[:, :count] * taps[:, 0]
        for tap in range(1, width):
            out = out + padded[:, tap : tap + count] * taps[:, tap]
        return F.silu(out)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@dataclass
class ChainKeys:
    """What a draft of depth 2 or more attends to besides itself.

    Attributes:
        key, value: [B, H, T, head_dim], of depth 1, computed from the trunk's hidden states;
            row t sees rows up to t.
        own: keys and values of depths 2 and up; row t sees row t of each.
    """

    key: Tensor
    value: Tensor
    own: list[tuple[Tensor, Tensor]]


class FullAttention(nn.Module):
    """Causal attention with normed queries and keys, partial rotation and an output gate."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.num_attention_heads * sizes.head_dim
        shared = sizes.num_key_value_heads * sizes.head_dim
        self.q_proj = _linear(sizes.hidden_size, 2 * width)
        self.k_proj = _linear(sizes.hidden_size, shared)
        self.v_proj = _linear(sizes.hidden_size, shared)
        self.o_proj = _linear(width, sizes.hidden_size)
        self.q_norm = Norm(sizes.head_dim, sizes.rms_norm_eps)
        self.k_norm = Norm(sizes.head_dim, sizes.rms_norm_eps)

    def project(self, x: Tensor, turn: Angles) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values [B, H, T, head_dim] and the gate [B, T, H, head_dim]."""
        size = self.sizes.head_dim
        query, gate = self.q_proj(x).unflatten(-1, (-1, 2 * size)).chunk(2, dim=-1)
        query = turn.rotate(self.q_norm(query))
        key = turn.rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, size))))
        value = self.v_proj(x).unflatten(-1, (-1, size))
        group = self.sizes.num_attention_heads // self.sizes.num_key_value_heads
        key, value = (part.repeat_interleave(group, dim=2) for part in (key, value))
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), gate

    def finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Gate and project `mixed` [B, H, T, head_dim] to [B, T, D]."""
        out: Tensor = self.o_proj((mixed.transpose(1, 2) * gate.sigmoid()).flatten(-2))
        return out

    def forward(self, x: Tensor, turn: Angles) -> Tensor:
        query, key, value, gate = self.project(x, turn)
        return self.finish(F.scaled_dot_product_attention(query, key, value, is_causal=True), gate)

    def forward_chain(
        self, x: Tensor, turn: Angles, seen: ChainKeys | None
    ) -> tuple[Tensor, ChainKeys]:
        """One draft depth; `seen` is what the depths before it left, None at depth 1."""
        query, key, value, gate = self.project(x, turn)
        if seen is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return self.finish(mixed, gate), ChainKeys(key, value, [])
        own = [*seen.own, (key, value)]
        scores = query @ seen.key.transpose(-1, -2)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        chain = [(query * depth_key).sum(-1, keepdim=True) for depth_key, _ in own]
        shares = torch.cat([scores, *chain], -1).mul(self.sizes.head_dim**-0.5).softmax(-1)
        count = scores.shape[-1]
        mixed = shares[..., :count] @ seen.value
        for depth, (_, depth_value) in enumerate(own):
            mixed = mixed + shares[..., count + depth, None] * depth_value
        return self.finish(mixed, gate), ChainKeys(seen.key, seen.value, own)


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.gate_proj = _linear(sizes.hidden_size, sizes.intermediate_size)
        self.up_proj = _linear(sizes.hidden_size, sizes.intermediate_size)
        self.down_proj = _linear(sizes.intermediate_size, sizes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """What all layers share: two norms and the MLP."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.input_layernorm = Norm(sizes.hidden_size, sizes.rms_norm_eps)
        self.post_attention_layernorm = Norm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = GatedMlp(sizes)

    def finish(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LinearBlock(Block):
    """A layer with the gated delta rule."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__(sizes)
        self.linear_attn = LinearAttention(sizes)

    def forward(self, x: Tensor, _turn: Angles) -> Tensor:
        return self.finish(x + self.linear_attn(self.input_layernorm(x)))


class FullBlock(Block):
    """A layer with full attention."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__(sizes)
        self.self_attn = FullAttention(sizes)

    def forward(self, x: Tensor, turn: Angles) -> Tensor:
        return self.finish(x + self.self_attn(self.input_layernorm(x), turn))


class Trunk(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        kinds = {"L": LinearBlock, "F": FullBlock}
        self.layers = nn.ModuleList(kinds[letter](sizes) for letter in sizes.layers)
        self.norm = Norm(sizes.hidden_size, sizes.rms_norm_eps)


class DraftHead(nn.Module):
    """The multi-token-prediction head: one full-attention layer over (next token, hidden)."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = Norm(sizes.hidden_size, sizes.rms_norm_eps)
        self.pre_fc_norm_hidden = Norm(sizes.hidden_size, sizes.rms_norm_eps)
        self.fc = _linear(2 * sizes.hidden_size, sizes.hidden_size)
        self.layers = nn.ModuleList([FullBlock(sizes)])
        self.norm = Norm(sizes.hidden_size, sizes.rms_norm_eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, turn: Angles, seen: ChainKeys | None
    ) -> tuple[Tensor, ChainKeys]:
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(parts, -1))
        layer = self.layers[0]
        assert isinstance(layer, FullBlock)
        mixed, seen = layer.self_attn.forward_chain(layer.input_layernorm(x), turn, seen)
        return self.norm(layer.finish(x + mixed)), seen


class HybridNetwork(Network):
    """Trunk and draft head; embedding and output head are one matrix."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.sizes: HybridSizes = sizes
        self.model = Trunk(sizes)
        self.mtp = DraftHead(sizes)
        shrink = (2 * len(sizes.layers)) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 * (shrink if residual else 1.0))

    def run(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See Network: hidden states [B, T, D] after the final norm."""
        x = self.model.embed_tokens(ids)
        turn = angles(self.sizes, 0, ids.shape[1])
        for layer in self.model.layers:
            x = layer(x, turn)
        return self.model.norm(x), x.new_zeros(())

    def logits(self, hidden: Tensor) -> Tensor:
        """See Network."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def draft_logits(self, state: Tensor) -> Tensor:
        """See Network: the head ends with a norm of its own."""
        return self.logits(state)

    def run_drafts(self, ids: Tensor, hidden: Tensor, depths: int) -> tuple[list[Tensor], Tensor]:
        """See Network: states [B, T - depths, D]."""
        count = ids.shape[1] - depths
        embedded = self.model.embed_tokens(ids)
        current, seen, states = hidden[:, :count], None, []
        for depth in range(1, depths + 1):
            turn = angles(self.sizes, depth - 1, count)
            current, seen = self.mtp(embedded[:, depth : depth + count], current, turn, seen)
            states.append(current)
        return states, hidden.new_zeros(())
