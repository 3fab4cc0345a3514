"""The choice of entries, and attention over chosen positions, by the vendor's operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.backend.ascend.placed import PlacedRows
from surefoot.backend.operands import LatentPages, check_chosen

_LATENT_MODE = 2
"""Of the attention operator: keys and values are the same memory, and a part of keys is turned."""


class ChosenRows(PlacedRows):
    """Indexers, and attention that looks where they say."""

    def choose_entries(
        self, q: Tensor, weights: Tensor, pool: Tensor, ratio: int, count: int
    ) -> Tensor:
        """See RowOperators; which of equal entries is left out is the vendor's choice.

        Every token is a request of one query, since no two see equally many entries in general.
        """
        places = self.places
        if not places.tokens:
            return torch.empty(0, count, dtype=torch.long, device=q.device)
        reaches, tables = self.reaches(ratio), self.derived.tables
        unseen = torch.zeros_like(reaches)
        if places.bounded:
            unseen = self.derived.of_rows(self._unseen(ratio))
            reaches = (reaches - unseen).clamp(min=0)
            pool, tables = self._moved_up(pool, ratio)
        chosen, _ = self.vendor.npu_lightning_indexer(
            q.to(pool.dtype).contiguous(),
            pool[:, :, None],
            weights.contiguous(),
            actual_seq_lengths_query=torch.arange(
                1, places.tokens + 1, dtype=torch.int32, device=q.device
            ),
            actual_seq_lengths_key=reaches.to(torch.int32),
            block_table=tables,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=count,
            sparse_mode=3,
        )
        # Sorted as float32, which is exact up to 2^24 entries and what devices sort fast.
        numbers = chosen[:, 0].float()
        ascending = numbers.masked_fill(numbers < 0, torch.inf).sort(dim=1).values
        none = ascending == torch.inf
        return (ascending.masked_fill(none, 0).long() + unseen[:, None]).masked_fill(none, -1)

    def reaches(self, ratio: int) -> Tensor:
        """How many entries of `ratio` tokens each token could see from the first on, [T] int64."""
        reaches: Tensor = (self.places.position + 1) // ratio
        return reaches

    def _unseen(self, ratio: int) -> Tensor:
        """How many first entries begin below what each row may see, [B] int64."""
        unseen: Tensor = (self.places.visible_from + ratio - 1) // ratio
        return unseen

    def _moved_up(self, pool: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        """Pages on which each row's entries begin with the first that it may see.

        The operator has no bound from below, and no key has the least score for all queries. So the
        entries of the step's rows are copied, all that a table may hold.

        Returns:
            The pages, and for each token the table of its row in them, [T, C] int32.
        """
        places, share = self.places, pool.shape[1]
        rows, columns = places.tables.shape
        numbers = self._unseen(ratio)[:, None] + torch.arange(columns * share, device=pool.device)
        # What comes behind the last entry is not looked at.
        pages = places.tables.gather(1, (numbers // share).clamp(max=columns - 1)).long()
        moved = pool[pages, numbers % share].view(rows * columns, *pool.shape[1:])
        table = torch.arange(rows * columns, dtype=torch.int32, device=pool.device)
        return moved, table.view(rows, columns).index_select(0, places.row)

    def attend_chosen(
        self, q: Tensor, turned: Tensor, keys: LatentPages, chosen: Tensor | None, scale: float
    ) -> Tensor:
        """See RowOperators. Tokens of padding choose nothing, whatever comes for them."""
        check_chosen(q, chosen)
        places, derived = self.places, self.derived
        if not places.tokens:
            return torch.empty_like(q)
        heads = q.shape[1]
        wide = _in_a_power_of_two(heads) - heads
        looked_at = self._all_seen() if chosen is None else chosen
        looked_at = looked_at.masked_fill(derived.padding[:, None], -1)
        values = keys.values[:, :, None]
        out, _, _ = self.vendor.npu_sparse_flash_attention(
            F.pad(q, (0, 0, 0, wide)).contiguous(),
            values,
            values,
            looked_at[:, None].to(torch.int32),
            scale,
            block_table=places.tables,
            actual_seq_lengths_query=derived.ends,
            actual_seq_lengths_kv=derived.lengths,
            query_rope=F.pad(turned, (0, 0, 0, wide)).contiguous(),
            key_rope=keys.turned[:, :, None],
            sparse_block_size=1,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=3,
            attention_mode=_LATENT_MODE,
        )
        # What the operator gives where nothing is looked at is not defined.
        return out[:, :heads].masked_fill(looked_at[:, :1, None] < 0, 0)

    def _all_seen(self) -> Tensor:
        """The positions that each token sees, ascending, then -1: [T, n] int64."""
        places = self.places
        seen = self.derived.of_rows(places.visible_from)[:, None]
        seen = seen + torch.arange(max(1, places.most_entries(1)), device=places.device)
        return seen.masked_fill(seen > places.position[:, None], -1)


def _in_a_power_of_two(heads: int) -> int:
    """The least number of heads that the attention operator takes."""
    return 1 << (heads - 1).bit_length()
