"""Attention over windows and compressed entries, and the entries themselves.

All but the choice of entries is composed: the vendor's operators for it are not in its public
package. What is computed together is bounded by sizes alone, so that steps can be recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.placed import Lines, PlacedRows
from surefoot.backend.ascend.running_softmax import RunningSoftmax
from surefoot.backend.operands import Compression, Entries, LatentPages, Latents

_TOGETHER = 128  # entries that are looked at in one go
_NUMBERS = 1 << 24  # of keys that are gathered in one go, more or less


class LatentRows(PlacedRows):
    """Windows, compressed entries, and attention over both."""

    def compress(self, raw: Tensor, ring: Tensor, pool: Tensor, form: Compression) -> None:
        """See RowOperators; lines of no window write zeros to the sink."""
        ratio, derived = form.ratio, self.derived
        tokens, exists = derived.closing(ratio)
        if not len(tokens):
            return
        reach = ratio * (2 if form.overlapped else 1)
        last = self.places.position.index_select(0, tokens)[:, None]
        at = last - reach + 1 + torch.arange(reach, device=last.device)
        lines = self.lines(self.places.row.index_select(0, tokens), at)
        rows = torch.where((at >= 0)[..., None], lines.entries(raw, ring).float(), 0)
        values, scores = rows.chunk(2, dim=-1)
        scores = scores.masked_fill((at < 0)[..., None], -torch.inf)
        if form.overlapped:
            values, scores = _of_their_window(values, ratio), _of_their_window(scores, ratio)
        entry = (torch.softmax(scores, dim=1) * values).sum(1)
        entry = entry * torch.rsqrt(entry.pow(2).mean(-1, keepdim=True) + form.eps)
        entry = entry * form.norm.float()
        cos, sin = (part.index_select(0, tokens)[:, 0] for part in (form.cos, form.sin))
        first, second = entry.chunk(2, dim=-1)
        entry = entry * cos + torch.cat((second, first), dim=-1) * sin
        places = torch.stack((derived.page, derived.offset // ratio), dim=-1)
        indices = places.index_select(0, tokens).masked_fill(~exists[:, None], 0)
        self.write(pool, indices, torch.where(exists[:, None], entry, 0))

    def choose_entries(
        self, q: Tensor, weights: Tensor, pool: Tensor, ratio: int, count: int
    ) -> Tensor:
        """See RowOperators; which of equal entries is left out is the vendor's choice.

        Rows must see all of their pages, as the capabilities say. Every token is a request of one
        query, since no two see equally many entries in general.
        """
        places = self.places
        if not places.tokens:
            return torch.empty(0, count, dtype=torch.long, device=q.device)
        chosen, _ = self.vendor.npu_lightning_indexer(
            q.to(pool.dtype).contiguous(),
            pool[:, :, None],
            weights.contiguous(),
            actual_seq_lengths_query=torch.arange(
                1, places.tokens + 1, dtype=torch.int32, device=q.device
            ),
            actual_seq_lengths_key=self.reaches(ratio).to(torch.int32),
            block_table=self.derived.tables,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=count,
            sparse_mode=3,
        )
        # Sorted as float32, which is exact up to 2^24 entries and what devices sort fast.
        numbers = chosen[:, 0].float()
        ascending = numbers.masked_fill(numbers < 0, torch.inf).sort(dim=1).values
        return ascending.masked_fill(ascending == torch.inf, -1).long()

    def reaches(self, ratio: int) -> Tensor:
        """How many entries of `ratio` tokens each token sees, [T] int64."""
        reaches: Tensor = (self.places.position + 1) // ratio
        return reaches

    def attend_latents(
        self, q: Tensor, latents: Latents, entries: Entries | None, sinks: Tensor, scale: float
    ) -> Tensor:
        """See RowOperators."""
        out = torch.empty_like(q)
        for some in self._slices(latents.window, q.shape[2]):
            heads = q[some].float() * scale
            softmax = RunningSoftmax(heads, sinks.float().expand(heads.shape[:2]), q.shape[2])
            lines, seen = self._windows(some, latents.window)
            keys = torch.where(seen[..., None], lines.entries(latents.own, latents.ring), 0)
            softmax.see(keys.float(), keys.float(), seen)
            if entries is not None:
                self._see_entries(softmax, some, entries)
            out[some] = softmax.mixed.to(q.dtype)
        return out

    def attend_chosen(
        self, q: Tensor, turned: Tensor, keys: LatentPages, chosen: Tensor | None, scale: float
    ) -> Tensor:
        """See RowOperators; not there, as the capabilities say."""
        raise NotImplementedError("attention over chosen positions is not there yet")

    def window_attention(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        rings: tuple[Tensor, Tensor],
        window: int,
        scale: float,
    ) -> Tensor:
        """See RowOperators."""
        out, count = torch.empty_like(q), kv[0].shape[1]
        for some in self._slices(window, count * q.shape[2]):
            heads = q[some].float().unflatten(1, (count, -1)) * scale
            nothing = torch.full(heads.shape[:3], -torch.inf, device=q.device)
            softmax = RunningSoftmax(heads, nothing, q.shape[2])
            lines, seen = self._windows(some, window)
            keys, values = (
                torch.where(seen[..., None, None], lines.entries(own, ring), 0).float()
                for own, ring in zip(kv, rings, strict=True)
            )
            softmax.see(keys.transpose(1, 2), values.transpose(1, 2), seen[:, None])
            out[some] = softmax.mixed.flatten(1, 2).to(q.dtype)
        return out

    def _slices(self, window: int, width: int) -> list[slice]:
        """Tokens whose keys, `width` numbers each, are looked at together."""
        tokens = self.places.tokens
        some = max(1, _NUMBERS // (max(window, _TOGETHER) * width))
        return [slice(begin, min(begin + some, tokens)) for begin in range(0, tokens, some)]

    def _windows(self, some: slice, window: int) -> tuple[Lines, Tensor]:
        """Positions of the windows of some tokens, and which of them can be seen, [t, window]."""
        places, row = self.places, self.places.row[some]
        at = places.position[some, None] - window + 1 + torch.arange(window, device=row.device)
        least = places.visible_from.index_select(0, row)[:, None]
        return self.lines(row, at), at >= least.clamp(min=0)

    def _see_entries(self, softmax: RunningSoftmax, some: slice, entries: Entries) -> None:
        """Show some tokens the entries that they look at."""
        pool, chosen, ratio = entries.pool, entries.chosen, entries.ratio
        reach = self.reaches(ratio)[some, None]
        count = self.places.most_entries(ratio) if chosen is None else chosen.shape[1]
        tables = self.derived.tables[some]
        for begin in range(0, count, _TOGETHER):
            if chosen is None:
                stop = begin + _TOGETHER
                numbers = torch.arange(begin, stop, device=reach.device).expand(len(reach), -1)
                seen = numbers < reach
            else:
                numbers = _padded(chosen[some, begin : begin + _TOGETHER])
                seen = numbers >= 0
            share = pool.shape[1]
            columns = (numbers // share).clamp(0, tables.shape[1] - 1)
            keys = pool[tables.gather(1, columns).long(), numbers % share]
            keys = torch.where(seen[..., None], keys, 0).float()
            softmax.see(keys, keys, seen)


def _of_their_window(numbers: Tensor, ratio: int) -> Tensor:
    """Of raw rows [M, 2 ratio, 2 size] what is for the later window: [M, 2 ratio, size]."""
    older, newer = numbers.chunk(2, dim=-1)
    return torch.cat((older[:, :ratio], newer[:, ratio:]), dim=1)


def _padded(chosen: Tensor) -> Tensor:
    """Entries [t, n] filled up with -1 to as many as are looked at in one go."""
    return torch.nn.functional.pad(chosen, (0, _TOGETHER - chosen.shape[1]), value=-1)
