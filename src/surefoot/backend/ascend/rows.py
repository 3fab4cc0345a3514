"""Row operators on pages and rings; recurrence and compressed caches come from their own files."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.convolution import causal_conv
from surefoot.backend.ascend.delta import delta_rule
from surefoot.backend.ascend.heads import placed
from surefoot.backend.ascend.latents import LatentRows
from surefoot.backend.ascend.places import Places
from surefoot.backend.ascend.vendor import Vendor
from surefoot.backend.operands import DeltaCaches, DeltaInputs, Placing

_PACKED_SIZE = 128
"""Of heads that the packed form of attention takes, if there are fewer key than query heads."""

CAUSAL_MASK = 2048
"""Side of the triangle that the vendor's operator wants for causal attention of any length."""


class AscendRows(LatentRows):
    """Cache writes, attention and recurrence of one step.

    Attributes:
        host_lists: lists of the host that its attention took, by keyword; a recording of it needs
            them anew for each replay.
    """

    def __init__(self, places: Places, vendor: Vendor, triangle: Tensor) -> None:
        """Serve the rows of `places`; `triangle` is bool, true above the diagonal."""
        super().__init__(places, vendor)
        self._triangle = triangle
        self.host_lists: dict[str, list[int]] = {}

    def paged_write(self, pool: Tensor, entries: Tensor) -> None:
        """See RowOperators."""
        if not self.places.tokens:
            return
        page, offset = self.derived.page, self.derived.offset
        if lead := pool.shape[1:-2]:
            heads = torch.arange(lead.numel(), device=page.device).expand(len(page), -1)
            page, offset = (each[:, None].expand_as(heads) for each in (page, offset))
            indices = torch.stack((page, heads, offset), dim=-1)
            self.write(pool.flatten(1, -3), indices, entries.flatten(1, -2))
        else:
            self.write(pool, torch.stack((page, offset), dim=-1), entries)

    def paged_attention(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float) -> Tensor:
        """See RowOperators."""
        if not self.places.tokens:
            return torch.empty_like(q)
        packed = q.shape[2] == _PACKED_SIZE and q.shape[1] != k_pool.shape[1]
        if self.places.bounded or not packed:
            return self._token_by_token(q, k_pool, v_pool, scale)
        places = self.places
        self.host_lists = {
            "actual_seq_lengths": places.ends,
            "actual_seq_lengths_kv": places.lengths,
        }
        return self.vendor.npu_fused_infer_attention_score(
            q.contiguous(),
            k_pool,
            v_pool,
            atten_mask=self._triangle,
            **self.host_lists,
            block_table=places.tables,
            num_heads=q.shape[1],
            num_key_value_heads=k_pool.shape[1],
            scale=scale,
            input_layout="TND",
            sparse_mode=3,
            block_size=places.page_tokens,
        )[0]

    def _token_by_token(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float) -> Tensor:
        """Every token as a request of its own.

        The packed form takes heads of one size only, and no bound from below.
        """
        places, derived = self.places, self.derived
        self.host_lists = {"actual_seq_lengths_kv": places.reaches}
        out = self.vendor.npu_fused_infer_attention_score(
            q[:, :, None].contiguous(),
            k_pool,
            v_pool,
            atten_mask=self._hidden() if places.bounded else None,
            **self.host_lists,
            block_table=derived.tables,
            num_heads=q.shape[1],
            num_key_value_heads=k_pool.shape[1],
            scale=scale,
            input_layout="BNSD",
            sparse_mode=0,
            block_size=places.page_tokens,
        )[0]
        return out[:, :, 0]

    def _hidden(self) -> Tensor:
        """[T, 1, 1, positions] bool, true for what a row may not see from below."""
        columns = self.derived.tables.shape[1] * self.places.page_tokens
        every = torch.arange(columns, device=self.places.device)
        return (every < self.derived.of_rows(self.places.visible_from)[:, None])[:, None, None]

    def attend_pages(
        self,
        q_and_k: Tensor,
        v: Tensor,
        placing: Placing,
        pools: tuple[Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        """See RowOperators."""
        heads = q_and_k.shape[1] - v.shape[1]
        x = placed(self.vendor, q_and_k, placing)
        self.paged_write(pools[0], x[:, heads:])
        self.paged_write(pools[1], v)
        return self.paged_attention(x[:, :heads], *pools, scale)

    def causal_conv(self, x: Tensor, ring: Tensor, weight: Tensor) -> Tensor:
        """See RowOperators."""
        return causal_conv(self, x, ring, weight)

    def delta_rule(self, inputs: DeltaInputs, caches: DeltaCaches) -> Tensor:
        """See RowOperators."""
        return delta_rule(self, inputs, caches)
