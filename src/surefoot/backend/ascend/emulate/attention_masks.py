"""Which keys a query of fused attention sees, and what the mask must look like."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.attention_checks import MASK_SIDE
from surefoot.backend.ascend.emulate.attention_operands import Attention

FULL, CAUSAL, BAND = 0, 3, 4


def check_mask(call: Attention, triangle: Callable[[], Tensor]) -> None:
    """Mode, dtype, shape and content of the mask.

    Args:
        call: the call.
        triangle: makes [2048, 2048] bool, True above the diagonal.
    """
    contract, mode, mask = call.contract, call.mode, call.mask
    published = mode in (0, 1, 2, 3, 4, 9)
    contract.require(published, "sparse_mode", f"0 to 4: {mode} is out of range", mode)
    contract.emulated(mode in (FULL, CAUSAL, BAND), "sparse_mode", "0, 3 and 4", mode)
    if mask is not None:
        contract.dtype("atten_mask", mask, torch.bool, torch.int8, torch.uint8)
        contract.contiguous(atten_mask=mask)
    if mode == FULL:
        if mask is not None:
            _check_full(call, mask)
    elif call.single and call.ropes is not None:
        contract.require(mode == BAND, "sparse_mode of one query with ropes", "0 or 4", mode)
    elif mask is None:
        contract.require(False, "atten_mask", f"[{MASK_SIDE}, {MASK_SIDE}] with this mode", mask)
    else:
        _check_triangle(call, mask, triangle())
    if mode == BAND and call.single and call.ropes is None:
        most = max(call.key_counts(), default=0)
        holds = call.reach[0] >= most - 1
        wanted = "a reach over all keys: with one query, mode and reach are ignored"
        contract.trust(holds, "pre_tokens", wanted, call.reach[0])


def _check_triangle(call: Attention, mask: Tensor, triangle: Tensor) -> None:
    contract = call.contract
    ones = 0 if call.packed else 2
    sides = (MASK_SIDE, MASK_SIDE)
    allowed = [(1,) * count + sides for count in range(ones + 1)]
    contract.require(
        tuple(mask.shape) in allowed,
        "shape of atten_mask",
        f"one of {allowed}: atten_mask tensor shape must be [2048, 2048]",
        mask,
    )
    # Eight entries at a time: the mask is looked at in every call.
    words = [each.view(torch.int64) for each in (mask.view(sides).to(torch.bool), triangle)]
    same = torch.equal(words[0], words[1])
    contract.trust(same, "content of atten_mask", "masked exactly above the diagonal", "others")


def _check_full(call: Attention, mask: Tensor) -> None:
    contract = call.contract
    contract.require(
        not call.packed, "atten_mask", "None: sparse = 0 not support attentionMask in TND", mask
    )
    open_ends = min(call.reach) >= 2**31 - 1
    contract.emulated(open_ends, "reach with a full mask", "the default reach", call.reach)
    requests, queries = call.requests, call.longest
    if mask.dim() == 4:
        lead = mask.shape[0] in (1, requests) and mask.shape[1] == 1
        wanted = f"[{requests} or 1, 1, S, S of key]"
    elif mask.dim() == 3:
        lead, wanted = mask.shape[0] in (1, requests), f"[{requests} or 1, S, S of key]"
    else:
        lead, wanted = mask.dim() == 2 and call.ropes is None, "[S, S of key]"
        if call.single:
            lead, wanted = lead and mask.shape[0] == requests, f"[{requests}, S of key]"
    contract.require(lead, "shape of atten_mask", wanted, mask)
    if mask.dim() > 2 or not call.single:
        rows = {queries, -(-queries // 16) * 16, -(-queries // 32) * 32}
        contract.require(mask.shape[-2] in rows, "S of atten_mask", f"one of {rows}", mask)
    if call.table is not None:
        room = call.table.shape[1] * call.block_size
        holds = mask.shape[-1] >= room
        wanted = f"at least columns of block_table * block_size = {room}"
    else:
        key = call.tensors[1]
        full = key.shape[2] if call.layout == "BNSD" else key.shape[1]
        columns = {full, -(-full // 16) * 16, -(-full // 32) * 32}
        holds, wanted = mask.shape[-1] in columns, f"one of {columns}"
    contract.require(holds, "S of key in atten_mask", wanted, mask)


def visible_keys(call: Attention, request: int, queries: int, keys: int) -> Tensor:
    """[queries, keys] bool of one request.

    The last query stands at the last key: query i at key `keys - queries + i`.
    """
    if call.mode == FULL or (call.single and call.ropes is None):
        if call.mode == FULL and call.mask is not None:
            return _full_rows(call, call.mask, request, queries)[:, :keys]
        return torch.ones(queries, keys, dtype=torch.bool)
    places = torch.arange(queries)[:, None] + (keys - queries)
    others = torch.arange(keys)
    if call.mode == CAUSAL:
        return others <= places
    before, after = call.reach
    return (others >= places - before) & (others <= places + after)


def _full_rows(call: Attention, mask: Tensor, request: int, queries: int) -> Tensor:
    if mask.dim() == 2:
        rows = mask[request, None] if call.single else mask
    else:
        rows = mask[request if mask.shape[0] > 1 else 0]
        rows = rows[0] if mask.dim() == 4 else rows
    return rows[:queries] == 0
