"""Latent attention over chosen keys."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import poison, rounded
from surefoot.backend.ascend.emulate.attention_checks import POWERS
from surefoot.backend.ascend.emulate.attention_maths import attend
from surefoot.backend.ascend.emulate.contract import Contract, Operators, RefusedError, operator
from surefoot.backend.ascend.emulate.selection import FAR, Selecting, Span, check_reach

LATENT_MODE = 2


class SparseAttention(Operators):
    """`npu_sparse_flash_attention`."""

    @operator
    def npu_sparse_flash_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        sparse_indices: Tensor,
        scale_value: float,
        *,
        block_table: Tensor | None = None,
        actual_seq_lengths_query: Tensor | None = None,
        actual_seq_lengths_kv: Tensor | None = None,
        query_rope: Tensor | None = None,
        key_rope: Tensor | None = None,
        sparse_block_size: int = 1,
        layout_query: str = "BSND",
        layout_kv: str = "BSND",
        sparse_mode: int = 3,
        pre_tokens: int = FAR,
        next_tokens: int = FAR,
        attention_mode: int = 0,
        return_softmax_lse: bool = False,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention of each row over the keys that its indices name.

        The rules are those of the operator's page for A2 and A3, and of what its kernel skips.

        Args:
            query: [T, N, 512] or [B, S, N, 512], N a power of two up to 128; float16 or bfloat16.
            key: pages [pages, size, 1, 512], [T', 1, 512] or [B, L, 1, 512]; dtype of query.
            value: the same memory as `key`.
            sparse_indices: int32 [T, 1, K] or [B, S, 1, K] positions in the request, in units of
                `sparse_block_size`; those that count come first, -1 after them.
            scale_value: factor on the scores.
            block_table: int32 [B, columns] with PA_BSND, else None.
            actual_seq_lengths_query: int32 [B]: running sums in TND, else by request.
            actual_seq_lengths_kv: int32 [B]: running sums in TND, else by request.
            query_rope: as query with 64 for 512.
            key_rope: as key with 64 for 512.
            sparse_block_size: a power of two up to 128 that divides the size of a page.
            layout_query: TND or BSND.
            layout_kv: PA_BSND, or as layout_query.
            sparse_mode: 0 for all that the indices name; 3 for those up to the row's own
                position, where the last row stands at the last key.
            pre_tokens: 2^63 - 1.
            next_tokens: 2^63 - 1.
            attention_mode: 2; the default is refused.
            return_softmax_lse: not emulated.
            sinks: not emulated.

        Returns:
            As `query`, undefined in rows of no request and in rows that see no key; two empty
            float32 tensors.
        """
        contract = Contract("npu_sparse_flash_attention", "aclnnSparseFlashAttention", self.profile)
        call = Selecting(
            contract,
            query,
            key,
            (layout_query, layout_kv),
            actual_seq_lengths_query,
            actual_seq_lengths_kv,
            block_table,
            ("layout_kv", "actual_seq_lengths_kv"),
        )
        wanted = "2: attentionMode only support 2."
        contract.require(attention_mode == LATENT_MODE, "attention_mode", wanted, attention_mode)
        contract.unused(sinks=sinks)
        contract.emulated(not return_softmax_lse, "return_softmax_lse", "False", True)
        call.check()
        check_reach(contract, sparse_mode, pre_tokens, next_tokens)
        query_rope, key_rope = _check_ropes(call, query_rope, key_rope)
        _check_value(contract, key, value)
        _check_indices(call, sparse_indices, sparse_block_size)
        heads, size = query.shape[-2:]
        contract.require_size(heads in POWERS, "N of query", str(POWERS), heads)
        contract.require_size(size == 512, "D of query", "512: qk_head_dim only support 512", size)
        spans = call.spans()
        values, ropes = call.stored(key, spans), call.stored(key_rope, spans)
        rows = torch.cat([query, query_rope], -1).flatten(0, -3)
        indices = sparse_indices.flatten(0, -3)[:, 0]
        out = poison((len(rows), heads, size), query.dtype)
        for span in spans:
            shown = _shown(contract, indices[span.rows], span, sparse_mode, sparse_block_size)
            v = values.of(span.request, span.keys)
            k = torch.cat([v, ropes.of(span.request, span.keys)], -1)
            found, _ = attend(rows[span.rows], k, v, shown, scale_value, None)
            out[span.rows] = rounded(found, query.dtype)
        return out.view_as(query), torch.empty(0), torch.empty(0)


def _check_ropes(
    call: Selecting, query_rope: Tensor | None, key_rope: Tensor | None
) -> tuple[Tensor, Tensor]:
    contract = call.contract
    if query_rope is None or key_rope is None:
        came = "query_rope" if query_rope is None else "key_rope"
        raise RefusedError(contract.operator, "ropes", f"{contract.operator}: {came} is missing")
    contract.dtype("query_rope", query_rope, call.query.dtype)
    contract.dtype("key_rope", key_rope, call.query.dtype)
    size = query_rope.shape[-1]
    contract.shape("query_rope", query_rope, *call.query.shape[:-1], size)
    contract.shape("key_rope", key_rope, *call.key.shape[:-1], size)
    wanted = "64: rope_head_dim should be 64"
    contract.require_size(size == 64, "D of query_rope", wanted, query_rope)
    contract.contiguous(query_rope=query_rope, key_rope=key_rope)
    return query_rope, key_rope


def _check_value(contract: Contract, key: Tensor, value: Tensor | None) -> None:
    wanted = "a tensor: None is only supported with CANN >= 9.2.0"
    contract.require(value is not None, "value", wanted, value)
    assert value is not None
    contract.dtype("value", value, key.dtype)
    contract.shape("value", value, *key.shape)
    contract.contiguous(value=value)
    same = value.data_ptr() == key.data_ptr()
    contract.trust(same, "memory of value", "that of key, which stands for both", "other memory")


def _check_indices(call: Selecting, indices: Tensor, block: int) -> None:
    contract = call.contract
    contract.dtype("sparse_indices", indices, torch.int32)
    rows = call.query.shape[:-2]
    contract.dims("sparse_indices", indices, len(rows) + 2)
    count = indices.shape[-1]
    contract.shape("sparse_indices", indices, *rows, 1, count)
    contract.require(count > 0, "K of sparse_indices", "more than 0", indices)
    contract.contiguous(sparse_indices=indices)
    contract.require(block in POWERS, "sparse_block_size", f"one of {POWERS}", block)
    if call.table is not None:
        size = call.key.shape[1]
        holds = size % block == 0
        contract.require(holds, "sparse_block_size", f"a divisor of the page size {size}", block)


def _shown(contract: Contract, indices: Tensor, span: Span, sparse_mode: int, block: int) -> Tensor:
    """[n, L] bool: which keys each row looks at.

    The kernel walks as many leading entries as the row has visible blocks, and skips those that
    are negative or not visible.
    """
    blocks = -(-span.keys // block)
    known = indices >= 0
    first = (known[:, 1:] & ~known[:, :-1]).any()
    wanted = "in each row the entries that count before the negative ones"
    contract.trust(not first, "order in sparse_indices", wanted, "others")
    most = int(indices.max()) if indices.numel() else -1
    contract.trust(most < blocks, "values of sparse_indices", f"below {blocks}", most)
    limits = span.limits(sparse_mode)[:, None]
    walked = torch.arange(indices.shape[1]) < -(-limits // block)
    times = torch.zeros(len(indices), blocks + 1, dtype=torch.int64)
    kept = torch.where(walked & known, indices.long(), blocks)
    times.scatter_add_(1, kept, torch.ones_like(kept))
    repeats = (times[:, :blocks] > 1).any()
    contract.trust(not repeats, "repeats in sparse_indices", "each block once in a row", "others")
    shown = (times[:, :blocks] > 0).repeat_interleave(block, 1)[:, : span.keys]
    return shown & (torch.arange(span.keys) < limits)
