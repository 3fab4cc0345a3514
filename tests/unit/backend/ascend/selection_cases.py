"""Requests laid out as the operators of sparse attention take them."""

import torch
from torch import Tensor

from tests.unit.backend.ascend.attention_cases import Requests, nan
from tests.unit.backend.ascend.broken import Arguments

LAYOUTS = [("TND", "PA_BSND"), ("TND", "TND"), ("BSND", "PA_BSND"), ("BSND", "BSND")]
FAR = 2**63 - 1


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def selecting(batch: Requests, layouts: tuple[str, str], lengths_of_keys: str) -> Arguments:
    """Query, key, lengths and table; the operators differ in one name.

    Two rows behind the last request belong to none when tokens are packed.
    """
    every = range(batch.count)
    query = batch.padded(layouts[0], [batch.q(at) for at in every])
    call: Arguments = {
        "query": query,
        "layout_query": layouts[0],
        "actual_seq_lengths_query": ints(*batch.queries),
        lengths_of_keys: ints(*batch.keys),
    }
    if layouts[0] == "TND":
        call["query"] = torch.cat([query, nan(2, *query.shape[1:])])
        call["actual_seq_lengths_query"] = ints(*batch.sums(batch.queries))
    call |= keys_of(batch, layouts[1], [batch.k(at) for at in every], "key")
    if layouts[1] == "PA_BSND":
        call["block_table"] = batch.table()
    if layouts[1] == "TND":
        call[lengths_of_keys] = ints(*batch.sums(batch.keys))
    return call


def keys_of(batch: Requests, layout: str, values: list[Tensor], name: str) -> Arguments:
    if layout == "PA_BSND":
        pool = batch.pool(values, flat=True)
        return {name: pool[:, :, None]}
    return {name: batch.padded(layout, values)}


def row_of(batch: Requests, layout: str, out: Tensor, at: int, i: int) -> Tensor:
    """What came for query i of a request."""
    return out[sum(batch.queries[:at]) + i] if layout == "TND" else out[at, i]


def limit(batch: Requests, mode: int, at: int, i: int) -> int:
    """How many leading keys query i of a request may see."""
    if mode == 0:
        return batch.keys[at]
    return max(0, batch.keys[at] - batch.queries[at] + i + 1)
