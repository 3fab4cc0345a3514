"""Compressed caches and attention over them in the plainest form, one token at a time.

What is computed for a token has shapes that depend on its position alone, so its bits do not depend
on how the work was cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.backend.operands import (
    Compression,
    Entries,
    LatentPages,
    Latents,
    RowLayout,
    check_chosen,
)

_TOGETHER = 1024  # entries whose keys are looked at


class Token(NamedTuple):
    """One token of a step.

    Attributes:
        row: its row.
        place: in the step.
        position: absolute.
    """

    row: int
    place: int
    position: int


def tokens_of(layout: RowLayout) -> Iterator[Token]:
    """All tokens in order."""
    for row, first in enumerate(layout.first):
        for i in range(layout.length(row)):
            yield Token(row, layout.starts[row] + i, first + i)


class PlainLatentRows:
    """The operators of compressed caches, for whichever device the tensors are on."""

    def __init__(self, layout: RowLayout) -> None:
        """Prepare the step `layout`."""
        self.layout = layout

    def compress(self, raw: Tensor, ring: Tensor, pool: Tensor, form: Compression) -> None:
        """See RowOperators."""
        ratio = form.ratio
        for token in tokens_of(self.layout):
            if (token.position + 1) % ratio:
                continue
            begin = token.position + 1 - ratio
            rows = self._positions(raw, ring, token, begin, token.position + 1).float()
            values, scores = rows.chunk(2, dim=1)
            if form.overlapped:
                values, scores = values.chunk(2, dim=1)[1], scores.chunk(2, dim=1)[1]
                if begin:
                    before = self._positions(raw, ring, token, begin - ratio, begin).float()
                    older_values, older_scores = before.chunk(2, dim=1)
                    values = torch.cat((older_values.chunk(2, dim=1)[0], values))
                    scores = torch.cat((older_scores.chunk(2, dim=1)[0], scores))
            entry = (torch.softmax(scores, dim=0) * values).sum(0)
            entry = entry * torch.rsqrt(entry.pow(2).mean() + form.eps) * form.norm.float()
            first, second = entry.chunk(2)
            cos, sin = form.cos[token.place, 0], form.sin[token.place, 0]
            page, offset = divmod(token.position, self.layout.page_tokens)
            placed = entry * cos + torch.cat((second, first)) * sin
            pool[self.layout.tables[token.row][page], offset // ratio] = placed.to(pool.dtype)

    def choose_entries(
        self, q: Tensor, weights: Tensor, pool: Tensor, ratio: int, count: int
    ) -> Tensor:
        """See RowOperators."""
        chosen = torch.full((q.shape[0], count), -1, dtype=torch.long, device=q.device)
        for token in tokens_of(self.layout):
            heads, factors = q[token.place].float(), weights[token.place][:, None]
            scores = [heads.new_empty(0)]
            seen = self._seen(token, ratio)
            for keys in self._keys(pool, token, ratio, seen):
                alike = [(head * keys).sum(-1).relu() for head in heads]
                scores.append((torch.stack(alike) * factors).sum(0))
            order = torch.sort(torch.cat(scores), descending=True, stable=True).indices[:count]
            chosen[token.place, : len(order)] = seen.start + order.sort().values
        return chosen

    def attend_latents(
        self, q: Tensor, latents: Latents, entries: Entries | None, sinks: Tensor, scale: float
    ) -> Tensor:
        """See RowOperators."""
        out, visible_from = torch.empty_like(q), self.layout.visible_from
        for token in tokens_of(self.layout):
            start = max(0, token.position + 1 - latents.window, visible_from[token.row])
            stop = token.position + 1
            keys = self._positions(latents.own, latents.ring, token, start, stop).float()
            if entries is not None:
                seen = _seen(entries, token)
                more = self._entries(entries.pool, token.row, entries.ratio, seen)
                keys = torch.cat((keys, more.float()))
            heads = q[token.place].float() * scale
            scores = torch.stack([(head * keys).sum(-1) for head in heads])
            weights = torch.softmax(torch.cat((scores, sinks.float()[:, None]), dim=1), dim=1)
            mixed = torch.stack([(head[:-1, None] * keys).sum(0) for head in weights])
            out[token.place] = mixed.to(q.dtype)
        return out

    def attend_chosen(
        self, q: Tensor, turned: Tensor, keys: LatentPages, chosen: Tensor | None, scale: float
    ) -> Tensor:
        """See RowOperators."""
        check_chosen(q, chosen)
        out = torch.zeros_like(q)
        for token in tokens_of(self.layout):
            seen: Sequence[int] = self._seen(token, 1)
            if chosen is not None:
                seen = [at for at in chosen[token.place].tolist() if at >= 0]
            if not seen:
                continue
            values = self._entries(keys.values, token.row, 1, seen).float()
            angled = self._entries(keys.turned, token.row, 1, seen).float()
            heads, others = q[token.place].float() * scale, turned[token.place].float() * scale
            alike = [
                (head * values).sum(-1) + (other * angled).sum(-1)
                for head, other in zip(heads, others, strict=True)
            ]
            weights = torch.softmax(torch.stack(alike), dim=1)
            mixed = torch.stack([(head[:, None] * values).sum(0) for head in weights])
            out[token.place] = mixed.to(q.dtype)
        return out

    def _seen(self, token: Token, ratio: int) -> range:
        """Numbers of the entries that a token can see."""
        least = self.layout.visible_from[token.row]
        return range(-(-least // ratio), (token.position + 1) // ratio)

    def _keys(self, pool: Tensor, token: Token, ratio: int, seen: range) -> Iterator[Tensor]:
        """Keys of the entries that a token sees, a few at a time: [n, size] take the memory."""
        for begin in range(0, len(seen), _TOGETHER):
            some = seen[begin : begin + _TOGETHER]
            yield self._entries(pool, token.row, ratio, some).float()

    def _positions(self, own: Tensor, ring: Tensor, token: Token, start: int, stop: int) -> Tensor:
        """What a token's row has at positions [start, stop): [n, width]."""
        first, begins = self.layout.first[token.row], self.layout.starts[token.row]
        slot, capacity = self.layout.slots[token.row], ring.shape[1]
        columns = [position % capacity for position in range(start, min(first, stop))]
        mine = own[begins + max(start, first) - first : begins + max(stop, first) - first]
        return torch.cat((ring[slot, columns].to(own.dtype), mine)) if columns else mine

    def _entries(self, pool: Tensor, row: int, ratio: int, numbers: Sequence[int]) -> Tensor:
        """Entries of a row by number: [n, size]."""
        share, table = self.layout.page_tokens // ratio, self.layout.tables[row]
        pages = [table[number // share] for number in numbers]
        return pool[pages, [number % share for number in numbers]]


def _seen(entries: Entries, token: Token) -> Sequence[int]:
    if entries.chosen is None:
        return range((token.position + 1) // entries.ratio)
    return [entry for entry in entries.chosen[token.place].tolist() if entry >= 0]
