"""The rules of fused attention, as its pages publish them and its tiling code checks them.

Sizes marked `require_size` are those of the pages for A2 and A3; the rest holds for any size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.attention_operands import LAYOUTS, Attention
from surefoot.backend.ascend.emulate.contract import Contract

FURTHER_LAYOUTS = (
    "NTD",
    "NSD",
    "BNSD_BSND",
    "BSH_BNSD",
    "BSND_BNSD",
    "NTD_TND",
    "TND_NTD",
    "BSH_NBSD",
    "BSND_NBSD",
    "BNSD_NBSD",
)
POWERS = tuple(2**power for power in range(8))
# The side of the mask that every causal or banded call brings along.
MASK_SIDE = 2048
MOST_REQUESTS = 4096
MOST_FLAT = 65535
# Keys of a request that one query attends to.
MOST_KEYS = 262144


def check_attention(call: Attention) -> None:
    """All rules but those on what the table and the mask hold."""
    _check_layout(call)
    _check_heads(call)
    _check_query_lengths(call)
    _check_key_shapes(call)
    if call.table is not None:
        _check_table(call, call.table)
    _check_key_lengths(call)
    _check_precision(call)
    _check_sizes(call)
    if call.ropes is not None:
        _check_ropes(call, *call.ropes)
    if call.sink is not None:
        _check_sink(call, call.sink)


def _check_layout(call: Attention) -> None:
    contract, layout = call.contract, call.layout
    contract.emulated(layout not in FURTHER_LAYOUTS, "input_layout", ", ".join(LAYOUTS), layout)
    contract.require(layout in LAYOUTS, "input_layout", ", ".join(LAYOUTS), layout)
    query, key, value = call.tensors
    contract.dims("query", query, 4 if layout in ("BSND", "BNSD") else 3)
    contract.dtype("query", query, torch.float16, torch.bfloat16)
    for name, tensor in (("key", key), ("value", value)):
        contract.emulated(tensor.dtype != torch.int8, f"dtype of {name}", "no int8", tensor)
        contract.dtype(name, tensor, query.dtype)
    contract.contiguous(query=query, key=key, value=value)


def _check_heads(call: Attention) -> None:
    contract = call.contract
    heads, key_heads = call.heads
    contract.require(heads > 0, "number of query heads", "more than 0", heads)
    holds = key_heads > 0 and heads % key_heads == 0
    contract.require(holds, "number of key heads", f"a divisor of {heads}", key_heads)
    contract.require_size(heads // key_heads <= 64, "heads for each key head", "<= 64", call.heads)
    contract.require_size(heads <= 256, "number of query heads", "<= 256", heads)
    query = call.tensors[0]
    if call.layout == "BSH":
        contract.require(query.shape[2] % heads == 0, "H of query", f"{heads} * D", query)
    else:
        at = 1 if call.layout == "BNSD" else query.dim() - 2
        contract.require(query.shape[at] == heads, "N of query", str(heads), query)


def _check_query_lengths(call: Attention) -> None:
    contract, name, lengths = call.contract, call.names[0], call.query_lengths
    if not call.packed:
        if lengths is not None and not call.single:
            _check_plain_lengths(call, name, lengths, call.longest)
        return
    given = lengths is not None and len(lengths) > 0
    contract.require(given, name, "running sums of the queries of each request", lengths)
    assert lengths is not None
    few = len(lengths) <= MOST_REQUESTS
    contract.require(few, f"length of {name}", f"at most {MOST_REQUESTS}", len(lengths))
    _check_sums(contract, name, lengths)
    total = call.tensors[0].shape[0]
    contract.require(
        lengths[-1] == total,
        f"last of {name}",
        f"T of query, {total}: queryT must be equal to the last element",
        lengths[-1],
    )


def _check_key_shapes(call: Attention) -> None:
    contract = call.contract
    _, key, value = call.tensors
    heads, size = call.heads[1], call.head_size
    if call.table is not None:
        contract.require(call.block_size > 0, "block_size", "more than 0", call.block_size)
        contract.dims("key", key, 3, 4)
        contract.dims("value", value, key.dim())
        pages, block = key.shape[0], call.block_size
        if key.dim() == 3:
            contract.shape("key", key, pages, block, heads * size)
            contract.shape("value", value, pages, block, heads * call.value_size)
            contract.require(heads * size <= MOST_FLAT, "H of key", f"<= {MOST_FLAT}", key)
        else:
            fits = call.layout in ("BNSD", "TND")
            contract.require(fits, "pages [pages, N, size, D]", "BNSD or TND", call.layout)
            contract.shape("key", key, pages, heads, block, size)
            contract.shape("value", value, pages, heads, block, call.value_size)
        return
    contract.dims("key", key, call.tensors[0].dim())
    lead: tuple[int, ...] = (call.requests, key.shape[1])
    if call.packed:
        lead = (key.shape[0], heads)
    elif call.layout == "BSND":
        lead = (*lead, heads)
    elif call.layout == "BNSD":
        lead = (call.requests, heads, key.shape[2])
    flat = heads if call.layout == "BSH" else 1
    contract.shape("key", key, *lead, flat * size)
    contract.shape("value", value, *lead, flat * call.value_size)


def _check_table(call: Attention, table: Tensor) -> None:
    contract = call.contract
    contract.dtype("block_table", table, torch.int32)
    holds = table.dim() == 2
    contract.require(
        holds, "dim num of block_table", "2: the dim num of block_table should be 2", table
    )
    rows = table.shape[0]
    contract.require(rows == call.requests, "rows of block_table", str(call.requests), table)
    contract.require(table.numel() > 0, "block_table", "no empty dimension", table)
    contract.trust(table.is_contiguous(), "block_table", "a contiguous tensor", table.stride())
    lengths = call.key_lengths
    given = lengths is not None and len(lengths) > 0
    contract.require(
        given,
        call.names[1],
        "the number of keys of each request: in page attention scene, it should not be null",
        lengths,
    )


def _check_key_lengths(call: Attention) -> None:
    contract, name, lengths = call.contract, call.names[1], call.key_lengths
    if call.table is not None:
        assert lengths is not None
        room = call.table.shape[1] * call.block_size
        if call.packed:
            holds = len(lengths) == call.requests
            contract.require(holds, f"length of {name}", str(call.requests), lengths)
        _check_plain_lengths(call, name, lengths, room)
    elif call.packed:
        given = lengths is not None and len(lengths) == call.requests
        wanted = f"running sums of the keys of {call.requests} requests"
        contract.require(given, name, wanted, lengths)
        assert lengths is not None
        _check_sums(contract, name, lengths)
        total = call.tensors[1].shape[0]
        contract.require(lengths[-1] == total, f"last of {name}", f"T of key, {total}", lengths)
    elif lengths is not None:
        key = call.tensors[1]
        full = key.shape[2] if call.layout == "BNSD" else key.shape[1]
        _check_plain_lengths(call, name, lengths, full)


def _check_plain_lengths(call: Attention, name: str, lengths: Sequence[int], most: int) -> None:
    contract, requests = call.contract, call.requests
    holds = len(lengths) == 1 or len(lengths) >= requests
    contract.require(holds, f"length of {name}", f"1 or at least {requests}", lengths)
    used = lengths[:requests]
    inside = all(0 <= each <= most for each in used)
    contract.require(inside, name, f"values which must be in range[0, {most}]", list(used))


def _check_sums(contract: Contract, name: str, sums: Sequence[int]) -> None:
    rising = sums[0] >= 0 and all(a <= b for a, b in itertools.pairwise(sums))
    contract.require(rising, name, "running sums, which never fall", list(sums))


def _check_precision(call: Attention) -> None:
    """Bit 0 prefers speed, bit 1 corrects rows that see no key; not every form has both."""
    allowed = range(4)
    if call.single:
        allowed = range(2)
    elif call.packed and call.heads[0] == call.heads[1] and call.ropes is None:
        allowed = range(2 if call.tensors[0].dtype == torch.float16 else 1)
    holds = call.precision in allowed
    call.contract.require(holds, "inner_precise", f"one of {list(allowed)}", call.precision)


def _check_sizes(call: Attention) -> None:
    """Sizes that the pages give for A2 and A3."""
    contract = call.contract
    size, value_size = call.head_size, call.value_size
    limit = contract.require_size
    limit(size <= 512 and size % 16 == 0, "D", "a multiple of 16, <= 512", size)
    latent = call.ropes is not None and size == 512
    if call.packed and not latent:
        equal = call.heads[0] == call.heads[1]
        allowed = [(128, 128), (192, 128)]
        if equal and call.ropes is None:
            allowed.append((64, 64))
            if call.table is None:
                allowed.append((192, 192))
        if call.ropes is not None:
            allowed = [(128, 128)]
        limit((size, value_size) in allowed, "D and D of value", str(allowed), (size, value_size))
        form = not (equal and call.table is not None and call.tensors[1].dim() == 4)
        wanted = "[pages, size, H] when there are as many key heads as query heads"
        limit(form, "form of pages", wanted, call.tensors[1])
    elif not call.packed:
        contract.require(value_size == size, "D of value", f"{size}, as of key", value_size)
    if call.single:
        most = max(call.key_counts(), default=0)
        limit(most <= MOST_KEYS, "keys for one query", f"<= {MOST_KEYS}", most)
    if call.table is not None:
        _check_block_size(call, latent)


def _check_block_size(call: Attention, latent: bool) -> None:
    block, limit = call.block_size, call.contract.require_size
    if latent:
        limit(block in (16, 128), "block_size", "16 or 128 with a head of 512", block)
    elif call.packed:
        limit(block % 16 == 0 and block <= 1024, "block_size", "multiple of 16, <= 1024", block)
    elif call.single:
        limit(block % 16 == 0 and block <= 512, "block_size", "multiple of 16, <= 512", block)
    else:
        limit(block % 128 == 0 and block <= 512, "block_size", "multiple of 128, <= 512", block)


def _check_ropes(call: Attention, query_rope: Tensor, key_rope: Tensor) -> None:
    """The latent form: rotated parts of queries and keys apart from the rest."""
    contract = call.contract
    query, key, _ = call.tensors
    heads, key_heads = call.heads
    limit = contract.require_size
    contract.contiguous(query_rope=query_rope, key_rope=key_rope)
    contract.dtype("query_rope", query_rope, query.dtype)
    contract.dtype("key_rope", key_rope, key.dtype)
    contract.dims("query_rope", query_rope, query.dim())
    contract.dims("key_rope", key_rope, key.dim())
    flat = call.layout == "BSH"
    size = query_rope.shape[-1] // heads if flat else query_rope.shape[-1]
    limit(size == 64, "D of query_rope", "64", query_rope)
    contract.shape("query_rope", query_rope, *query.shape[:-1], size * (heads if flat else 1))
    flat = key.dim() == 3 and (call.layout == "BSH" or call.table is not None)
    contract.shape("key_rope", key_rope, *key.shape[:-1], size * (key_heads if flat else 1))
    limit(call.head_size in (128, 512), "D of query with query_rope", "128 or 512", query)
    if call.head_size == 512 or (not contract.profile.size_limits and key_heads == 1):
        contract.require(key_heads == 1, "number of key heads", "1 with a head of 512", key_heads)
        limit(heads in POWERS, "number of query heads", str(POWERS), heads)
        contract.require(not call.wants_lse, "softmax lse", "not with a head of 512", True)
        widths = [count for _, count in call.query_spans()]
        if call.packed:
            limit(max(widths) <= 16, "queries of a request", "in range [0, 16]", widths)
        if call.single:
            contract.require(call.mask is None, "atten_mask", "None for one query", call.mask)


def _check_sink(call: Attention, sink: Tensor) -> None:
    contract = call.contract
    contract.require(call.packed, "input_layout with learnable_sink", "TND", call.layout)
    contract.dtype("learnable_sink", sink, torch.bfloat16)
    contract.shape("learnable_sink", sink, call.heads[0])
    small = call.value_size <= 128
    contract.require_size(small, "D of value with learnable_sink", "<= 128", call.value_size)
    contract.emulated(not call.wants_lse, "lse with learnable_sink", "one of both", True)
    contract.require(call.ropes is None, "ropes with learnable_sink", "one of both", "both")


def check_pages(call: Attention, table: Tensor) -> None:
    """Every page that is read exists; the device does not look."""
    check_table_pages(
        call.contract, table, call.key_counts(), call.block_size, call.tensors[1].shape[0]
    )


def check_table_pages(
    contract: Contract, table: Tensor, counts: Sequence[int], block_size: int, pages: int
) -> None:
    """Every page that is read for `counts` keys of each request exists."""
    columns = torch.arange(table.shape[1]) * block_size
    read = columns < torch.tensor(counts)[:, None]
    bad = read & ((table < 0) | (table >= pages))
    if bad.any():
        came = int(table[bad][0])
        contract.trust(False, "pages in block_table", f"pages in [0, {pages})", came)
