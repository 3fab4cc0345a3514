"""Row operators in the plainest form: loops over rows, tokens and positions."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.operands import DeltaCaches, DeltaInputs, Placing
from surefoot.backend.plain_latents import PlainLatentRows, tokens_of
from surefoot.backend.reference_delta import delta_rows


class ReferenceRows(PlainLatentRows):
    """Operators of one step, written as loops over rows and tokens."""

    def paged_write(self, pool: Tensor, entries: Tensor) -> None:
        """See RowOperators."""
        for row, token, position in tokens_of(self.layout):
            page, offset = divmod(position, self.layout.page_tokens)
            pool[self.layout.tables[row][page]].select(-2, offset).copy_(entries[token])

    def paged_attention(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float) -> Tensor:
        """See RowOperators."""
        out = torch.empty_like(q)
        for row, token, position in tokens_of(self.layout):
            start = self.layout.visible_from[row]
            k = self._history(k_pool, row, start, position + 1)
            v = self._history(v_pool, row, start, position + 1)
            out[token] = _attend(q[token], k, v, scale)
        return out

    def attend_pages(
        self,
        q_and_k: Tensor,
        v: Tensor,
        placing: Placing,
        pools: tuple[Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        """See RowOperators."""
        x, heads = q_and_k, q_and_k.shape[1] - v.shape[1]
        if placing.norms is not None:
            size = x.pow(2).mean(-1, keepdim=True)
            x = x * torch.rsqrt(size + placing.eps) * placing.norms
        first, second = x.chunk(2, dim=-1)
        x = x * placing.cos + torch.cat((second, first), dim=-1) * placing.sin
        self.paged_write(pools[0], x[:, heads:])
        self.paged_write(pools[1], v)
        return self.paged_attention(x[:, :heads], *pools, scale)

    def ring_write(self, ring: Tensor, entries: Tensor) -> None:
        """See RowOperators."""
        capacity = ring.shape[1]
        for row, token, position in tokens_of(self.layout):
            last = self.layout.first[row] + self.layout.length(row) - 1
            if position > last - capacity:
                ring[self.layout.slots[row], position % capacity] = entries[token]

    def window_attention(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        rings: tuple[Tensor, Tensor],
        window: int,
        scale: float,
    ) -> Tensor:
        """See RowOperators."""
        out = torch.empty_like(q)
        for row, token, position in tokens_of(self.layout):
            start = max(0, position - window + 1, self.layout.visible_from[row])
            k, v = (
                self._window(own, ring, row, start, position + 1)
                for own, ring in zip(kv, rings, strict=True)
            )
            out[token] = _attend(q[token], k, v, scale)
        return out

    def causal_conv(self, x: Tensor, ring: Tensor, weight: Tensor) -> Tensor:
        """See RowOperators."""
        out, taps = torch.empty_like(x), weight.shape[1]
        for row, token, position in tokens_of(self.layout):
            total = torch.zeros(x.shape[1])
            for tap in range(taps):
                at = position - taps + 1 + tap
                if at >= 0:
                    total = total + weight[:, tap] * self._entry(x, ring, row, at).float()
            out[token] = total / (1 + torch.exp(-total))
        return out

    def delta_rule(self, inputs: DeltaInputs, caches: DeltaCaches) -> Tensor:
        """See RowOperators."""
        return delta_rows(self.layout, inputs, caches)

    def _entry(self, own: Tensor, ring: Tensor, row: int, position: int) -> Tensor:
        """What a row has at a position: of the step, or of the ring before its first token."""
        first = self.layout.first[row]
        if position >= first:
            return own[self.layout.starts[row] + position - first]
        return ring[self.layout.slots[row], position % ring.shape[1]]

    def _history(self, pool: Tensor, row: int, start: int, stop: int) -> Tensor:
        """Entries of positions [start, stop) of one row: [stop - start, K, D]."""
        pages, table = self.layout.page_tokens, self.layout.tables[row]
        entries = [pool[table[p // pages]].select(-2, p % pages) for p in range(start, stop)]
        return torch.stack(entries)

    def _window(self, own: Tensor, ring: Tensor, row: int, start: int, stop: int) -> Tensor:
        return torch.stack([self._entry(own, ring, row, p) for p in range(start, stop)])


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Softmax attention of one token: q [H, D] over k, v [S, K, D]; returns [H, D]."""
    group = q.shape[0] // k.shape[1]
    k = k.float().repeat_interleave(group, dim=1)
    v = v.float().repeat_interleave(group, dim=1)
    scores = (q.float()[None] * k).sum(-1) * scale
    weights = torch.softmax(scores, dim=0)
    return (weights[..., None] * v).sum(0).to(q.dtype)
