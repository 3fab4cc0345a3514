"""What a fused attention is called with, and the same in one form for all layouts.

Queries become rows [R, N, D], where request b owns a run of rows; keys and values are asked for
by request. R is T when tokens are packed, B * S otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.contract import Contract

LAYOUTS = ("TND", "BSND", "BNSD", "BSH")


@dataclass(frozen=True)
class Attention:
    """One call, under the names of neither version.

    Attributes:
        contract: raises its errors.
        layout: one of `LAYOUTS`.
        tensors: query, key, value.
        ropes: query_rope and key_rope, or None.
        heads: of queries, and of keys; the second is never 0 here.
        scale: factor on the scores.
        mode: sparse_mode.
        mask: atten_mask.
        reach: pre_tokens and next_tokens.
        query_lengths: as given: running sums when packed, otherwise by request or None.
        key_lengths: as given: running sums when packed and not paged, otherwise by request.
        table: [B, columns] pages of each request, or None.
        block_size: entries in a page.
        precision: inner_precise; from 2 on, rows that see no key are made zero.
        wants_lse: whether log(sum(exp)) is returned.
        sink: [N] a further score in each denominator, or None.
        names: of the two length parameters in this version.
    """

    contract: Contract
    layout: str
    tensors: tuple[Tensor, Tensor, Tensor]
    ropes: tuple[Tensor, Tensor] | None
    heads: tuple[int, int]
    scale: float
    mode: int
    mask: Tensor | None
    reach: tuple[int, int]
    query_lengths: Sequence[int] | None
    key_lengths: Sequence[int] | None
    table: Tensor | None
    block_size: int
    precision: int
    wants_lse: bool
    sink: Tensor | None
    names: tuple[str, str]

    @property
    def packed(self) -> bool:
        """Whether tokens of all requests lie one after the other."""
        return self.layout == "TND"

    @property
    def longest(self) -> int:
        """Most queries of a request: the size of the dimension of S, or T."""
        query = self.tensors[0]
        return query.shape[{"TND": 0, "BSND": 1, "BNSD": 2, "BSH": 1}[self.layout]]

    @property
    def requests(self) -> int:
        """How many requests the call holds; packed lengths must be given."""
        if self.packed:
            assert self.query_lengths is not None
            return len(self.query_lengths)
        return self.tensors[0].shape[0]

    @property
    def single(self) -> bool:
        """Whether this is the decode form: one query for each request, not packed."""
        return not self.packed and self.longest == 1

    @property
    def head_size(self) -> int:
        """Size of a query's head, without its rotated part."""
        query = self.tensors[0]
        return query.shape[2] // self.heads[0] if self.layout == "BSH" else query.shape[-1]

    @property
    def value_size(self) -> int:
        """Size of a value's head."""
        value = self.tensors[2]
        flat = value.dim() == 3 and (self.layout == "BSH" or self.table is not None)
        return value.shape[2] // self.heads[1] if flat else value.shape[-1]

    def query_spans(self) -> list[tuple[int, int]]:
        """First row and number of queries of each request; rows beyond are padding."""
        if self.packed:
            ends = list(self.query_lengths or ())
            starts = [0, *ends[:-1]]
            return [(start, end - start) for start, end in zip(starts, ends, strict=True)]
        lengths = _by_request(self.query_lengths, self.requests, self.longest)
        if self.single:
            lengths = [1] * self.requests
        return [(self.longest * at, length) for at, length in enumerate(lengths)]

    def key_counts(self) -> list[int]:
        """How many keys each request has."""
        if self.packed and self.table is None:
            ends = list(self.key_lengths or ())
            return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        full = 0 if self.table is not None else _by_layout(self.layout, self.tensors[1])
        return _by_request(self.key_lengths, self.requests, full)


def query_rows(layout: str, query: Tensor, heads: int) -> Tensor:
    """Queries as rows [R, N, D]."""
    if layout == "TND":
        return query
    if layout == "BNSD":
        query = query.transpose(1, 2)
    return query.reshape(-1, heads, query.shape[-1] if layout != "BSH" else _head(query, heads))


def as_layout(call: Attention, rows: Tensor) -> Tensor:
    """Rows [R, N, D] in the layout of the queries."""
    if call.packed:
        return rows
    spread = rows.view(call.requests, call.longest, *rows.shape[1:])
    if call.layout == "BSND":
        return spread
    return spread.transpose(1, 2).contiguous() if call.layout == "BNSD" else spread.flatten(2)


def pages_of(pool: Tensor, heads: int) -> Tensor:
    """A paged cache as [pages, N, size, D], whichever of both forms it has."""
    if pool.dim() == 4:
        return pool
    return pool.view(*pool.shape[:2], heads, -1).transpose(1, 2)


class Keys:
    """Keys or values by request."""

    def __init__(
        self,
        layout: str,
        stored: Tensor,
        heads: int,
        table: Tensor | None,
        counts: Sequence[int],
    ) -> None:
        self.layout = layout
        self.stored = stored
        self.heads = heads
        self.table = table
        self.starts = [sum(counts[:at]) for at in range(len(counts))]

    def of(self, request: int, count: int) -> Tensor:
        """[heads, count, D] of one request, in order of position."""
        if self.table is not None:
            pages = pages_of(self.stored, self.heads)
            needed = -(-count // pages.shape[2])
            picked = pages[self.table[request, :needed].long()]
            return picked.transpose(0, 1).flatten(1, 2)[:, :count]
        if self.layout == "TND":
            start = self.starts[request]
            return self.stored[start : start + count].transpose(0, 1)
        if self.layout == "BNSD":
            return self.stored[request, :, :count]
        whole = self.stored[request, :count]
        size = whole.shape[1:].numel() // self.heads
        return whole.reshape(count, self.heads, size).transpose(0, 1)


def stored_with_rope(call: Attention) -> tuple[Tensor, Tensor]:
    """Query rows and keys, their rotated parts appended where there are some.

    Keys keep their form: the two parts are joined head by head.
    """
    query, key, _ = call.tensors
    rows = query_rows(call.layout, query, call.heads[0])
    if call.ropes is None:
        return rows, key
    query_rope, key_rope = call.ropes
    rows = torch.cat([rows, query_rows(call.layout, query_rope, call.heads[0])], -1)
    heads = call.heads[1]
    if key.dim() == 3 and (call.layout == "BSH" or call.table is not None):
        parts = [each.unflatten(2, (heads, -1)) for each in (key, key_rope)]
        return rows, torch.cat(parts, -1).flatten(2)
    return rows, torch.cat([key, key_rope], -1)


def _by_request(lengths: Sequence[int] | None, requests: int, full: int) -> list[int]:
    if lengths is None:
        return [full] * requests
    return [lengths[0]] * requests if len(lengths) == 1 else list(lengths[:requests])


def _by_layout(layout: str, key: Tensor) -> int:
    return key.shape[{"TND": 0, "BSND": 1, "BNSD": 2, "BSH": 1}[layout]]


def _head(query: Tensor, heads: int) -> int:
    return query.shape[2] // heads
