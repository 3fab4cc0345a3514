"""What the operators of sparse attention have in common: packed rows, lengths, paged keys.

Lengths are device tensors here. The real stack sees how many there are and nothing of what they
hold, so a wrong value is a silent error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.attention_checks import check_table_pages
from surefoot.backend.ascend.emulate.attention_operands import Keys
from surefoot.backend.ascend.emulate.contract import Contract

FAR = 2**63 - 1


@dataclass(frozen=True)
class Span:
    """The rows and the keys of one request."""

    request: int
    start: int
    queries: int
    keys: int

    @property
    def rows(self) -> slice:
        """Of the request among all rows."""
        return slice(self.start, self.start + self.queries)

    def limits(self, sparse_mode: int) -> Tensor:
        """How many leading keys each row may see: [queries].

        The last row stands at the last key: row i at key `keys - queries + i`.
        """
        if sparse_mode == 0:
            return torch.full((self.queries,), self.keys)
        return (torch.arange(self.queries) + 1 + self.keys - self.queries).clamp(min=0)


@dataclass(frozen=True)
class Selecting:
    """Rows and keys of a call, under the names of either operator.

    Attributes:
        contract: raises the errors.
        query: [T, N, D] or [B, S, N, D].
        key: [T', 1, D], [B, L, 1, D] or pages [pages, size, 1, D].
        layouts: layout_query and the layout of keys.
        query_lengths: int32 [B]: running sums in TND, else by request, or None.
        key_lengths: int32 [B]: running sums in TND, else by request; None in BSND only.
        table: int32 [B, columns] with PA_BSND, else None.
        names: of the layout of keys and of the lengths of keys.
    """

    contract: Contract
    query: Tensor
    key: Tensor
    layouts: tuple[str, str]
    query_lengths: Tensor | None
    key_lengths: Tensor | None
    table: Tensor | None
    names: tuple[str, str]

    @property
    def packed(self) -> bool:
        """Whether the tokens of all requests lie one after the other."""
        return self.layouts[0] == "TND"

    def check(self) -> None:
        """Layouts, dtypes, dimensions and lengths; not the sizes of heads."""
        contract, query, key = self.contract, self.query, self.key
        contract.require(
            self.layouts[0] in ("BSND", "TND"), "layout_query", "BSND or TND", self.layouts[0]
        )
        kinds = ("BSND", "TND", "PA_BSND")
        contract.require(self.layouts[1] in kinds, self.names[0], str(kinds), self.layouts[1])
        paged = self.layouts[1] == "PA_BSND"
        same = paged or self.layouts[0] == self.layouts[1]
        contract.require(same, self.names[0], "layout_query or PA_BSND", self.layouts)
        contract.dtype("query", query, torch.float16, torch.bfloat16)
        contract.dtype("key", key, query.dtype)
        contract.dims("query", query, 3 if self.packed else 4)
        contract.dims("key", key, 3 if self.layouts[1] == "TND" else 4)
        contract.require(query.numel() > 0, "query", "no empty dimension", query)
        contract.require(key.numel() > 0, "key", "no empty dimension", key)
        contract.require(key.shape[-2] == 1, "N of key", "1", key)
        contract.require(key.shape[-1] == query.shape[-1], "D of key", str(query.shape[-1]), key)
        contract.contiguous(query=query, key=key)
        requests = self._check_query_lengths()
        self._check_key_lengths(requests)
        if not paged and not self.packed:
            contract.require(key.shape[0] == requests, "B of key", str(requests), key)
        self._check_table(requests, paged)

    def spans(self) -> list[Span]:
        """The requests, after a look at what the lengths and the table hold."""
        queries, firsts = self._query_counts()
        keys = self._key_counts()
        if self.table is not None:
            size = self.key.shape[1]
            check_table_pages(self.contract, self.table, keys, size, self.key.shape[0])
        return [
            Span(at, first, count, keys[at])
            for at, (first, count) in enumerate(zip(firsts, queries, strict=True))
        ]

    def stored(self, tensor: Tensor, spans: list[Span]) -> Keys:
        """Keys, or what has the form of keys, by request."""
        counts = [span.keys for span in spans]
        if self.table is not None:
            return Keys("TND", tensor.flatten(2), 1, self.table, counts)
        return Keys(self.layouts[1], tensor, 1, None, counts)

    def _check_lengths(self, name: str, lengths: Tensor, requests: int | None) -> int:
        contract = self.contract
        contract.dtype(name, lengths, torch.int32)
        contract.dims(name, lengths, 1)
        count = lengths.shape[0]
        wanted = count if requests is None else requests
        contract.require(count == wanted and count > 0, f"length of {name}", str(wanted), lengths)
        return count

    def _check_query_lengths(self) -> int:
        name, lengths = "actual_seq_lengths_query", self.query_lengths
        if self.packed:
            self.contract.require(lengths is not None, name, "running sums in TND", lengths)
            assert lengths is not None
            return self._check_lengths(name, lengths, None)
        requests = self.query.shape[0]
        return requests if lengths is None else self._check_lengths(name, lengths, requests)

    def _check_key_lengths(self, requests: int) -> None:
        name, lengths = self.names[1], self.key_lengths
        needed = self.layouts[1] != "BSND"
        wanted = f"the keys of each request with {self.layouts[1]}"
        self.contract.require(lengths is not None or not needed, name, wanted, lengths)
        if lengths is not None:
            self._check_lengths(name, lengths, requests)

    def _check_table(self, requests: int, paged: bool) -> None:
        contract, table = self.contract, self.table
        if not paged or table is None:
            holds = not paged and table is None
            contract.require(holds, "block_table", "a table with PA_BSND and only then", table)
            return
        contract.dtype("block_table", table, torch.int32)
        contract.dims("block_table", table, 2)
        holds = table.shape[0] == requests
        wanted = f"{requests}: first dimension should be equal to batch size"
        contract.require(holds, "rows of block_table", wanted, table)
        contract.trust(table.is_contiguous(), "block_table", "a contiguous tensor", table.stride())
        size = self.key.shape[1]
        fits = size % 16 == 0 and 0 < size <= 1024
        contract.require_size(fits, "block size", "a multiple of 16, <= 1024", size)

    def _query_counts(self) -> tuple[list[int], list[int]]:
        """How many rows each request has, and its first."""
        name = "actual_seq_lengths_query"
        if self.packed:
            assert self.query_lengths is not None
            firsts, counts = self._split(name, self.query_lengths, self.query.shape[0])
            return counts, firsts
        requests, length = self.query.shape[:2]
        counts = [length] * requests
        if self.query_lengths is not None:
            counts = self._inside(name, self.query_lengths, length)
        return counts, [length * at for at in range(requests)]

    def _key_counts(self) -> list[int]:
        name, lengths = self.names[1], self.key_lengths
        if lengths is None:
            return [self.key.shape[1]] * self.key.shape[0]
        if self.layouts[1] == "TND":
            return self._split(name, lengths, self.key.shape[0])[1]
        if self.table is not None:
            return self._inside(name, lengths, self.table.shape[1] * self.key.shape[1])
        return self._inside(name, lengths, self.key.shape[1])

    def _split(self, name: str, sums: Tensor, total: int) -> tuple[list[int], list[int]]:
        """First rows and counts from running sums; rows past the last belong to no request."""
        ends = sums.tolist()
        firsts = [0, *ends[:-1]]
        counts = [end - first for first, end in zip(firsts, ends, strict=True)]
        rising = min(counts) >= 0
        self.contract.trust(rising, f"values of {name}", "running sums, which never fall", ends)
        self.contract.trust(ends[-1] <= total, f"last of {name}", f"at most {total}", ends)
        return firsts, counts

    def _inside(self, name: str, lengths: Tensor, most: int) -> list[int]:
        counts = [int(each) for each in lengths.tolist()]
        holds = all(0 <= each <= most for each in counts)
        self.contract.trust(holds, f"values of {name}", f"in range [0, {most}]", counts)
        return counts


def check_reach(contract: Contract, sparse_mode: int, pre_tokens: int, next_tokens: int) -> None:
    """Modes 0 and 3, and no reach but the default."""
    contract.require(sparse_mode in (0, 3), "sparse_mode", "0 or 3", sparse_mode)
    for name, came in (("pre_tokens", pre_tokens), ("next_tokens", next_tokens)):
        contract.require(came == FAR, name, f"{FAR} only", came)
