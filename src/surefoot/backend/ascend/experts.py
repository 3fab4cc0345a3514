"""Experts: tokens are sorted by expert, and each expert's go through its weights together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.ascend.linear import swiglu
from surefoot.backend.ascend.vendor import Vendor
from surefoot.backend.plain_streams import total

_JOINT, _SUMS, _ROWS = 2, 0, 0
"""One joint result; groups given by running sums of their sizes; groups of rows."""


@dataclass(frozen=True)
class AscendExperts:
    """Packed experts.

    Attributes:
        gate_up: [E, hidden, 2 inner].
        down: [E, inner, hidden].
        limit: see Backend.pack_gated.
        vendor: computes.
    """

    gate_up: Tensor
    down: Tensor
    limit: float
    vendor: Vendor

    def __call__(self, x: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        """See Experts."""
        if not x.shape[0]:
            return torch.empty_like(x)
        experts, chosen = len(self.gate_up), choice.shape[1]
        # No expert is one past the last, which is outside the active ones.
        wanted = torch.where(choice < 0, experts, choice).int()
        rows, places, ends, _ = self.vendor.npu_moe_init_routing_v2(
            x.contiguous(),
            wanted,
            active_num=wanted.numel(),
            expert_num=experts + 1,
            expert_tokens_num_type=_SUMS,
            expert_tokens_num_flag=True,
            active_expert_range=[0, experts],
        )
        inner = swiglu(self.vendor, self._product(rows, self.gate_up, ends), self.limit)
        out = self._product(inner, self.down, ends)
        # Rows that no expert computed hold anything.
        places = places.long()
        mine = torch.where((places >= 0)[:, None], out[places.clamp(min=0)], 0).float()
        weights = weights.masked_fill(choice < 0, 0)
        parts = mine.view(len(x), chosen, -1) * weights[:, :, None]
        return total(parts.unbind(1)).to(x.dtype)

    def _product(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Each group of rows times its expert's weight."""
        return self.vendor.npu_grouped_matmul(
            [rows],
            [weight],
            group_list=ends,
            split_item=_JOINT,
            group_type=_ROWS,
            group_list_type=_SUMS,
        )[0]
