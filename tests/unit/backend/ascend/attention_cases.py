"""Requests with queries and keys of their own, laid out as an operator takes them.

Whatever no request owns is NaN: padding, pages of nobody, the rest of a last page.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.unit.backend.ascend.broken import Arguments

MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
BF = torch.bfloat16


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = BF) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nan(*shape: int, dtype: torch.dtype = BF) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@dataclass(frozen=True)
class Requests:
    """How many queries and keys each request has, and of which sizes.

    Attributes:
        queries: of each request.
        keys: of each request.
        heads: of queries and of keys.
        size: D.
        block: entries of a page.
        seed: of the values and of the order of pages.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    size: int = 16
    block: int = 16
    seed: int = 0

    def q(self, at: int) -> Tensor:
        return draw(self.queries[at], self.heads[0], self.size, seed=100 * self.seed + at)

    def k(self, at: int) -> Tensor:
        return draw(self.keys[at], self.heads[1], self.size, seed=100 * self.seed + 30 + at)

    def v(self, at: int) -> Tensor:
        return draw(self.keys[at], self.heads[1], self.size, seed=100 * self.seed + 60 + at)

    @property
    def count(self) -> int:
        return len(self.queries)

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.size)

    def sums(self, lengths: tuple[int, ...]) -> list[int]:
        return torch.tensor(lengths).cumsum(0).tolist()

    def table(self) -> Tensor:
        """Pages in no order, none twice; columns that are not needed hold what is no page."""
        most = max(1, max(-(-keys // self.block) for keys in self.keys)) + 1
        draws = torch.Generator().manual_seed(self.seed)
        pages = torch.randperm(self.count * most, generator=draws).view(self.count, most) + 1
        needed = torch.tensor([-(-keys // self.block) for keys in self.keys])
        return torch.where(torch.arange(most) < needed[:, None], pages, -7).to(torch.int32)

    def pool(self, values: list[Tensor], flat: bool) -> Tensor:
        """[pages, size, K * D] or [pages, K, size, D]."""
        table = self.table()
        pool = nan(table.numel() + 1, self.block, *values[0].shape[1:])
        for row, each in zip(table, values, strict=True):
            for position, entry in enumerate(each):
                pool[row[position // self.block], position % self.block] = entry
        return pool.flatten(2) if flat else pool.transpose(1, 2).contiguous()

    def padded(self, layout: str, values: list[Tensor]) -> Tensor:
        """Requests one after the other, or side by side with padding behind."""
        if layout == "TND":
            return torch.cat(values)
        longest = max(len(each) for each in values)
        spread = nan(len(values), longest, *values[0].shape[1:])
        for row, each in zip(spread, values, strict=True):
            row[: len(each)] = each
        if layout == "BNSD":
            return spread.transpose(1, 2).contiguous()
        return spread.flatten(2) if layout == "BSH" else spread

    def call(self, layout: str, form: str) -> Arguments:
        """Arguments of the first version.

        Args:
            layout: of queries.
            form: of keys: "rows", "flat" pages or pages by "head".
        """
        every = range(self.count)
        keys, values = [self.k(at) for at in every], [self.v(at) for at in every]
        call: Arguments = {
            "query": self.padded(layout, [self.q(at) for at in every]),
            "num_heads": self.heads[0],
            "num_key_value_heads": self.heads[1],
            "scale": self.scale,
            "input_layout": layout,
            "actual_seq_lengths": list(self.queries),
            "actual_seq_lengths_kv": list(self.keys),
        }
        if layout == "TND":
            call["actual_seq_lengths"] = self.sums(self.queries)
        if form == "rows":
            call |= {"key": self.padded(layout, keys), "value": self.padded(layout, values)}
            if layout == "TND":
                call["actual_seq_lengths_kv"] = self.sums(self.keys)
        else:
            flat = form == "flat"
            call |= {"key": self.pool(keys, flat), "value": self.pool(values, flat)}
            call |= {"block_table": self.table(), "block_size": self.block}
        return call

    def rows(self, layout: str, out: Tensor, at: int) -> Tensor:
        """[n, N, D] of one request in an output."""
        if layout == "TND":
            start = sum(self.queries[:at])
            return out[start : start + self.queries[at]]
        if layout == "BNSD":
            out = out.transpose(1, 2)
        return (
            out[at, : self.queries[at]].unflatten(-1, (-1, self.size))
            if layout == "BSH"
            else (out[at, : self.queries[at]])
        )


def second_version(call: Arguments) -> Arguments:
    """The same arguments under the names of the second version."""
    names = {
        "num_heads": "num_query_heads",
        "scale": "softmax_scale",
        "actual_seq_lengths": "actual_seq_qlen",
        "actual_seq_lengths_kv": "actual_seq_kvlen",
        "softmax_lse_flag": "return_softmax_lse",
    }
    return {names.get(name, name): value for name, value in call.items()}


def one_row(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of one query [N, D] over n visible keys [n, K, D]: [N, Dv] and its lse [N]."""
    group = q.shape[0] // k.shape[1]
    k, v = (each.double().repeat_interleave(group, 1) for each in (k, v))
    scores = torch.einsum("hd,nhd->nh", q.double(), k) * scale
    top = scores.amax(0)
    weights = (scores - top).exp()
    total = weights.sum(0) + (0 if sinks is None else (sinks.double() - top).exp())
    return torch.einsum("nh,nhd->hd", weights, v) / total[:, None], top + total.log()


def near(came: Tensor, wanted: Tensor) -> bool:
    """Whether float64 values were rounded to what came, or to its neighbour."""
    apart = (came.double() - wanted).abs()
    return bool((apart <= wanted.abs() * torch.finfo(came.dtype).eps + 1e-9).all())
