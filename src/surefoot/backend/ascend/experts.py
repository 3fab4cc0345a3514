"""Experts: tokens are sorted by expert, and each expert's go through its weights together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from surefoot.backend.ascend.linear import swiglu
from surefoot.backend.ascend.vendor import Vendor
from surefoot.backend.plain_streams import total

JOINT, SUMS, ROWS = 2, 0, 0
"""One joint result; groups given by running sums of their sizes; groups of rows."""


class Groups(Protocol):
    """Weights of all experts for one product."""

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Each group of rows times its expert's weight.

        Args:
            rows: [n, inputs]; those behind the last group hold anything.
            ends: [E] int64, where each group ends.

        Returns:
            [n, outputs], likewise.
        """
        ...


@dataclass(frozen=True)
class FloatGroups:
    """Weights [E, inputs, outputs] in the model's element type."""

    values: Tensor
    vendor: Vendor

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """See Groups."""
        return self.vendor.npu_grouped_matmul(
            [rows],
            [self.values],
            group_list=ends,
            split_item=JOINT,
            group_type=ROWS,
            group_list_type=SUMS,
        )[0]


@dataclass(frozen=True)
class AscendExperts:
    """Packed experts.

    Attributes:
        count: E.
        gate_up: hidden to 2 inner.
        down: inner to hidden.
        limit: see Backend.pack_gated.
        vendor: computes.
    """

    count: int
    gate_up: Groups
    down: Groups
    limit: float
    vendor: Vendor

    def __call__(self, x: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
        """See Experts."""
        if not x.shape[0]:
            return torch.empty_like(x)
        # No expert is one past the last, which is outside the active ones.
        wanted = torch.where(choice < 0, self.count, choice).int()
        rows, places, ends, _ = self.vendor.npu_moe_init_routing_v2(
            x.contiguous(),
            wanted,
            active_num=wanted.numel(),
            expert_num=self.count + 1,
            expert_tokens_num_type=SUMS,
            expert_tokens_num_flag=True,
            active_expert_range=[0, self.count],
        )
        inner = swiglu(self.vendor, self.gate_up(rows, ends), self.limit)
        out = self.down(inner, ends)
        # Rows that no expert computed hold anything.
        places = places.long()
        mine = torch.where((places >= 0)[:, None], out[places.clamp(min=0)], 0).float()
        weights = weights.masked_fill(choice < 0, 0)
        parts = mine.view(len(x), choice.shape[1], -1) * weights[:, :, None]
        return total(parts.unbind(1)).to(x.dtype)
