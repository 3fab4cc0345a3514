"""Norms, positions and attention of DeepSeek V4 in a form that trains fast on a CPU.

Shapes: B sequences, T tokens, D hidden size, H query heads, S head size, W window, E entries.
Everything is float32, and all T tokens are computed at once, without caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train.latent_sizes import LatentSizes

# Instead of minus infinity: a row that sees nothing must not become NaN.
HIDDEN = -1e9


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A product without a bias."""
    return nn.Linear(inputs, outputs, bias=False)


def scale_to_one(x: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square of the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Norm(nn.Module):
    """Root-mean-square norm with a plain weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return scale_to_one(x, self.eps) * self.weight


@dataclass(frozen=True)
class Turn:
    """Rotary angles [T, rotated / 2]: cosine and sine."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def at(positions: Tensor, rotated: int, theta: float) -> Turn:
        """Of positions [T]."""
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        turns = torch.outer(positions.float(), theta**-exponents)
        return Turn(turns.cos(), turns.sin())

    def back(self) -> Turn:
        """The opposite turn."""
        return Turn(self.cos, -self.sin)

    def __call__(self, x: Tensor) -> Tensor:
        """Turn neighbouring pairs of the last components of `x` [B, T, S] or [B, T, H, S]."""
        cos, sin = (part if x.dim() == 3 else part[:, None] for part in (self.cos, self.sin))
        kept, turned = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], -1)
        even, odd = turned[..., ::2], turned[..., 1::2]
        pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
        return torch.cat([kept, pairs.flatten(-2)], -1)


class Compressor(nn.Module):
    """Joins every `ratio` tokens to an entry; with `halves` 2 an entry reads the ones before, too.

    Of the two halves of a product the first counts for the next entry, the second for the own.
    """

    def __init__(self, sizes: LatentSizes, ratio: int, halves: int, size: int) -> None:
        super().__init__()
        self.ratio, self.halves, self.size = ratio, halves, size
        self.rotated, self.theta = sizes.qk_rope_head_dim, sizes.compress_rope_theta
        self.kv_proj = linear(sizes.hidden_size, halves * size)
        self.gate_proj = linear(sizes.hidden_size, halves * size)
        self.position_bias = nn.Parameter(torch.zeros(ratio, halves * size))
        self.kv_norm = Norm(size, sizes.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Entries [B, T // ratio, size] of `x` [B, T, D]."""
        count = x.shape[1] // self.ratio
        whole = x[:, : count * self.ratio]
        windows = (count, self.ratio)
        value = self.kv_proj(whole).unflatten(1, windows)
        score = self.gate_proj(whole).unflatten(1, windows) + self.position_bias
        if self.halves == 2:
            value, score = self._with_earlier(value, 0.0), self._with_earlier(score, HIDDEN)
        joined = (score.softmax(2) * value).sum(2)
        begins = torch.arange(count) * self.ratio
        return Turn.at(begins, self.rotated, self.theta)(self.kv_norm(joined))

    def _with_earlier(self, x: Tensor, before_all: float) -> Tensor:
        """[B, E, 2 ratio, size]: the first halves of the window before, then the own second."""
        first, second = x.chunk(2, dim=-1)
        earlier = F.pad(first, (0, 0, 0, 0, 1, 0), value=before_all)[:, :-1]
        return torch.cat([earlier, second], 2)


def closed(tokens: int, ratio: int) -> Tensor:
    """Which entries each token sees, [T, T // ratio]: those whose last token it is or follows."""
    ends = torch.arange(1, tokens // ratio + 1) * ratio
    return ends <= torch.arange(1, tokens + 1)[:, None]


class Scorer(nn.Module):
    """The weights of the indexer's heads."""

    def __init__(self, sizes: LatentSizes) -> None:
        super().__init__()
        self.weights_proj = linear(sizes.hidden_size, sizes.index_n_heads)


class Indexer(Compressor):
    """Scores entries by keys of its own."""

    def __init__(self, sizes: LatentSizes, ratio: int) -> None:
        super().__init__(sizes, ratio, 2, sizes.index_head_dim)
        self.heads = sizes.index_n_heads
        self.q_b_proj = linear(sizes.q_lora_rank, self.heads * self.size)
        self.scorer = Scorer(sizes)

    def score(self, x: Tensor, low: Tensor, turn: Turn) -> Tensor:
        """Scores [B, T, E] from `x` [B, T, D] and the low-rank queries [B, T, rank]."""
        keys = self(x)
        query = turn(self.q_b_proj(low).unflatten(-1, (self.heads, self.size)))
        weight = self.scorer.weights_proj(x) * (self.heads * self.size) ** -0.5
        fits = torch.einsum("bthd,bed->bthe", query, keys).relu()
        return torch.einsum("bthe,bth->bte", fits, weight)


class SparseCompressor(Compressor):
    """The compressor of sparse layers, and the indexer beside it."""

    def __init__(self, sizes: LatentSizes, ratio: int) -> None:
        super().__init__(sizes, ratio, 2, sizes.head_dim)
        self.indexer = Indexer(sizes, ratio)


@dataclass(frozen=True)
class Chain:
    """What a draft attends to: keys of depth 1, and the keys of its own deeper rows.

    Attributes:
        keys: [B, T, S], of depth 1; row t sees rows up to t.
        own: the same shape, one for each depth from 2 on; row t sees row t of each.
    """

    keys: Tensor
    own: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Entries:
    """Entries [B, E, S] and which of them each token sees, broadcastable to [B, H, T, E]."""

    keys: Tensor
    seen: Tensor


def attend(
    query: Tensor, chain: Chain, entries: Entries | None, sinks: Tensor, window: int
) -> Tensor:
    """Attend with `query` [B, T, H, S] to a window, to entries and to nothing, in one softmax.

    Tokens are taken in blocks of a window, and a block looks at itself and the block before.
    """
    tokens = query.shape[1]
    blocks = -(-tokens // window)
    over = blocks * window - tokens
    wide = F.pad(query, (0, 0, 0, 0, 0, over)).transpose(1, 2) * query.shape[-1] ** -0.5
    keys = F.pad(chain.keys, (0, 0, window, over)).unfold(1, 2 * window, window).transpose(2, 3)
    near = torch.einsum("bhntd,bnkd->bhntk", wide.unflatten(2, (blocks, window)), keys)
    near = near.masked_fill(~_in_window(blocks, window, len(chain.own)), HIDDEN)
    parts = [near.flatten(2, 3)]
    parts += [(wide[:, :, :tokens] * own[:, None]).sum(-1, keepdim=True) for own in chain.own]
    if entries is not None:
        far = torch.einsum("bhtd,bed->bhte", wide[:, :, :tokens], entries.keys)
        parts.append(far.masked_fill(~entries.seen, HIDDEN))
    parts = [part[:, :, :tokens] for part in parts]
    sink = sinks[:, None, None].expand(query.shape[0], -1, tokens, 1)
    shares = torch.cat([*parts, sink], -1).softmax(-1)
    widths = [part.shape[-1] for part in parts]
    near, *others = shares[..., :-1].split(widths, -1)
    blocked = F.pad(near, (0, 0, 0, over)).unflatten(2, (blocks, window))
    mixed = torch.einsum("bhntk,bnkd->bhntd", blocked, keys).flatten(2, 3)[:, :, :tokens]
    for share, own in zip(others, chain.own, strict=False):
        mixed = mixed + share * own[:, None]
    if entries is not None:
        mixed = mixed + others[-1] @ entries.keys[:, None]
    return mixed.transpose(1, 2)


def _in_window(blocks: int, window: int, ahead: int) -> Tensor:
    """[blocks, W, 2 W]: what rows see of their block and the one before, `ahead` positions on."""
    row = torch.arange(window)[:, None]
    key = torch.arange(2 * window)[None] - window
    seen = (key <= row) & (key > row + ahead - window)
    first = (torch.arange(blocks) == 0)[:, None, None]
    return seen & ~(first & (key < 0))


class Attention(nn.Module):
    """Low-rank queries, one shared key that is the value as well, and grouped output."""

    def __init__(self, sizes: LatentSizes, ratio: int) -> None:
        super().__init__()
        self.sizes, self.ratio = sizes, ratio
        hidden, rank, wide = sizes.hidden_size, sizes.q_lora_rank, sizes.heads_width
        self.q_a_proj = linear(hidden, rank)
        self.q_a_norm = Norm(rank, sizes.rms_norm_eps)
        self.q_b_proj = linear(rank, wide)
        self.kv_proj = linear(hidden, sizes.head_dim)
        self.kv_norm = Norm(sizes.head_dim, sizes.rms_norm_eps)
        self.sinks = nn.Parameter(torch.zeros(sizes.num_attention_heads))
        self.o_a_proj = linear(wide // sizes.o_groups, sizes.o_groups * sizes.o_lora_rank)
        self.o_b_proj = linear(sizes.o_groups * sizes.o_lora_rank, hidden)
        if ratio == 4:
            self.compressor: Compressor = SparseCompressor(sizes, ratio)
        elif ratio:
            self.compressor = Compressor(sizes, ratio, 1, sizes.head_dim)

    def forward(self, x: Tensor, first: int, seen: Chain | None) -> tuple[Tensor, Chain, Tensor]:
        """Attend with `x` [B, T, D] at positions from `first` on.

        Returns:
            Output [B, T, D], the chain with the rows of `x` joined to it, and the indexer's loss.
        """
        sizes, tokens = self.sizes, x.shape[1]
        theta = sizes.compress_rope_theta if self.ratio else sizes.rope_theta
        turn = Turn.at(torch.arange(first, first + tokens), sizes.qk_rope_head_dim, theta)
        low = self.q_a_norm(self.q_a_proj(x))
        heads = self.q_b_proj(low).unflatten(-1, (sizes.num_attention_heads, sizes.head_dim))
        query = turn(scale_to_one(heads, sizes.rms_norm_eps))
        key = turn(self.kv_norm(self.kv_proj(x)))
        chain = Chain(key) if seen is None else Chain(seen.keys, (*seen.own, key))
        entries, loss = self._entries(x, low, query, turn)
        mixed = attend(query, chain, entries, self.sinks, sizes.sliding_window)
        return self._finish(turn.back()(mixed)), chain, loss

    def _entries(
        self, x: Tensor, low: Tensor, query: Tensor, turn: Turn
    ) -> tuple[Entries | None, Tensor]:
        nothing = x.new_zeros(())
        if not self.ratio or x.shape[1] < self.ratio:
            return None, nothing
        keys = self.compressor(x)
        seen = closed(x.shape[1], self.ratio)
        if not isinstance(self.compressor, SparseCompressor):
            return Entries(keys, seen), nothing
        # The indexer learns to name what attention would look at, and moves nothing else.
        scores = self.compressor.indexer.score(x.detach(), low.detach(), turn)
        scores = scores.masked_fill(~seen, HIDDEN)
        loss = _index_loss(scores, query.detach(), keys.detach(), seen)
        chosen = scores.topk(min(self.sizes.index_topk, scores.shape[-1]), -1).indices
        picked = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, value=True)
        return Entries(keys, (picked & seen)[:, None]), loss

    def _finish(self, mixed: Tensor) -> Tensor:
        groups = mixed.flatten(2).unflatten(-1, (self.sizes.o_groups, -1))
        weight = self.o_a_proj.weight.unflatten(0, (self.sizes.o_groups, -1))
        out: Tensor = self.o_b_proj(torch.einsum("btgi,gri->btgr", groups, weight).flatten(2))
        return out


def _index_loss(scores: Tensor, query: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """Cross-entropy of the indexer's distribution over entries against attention's, mean of T."""
    fits = torch.einsum("bthd,bed->bhte", query, keys) * query.shape[-1] ** -0.5
    wanted = fits.masked_fill(~seen, HIDDEN).softmax(-1).mean(1)
    missed: Tensor = (wanted * scores.log_softmax(-1)).sum(-1) * seen.any(-1)
    return -missed.mean()
