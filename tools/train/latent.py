"""The DeepSeek V4 architecture with its draft head, under the public tensor names.

Shapes: B sequences, T tokens, D hidden size, n streams. Everything is float32.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tools.train.latent_experts import Feed
from tools.train.latent_layers import Attention, Chain, Norm, linear
from tools.train.latent_sizes import LatentSizes
from tools.train.latent_streams import HyperConnection, StreamHead
from tools.train.network import Network


class Block(nn.Module):
    """Attention and experts, each with its hyper-connection and a norm before."""

    def __init__(self, sizes: LatentSizes, ratio: int, *, hashed: bool, place: int) -> None:
        super().__init__()
        self.attn_hc = HyperConnection(sizes, 2 * place)
        self.input_layernorm = Norm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = Attention(sizes, ratio)
        self.ffn_hc = HyperConnection(sizes, 2 * place + 1)
        self.post_attention_layernorm = Norm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = Feed(sizes, hashed)

    def forward(
        self, streams: Tensor, ids: Tensor, first: int = 0, seen: Chain | None = None
    ) -> tuple[Tensor, Chain, Tensor]:
        """Map streams [B, T, n, D] at positions from `first` on; see Attention for the rest."""
        x, *rest = self.attn_hc.read(streams)
        out, chain, index_loss = self.self_attn(self.input_layernorm(x), first, seen)
        streams = self.attn_hc.write(streams, out, *rest)
        x, *rest = self.ffn_hc.read(streams)
        out, feed_loss = self.mlp(self.post_attention_layernorm(x), ids)
        return self.ffn_hc.write(streams, out, *rest), chain, index_loss + feed_loss


class Trunk(nn.Module):
    """Embedding, layers, what joins the streams, and the final norm."""

    def __init__(self, sizes: LatentSizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(
            Block(sizes, ratio, hashed=place < sizes.num_hash_layers, place=place)
            for place, ratio in enumerate(sizes.compress_ratios)
        )
        self.hc_head = StreamHead(sizes)
        self.norm = Norm(sizes.hidden_size, sizes.rms_norm_eps)


class HeadBlock(Block):
    """The draft head: one layer with a window that reads the next token and the streams."""

    def __init__(self, sizes: LatentSizes) -> None:
        super().__init__(sizes, 0, hashed=False, place=0)
        self.enorm = Norm(sizes.hidden_size, sizes.rms_norm_eps)
        self.hnorm = Norm(sizes.hidden_size, sizes.rms_norm_eps)
        self.e_proj = linear(sizes.hidden_size, sizes.hidden_size)
        self.h_proj = linear(sizes.hidden_size, sizes.hidden_size)
        self.hc_head = StreamHead(sizes)
        self.norm = Norm(sizes.hidden_size, sizes.rms_norm_eps)

    def join(self, embedded: Tensor, streams: Tensor) -> Tensor:
        """Streams [B, T, n, D] of the next token's embedding and the streams before it."""
        token: Tensor = self.e_proj(self.enorm(embedded))[:, :, None]
        read: Tensor = self.h_proj(self.hnorm(streams))
        return token + read


class LatentNetwork(Network):
    """Trunk and draft head; see Network. Hidden states are streams [B, T, n, D]."""

    def __init__(self, sizes: LatentSizes) -> None:
        super().__init__()
        self.sizes: LatentSizes = sizes
        self.model = Trunk(sizes)
        self.lm_head = linear(sizes.hidden_size, sizes.vocab_size)
        self.mtp = nn.ModuleList([HeadBlock(sizes)])
        shrink = (2 * len(sizes.compress_ratios)) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 and "hc" not in name and "position_bias" not in name:
                residual = "o_b_proj" in name or "down_proj" in name
                nn.init.normal_(parameter, std=0.02 * (shrink if residual else 1.0))

    def run(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """See Network."""
        token = self.model.embed_tokens(ids)[:, :, None]
        streams: Tensor = token.expand(-1, -1, self.sizes.hc_mult, -1)
        side = token.new_zeros(())
        for layer in self.model.layers:
            streams, _, loss = layer(streams, ids)
            side = side + loss
        return streams, side

    def logits(self, hidden: Tensor) -> Tensor:
        """See Network."""
        return F.linear(self.model.norm(self.model.hc_head(hidden)), self.lm_head.weight)

    def run_drafts(self, ids: Tensor, hidden: Tensor, depths: int) -> tuple[list[Tensor], Tensor]:
        """See Network."""
        count = ids.shape[1] - depths
        embedded = self.model.embed_tokens(ids)
        head = self._head
        streams, states = hidden[:, :count], []
        chain: Chain | None = None
        side = hidden.new_zeros(())
        for depth in range(1, depths + 1):
            tokens = slice(depth, depth + count)
            joined = head.join(embedded[:, tokens], streams)
            streams, chain, loss = head(joined, ids[:, tokens], depth - 1, chain)
            side = side + loss
            states.append(streams)
        return states, side

    def draft_logits(self, state: Tensor) -> Tensor:
        """See Network."""
        head = self._head
        return F.linear(head.norm(head.hc_head(state)), self.lm_head.weight)

    @property
    def _head(self) -> HeadBlock:
        head = self.mtp[0]
        assert isinstance(head, HeadBlock)
        return head
