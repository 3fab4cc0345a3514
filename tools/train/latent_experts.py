"""DeepSeek V4's routed experts, and the shared one beside them.

Shapes: B sequences, T tokens, D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train.latent_layers import linear
from tools.train.latent_sizes import LatentSizes


class Router(nn.Module):
    """Scores experts; a hashed one takes those of its table, another the best with its bias."""

    def __init__(self, sizes: LatentSizes, hashed: bool) -> None:
        super().__init__()
        self.sizes, self.hashed = sizes, hashed
        self.weight = nn.Parameter(torch.empty(sizes.n_routed_experts, sizes.hidden_size))
        nn.init.normal_(self.weight, std=0.02)
        if hashed:
            keys = torch.rand(sizes.vocab_size, sizes.n_routed_experts)
            table = keys.argsort(dim=1)[:, : sizes.num_experts_per_tok].contiguous()
            self.register_buffer("tid2eid", table)
        else:
            self.e_score_correction_bias = nn.Parameter(torch.zeros(sizes.n_routed_experts))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [B, T, experts], 0 for all but the chosen, and the loss that balances loads."""
        scores = F.softplus(x @ self.weight.T).sqrt()
        if self.hashed:
            assert isinstance(self.tid2eid, Tensor)
            chosen = self.tid2eid[ids]
        else:
            biased = (scores + self.e_score_correction_bias).detach()
            chosen = biased.topk(self.sizes.num_experts_per_tok, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        taken = scores * mask
        weights = taken / (taken.sum(-1, keepdim=True) + 1e-20) * self.sizes.routed_scaling_factor
        if self.hashed:
            return weights, x.new_zeros(())
        # A bias changes choices only. The gradient given to it is how far its load is off.
        load = mask.mean((0, 1))
        return weights, (self.e_score_correction_bias * (load - load.mean())).sum()


class Experts(nn.Module):
    """The routed experts' weights, stacked."""

    def __init__(self, sizes: LatentSizes) -> None:
        super().__init__()
        count, inner, hidden = (
            sizes.n_routed_experts,
            sizes.moe_intermediate_size,
            sizes.hidden_size,
        )
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))


class SharedExpert(nn.Module):
    """The expert that every token takes."""

    def __init__(self, sizes: LatentSizes) -> None:
        super().__init__()
        self.limit = sizes.swiglu_limit
        self.gate_proj = linear(sizes.hidden_size, sizes.moe_intermediate_size)
        self.up_proj = linear(sizes.hidden_size, sizes.moe_intermediate_size)
        self.down_proj = linear(sizes.moe_intermediate_size, sizes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.limit))
        return out


def gated(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(gate) * up, with the gate limited from above and the other on both sides."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class Feed(nn.Module):
    """Routed experts and the shared one."""

    def __init__(self, sizes: LatentSizes, hashed: bool) -> None:
        super().__init__()
        self.limit = sizes.swiglu_limit
        self.gate = Router(sizes, hashed)
        self.experts = Experts(sizes)
        self.shared_experts = SharedExpert(sizes)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Output [B, T, D] and the router's loss."""
        weights, loss = self.gate(x, ids)
        # All experts for all tokens: for a few small ones, that is faster than sorting tokens.
        both = torch.einsum("btd,eid->btei", x, self.experts.gate_up_proj)
        gate, up = both.chunk(2, dim=-1)
        inner = gated(gate, up, self.limit) * weights[..., None]
        out = torch.einsum("btei,edi->btd", inner, self.experts.down_proj)
        return out + self.shared_experts(x), loss
