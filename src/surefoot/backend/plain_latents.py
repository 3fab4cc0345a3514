"""Compressed caches and attention over them in the plainest form, one token at a time.

What is computed for a token has shapes that depend on its position alone, so its bits do not depend
on how the work was cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.operands import Compression, Entries, Latents, RowLayout


@dataclass(frozen=True)
class Token:
    """One token of a step.

    Attributes:
        row: its row.
        index: its place in the step.
        position: absolute.
    """

    row: int
    index: int
    position: int


def tokens_of(layout: RowLayout) -> Iterator[Token]:
    """All tokens in order."""
    for row, first in enumerate(layout.first):
        for i in range(layout.length(row)):
            yield Token(row, layout.starts[row] + i, first + i)


def compress(layout: RowLayout, raw: Tensor, ring: Tensor, pool: Tensor, form: Compression) -> None:
    """See RowOperators.compress."""
    ratio = form.ratio
    for token in tokens_of(layout):
        if (token.position + 1) % ratio:
            continue
        begin = token.position + 1 - ratio
        rows = _positions(layout, raw, ring, token, begin, token.position + 1).float()
        values, scores = rows.chunk(2, dim=1)
        if form.overlapped:
            values, scores = values.chunk(2, dim=1)[1], scores.chunk(2, dim=1)[1]
            if begin:
                before = _positions(layout, raw, ring, token, begin - ratio, begin).float()
                older_values, older_scores = before.chunk(2, dim=1)
                values = torch.cat((older_values.chunk(2, dim=1)[0], values))
                scores = torch.cat((older_scores.chunk(2, dim=1)[0], scores))
        entry = (torch.softmax(scores, dim=0) * values).sum(0)
        entry = entry * torch.rsqrt(entry.pow(2).mean() + form.eps) * form.norm.float()
        first, second = entry.chunk(2)
        cos, sin = form.cos[token.index, 0], form.sin[token.index, 0]
        page, offset = divmod(token.position, layout.page_tokens)
        placed = entry * cos + torch.cat((second, first)) * sin
        pool[layout.tables[token.row][page], offset // ratio] = placed.to(pool.dtype)


def choose_entries(
    layout: RowLayout, q: Tensor, weights: Tensor, pool: Tensor, keep: tuple[int, int]
) -> Tensor:
    """See RowOperators.choose_entries; `keep` is the ratio and the count."""
    ratio, count = keep
    chosen = torch.full((q.shape[0], count), -1, dtype=torch.long, device=q.device)
    for token in tokens_of(layout):
        seen = (token.position + 1) // ratio
        keys = _entries(layout, pool, token.row, ratio, range(seen)).float()
        # Head by head, so that memory grows with the entries alone.
        alike = [(head * keys).sum(-1).relu() for head in q[token.index].float()]
        scores = (torch.stack(alike) * weights[token.index][:, None]).sum(0)
        order = torch.sort(scores, descending=True, stable=True).indices[:count]
        chosen[token.index, : len(order)] = order.sort().values
    return chosen


def attend_latents(
    layout: RowLayout,
    q: Tensor,
    latents: Latents,
    entries: Entries | None,
    sinks: Tensor,
    scale: float,
) -> Tensor:
    """See RowOperators.attend_latents."""
    out = torch.empty_like(q)
    for token in tokens_of(layout):
        start = max(0, token.position + 1 - latents.window, layout.visible_from[token.row])
        stop = token.position + 1
        keys = _positions(layout, latents.own, latents.ring, token, start, stop).float()
        if entries is not None:
            seen = _seen(entries, token)
            more = _entries(layout, entries.pool, token.row, entries.ratio, seen)
            keys = torch.cat((keys, more.float()))
        scores = torch.stack([(head * keys).sum(-1) for head in q[token.index].float() * scale])
        weights = torch.softmax(torch.cat((scores, sinks.float()[:, None]), dim=1), dim=1)
        mixed = torch.stack([(head[:-1, None] * keys).sum(0) for head in weights])
        out[token.index] = mixed.to(q.dtype)
    return out


def _seen(entries: Entries, token: Token) -> list[int]:
    if entries.chosen is None:
        return list(range((token.position + 1) // entries.ratio))
    return [entry for entry in entries.chosen[token.index].tolist() if entry >= 0]


def _positions(
    layout: RowLayout, own: Tensor, ring: Tensor, token: Token, start: int, stop: int
) -> Tensor:
    """What a token's row has at positions [start, stop): [n, width]."""
    first, begins = layout.first[token.row], layout.starts[token.row]
    slot, capacity = layout.slots[token.row], ring.shape[1]
    columns = [position % capacity for position in range(start, min(first, stop))]
    mine = own[begins + max(start, first) - first : begins + max(stop, first) - first]
    return torch.cat((ring[slot, columns].to(own.dtype), mine)) if columns else mine


def _entries(
    layout: RowLayout, pool: Tensor, row: int, ratio: int, numbers: range | list[int]
) -> Tensor:
    """Entries of a row by number: [n, size]."""
    share, table = layout.page_tokens // ratio, layout.tables[row]
    pages = [table[number // share] for number in numbers]
    return pool[pages, [number % share for number in numbers]]
