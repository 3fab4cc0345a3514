"""Fused attention for decode, verify and prefill, in both published versions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import poison, rounded
from surefoot.backend.ascend.emulate.attention_checks import (
    MASK_SIDE,
    check_attention,
    check_pages,
)
from surefoot.backend.ascend.emulate.attention_masks import CAUSAL, check_mask, visible_keys
from surefoot.backend.ascend.emulate.attention_maths import attend
from surefoot.backend.ascend.emulate.attention_operands import (
    Attention,
    Keys,
    as_layout,
    stored_with_rope,
)
from surefoot.backend.ascend.emulate.contract import Contract, HostInts, Operators, operator


class FusedAttention(Operators):
    """`npu_fused_infer_attention_score` and `npu_fused_infer_attention_score_v2`.

    Emulated are the layouts TND, BSND, BNSD and BSH, keys with and without pages, the modes 0, 3
    and 4, and float16 or bfloat16; no quantisation, no shared prefix, no left padding.

    Shapes, with S queries and L keys of a request:

    * TND: query [T, N, D], key [T', K, D], out [T, N, Dv], lse [T, N, 1];
    * BSND: query [B, S, N, D], key [B, L, K, D]; BNSD with the middle dimensions exchanged; BSH
      with heads and sizes as one dimension; out like query, lse [B, N, S, 1] for all three;
    * pages, for every layout [pages, size, K * D], for TND and BNSD also [pages, K, size, D].

    Lengths of queries are running sums in TND, and the last is T. Lengths of keys are running
    sums in TND without pages, in every other case the lengths themselves.
    """

    @functools.cached_property
    def _triangle(self) -> Tensor:
        return torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.bool).triu(1)

    @operator
    def npu_fused_infer_attention_score(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        pse_shift: Tensor | None = None,
        atten_mask: Tensor | None = None,
        actual_seq_lengths: HostInts | None = None,
        actual_seq_lengths_kv: HostInts | None = None,
        dequant_scale1: Tensor | None = None,
        quant_scale1: Tensor | None = None,
        dequant_scale2: Tensor | None = None,
        quant_scale2: Tensor | None = None,
        quant_offset2: Tensor | None = None,
        antiquant_scale: Tensor | None = None,
        antiquant_offset: Tensor | None = None,
        key_antiquant_scale: Tensor | None = None,
        key_antiquant_offset: Tensor | None = None,
        value_antiquant_scale: Tensor | None = None,
        value_antiquant_offset: Tensor | None = None,
        block_table: Tensor | None = None,
        query_padding_size: Tensor | None = None,
        kv_padding_size: Tensor | None = None,
        key_shared_prefix: Tensor | None = None,
        value_shared_prefix: Tensor | None = None,
        actual_shared_prefix_len: HostInts | None = None,
        query_rope: Tensor | None = None,
        key_rope: Tensor | None = None,
        key_rope_antiquant_scale: Tensor | None = None,
        num_heads: int = 1,
        scale: float = 1.0,
        pre_tokens: int = 2147483647,
        next_tokens: int = 2147483647,
        input_layout: str = "BSH",
        num_key_value_heads: int = 0,
        sparse_mode: int = 0,
        inner_precise: int = 0,
        block_size: int = 0,
        antiquant_mode: int = 0,
        key_antiquant_mode: int = 0,
        value_antiquant_mode: int = 0,
        softmax_lse_flag: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Attention; see the class. The rules are those of the operator's page and its tiling.

        Returns:
            The output in the dtype of the query, and the lse in float32, empty unless asked for.
        """
        contract = _contract(self, "npu_fused_infer_attention_score", "V3")
        contract.unused(
            pse_shift=pse_shift,
            dequant_scale1=dequant_scale1,
            quant_scale1=quant_scale1,
            dequant_scale2=dequant_scale2,
            quant_scale2=quant_scale2,
            quant_offset2=quant_offset2,
            antiquant_scale=antiquant_scale,
            antiquant_offset=antiquant_offset,
            key_antiquant_scale=key_antiquant_scale,
            key_antiquant_offset=key_antiquant_offset,
            value_antiquant_scale=value_antiquant_scale,
            value_antiquant_offset=value_antiquant_offset,
            query_padding_size=query_padding_size,
            kv_padding_size=kv_padding_size,
            key_shared_prefix=key_shared_prefix,
            value_shared_prefix=value_shared_prefix,
            actual_shared_prefix_len=actual_shared_prefix_len,
            key_rope_antiquant_scale=key_rope_antiquant_scale,
        )
        modes = (antiquant_mode, key_antiquant_mode, value_antiquant_mode)
        contract.emulated(modes == (0, 0, 0), "antiquant modes", "0", modes)
        call = Attention(
            contract=contract,
            layout=input_layout,
            tensors=(query, key, value),
            ropes=_both(contract, query_rope, key_rope),
            heads=(num_heads, num_key_value_heads or num_heads),
            scale=scale,
            mode=sparse_mode,
            mask=atten_mask,
            reach=(pre_tokens, next_tokens),
            query_lengths=actual_seq_lengths,
            key_lengths=actual_seq_lengths_kv,
            table=block_table,
            block_size=block_size,
            precision=inner_precise,
            wants_lse=softmax_lse_flag,
            sink=None,
            names=("actual_seq_lengths", "actual_seq_lengths_kv"),
        )
        return _run(call, lambda: self._triangle)

    @operator
    def npu_fused_infer_attention_score_v2(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_rope: Tensor | None = None,
        key_rope: Tensor | None = None,
        pse_shift: Tensor | None = None,
        atten_mask: Tensor | None = None,
        actual_seq_qlen: HostInts | None = None,
        actual_seq_kvlen: HostInts | None = None,
        block_table: Tensor | None = None,
        dequant_scale_query: Tensor | None = None,
        dequant_scale_key: Tensor | None = None,
        dequant_offset_key: Tensor | None = None,
        dequant_scale_value: Tensor | None = None,
        dequant_offset_value: Tensor | None = None,
        dequant_scale_key_rope: Tensor | None = None,
        quant_scale_out: Tensor | None = None,
        quant_offset_out: Tensor | None = None,
        quant_scale_p: Tensor | None = None,
        learnable_sink: Tensor | None = None,
        num_query_heads: int = 1,
        num_key_value_heads: int = 0,
        softmax_scale: float = 1.0,
        pre_tokens: int = 2147483647,
        next_tokens: int = 2147483647,
        input_layout: str = "BSH",
        sparse_mode: int = 0,
        block_size: int = 0,
        query_quant_mode: int = 0,
        key_quant_mode: int = 0,
        value_quant_mode: int = 0,
        inner_precise: int = 0,
        return_softmax_lse: bool = False,
        query_dtype: int | None = None,
        key_dtype: int | None = None,
        value_dtype: int | None = None,
        query_rope_dtype: int | None = None,
        key_rope_dtype: int | None = None,
        key_shared_prefix_dtype: int | None = None,
        value_shared_prefix_dtype: int | None = None,
        dequant_scale_query_dtype: int | None = None,
        dequant_scale_key_dtype: int | None = None,
        dequant_scale_value_dtype: int | None = None,
        dequant_scale_key_rope_dtype: int | None = None,
        out_dtype: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention; see the class. The rules are those of the operator's page and its tiling.

        Over the first version it has `learnable_sink`: [N] bfloat16, a score of each head that
        joins the denominator only.

        Returns:
            The output in the dtype of the query, and the lse in float32, empty unless asked for.
        """
        contract = _contract(self, "npu_fused_infer_attention_score_v2", "V4")
        contract.unused(
            pse_shift=pse_shift,
            dequant_scale_query=dequant_scale_query,
            dequant_scale_key=dequant_scale_key,
            dequant_offset_key=dequant_offset_key,
            dequant_scale_value=dequant_scale_value,
            dequant_offset_value=dequant_offset_value,
            dequant_scale_key_rope=dequant_scale_key_rope,
            quant_scale_out=quant_scale_out,
            quant_offset_out=quant_offset_out,
            quant_scale_p=quant_scale_p,
            query_dtype=query_dtype,
            key_dtype=key_dtype,
            value_dtype=value_dtype,
            query_rope_dtype=query_rope_dtype,
            key_rope_dtype=key_rope_dtype,
            key_shared_prefix_dtype=key_shared_prefix_dtype,
            value_shared_prefix_dtype=value_shared_prefix_dtype,
            dequant_scale_query_dtype=dequant_scale_query_dtype,
            dequant_scale_key_dtype=dequant_scale_key_dtype,
            dequant_scale_value_dtype=dequant_scale_value_dtype,
            dequant_scale_key_rope_dtype=dequant_scale_key_rope_dtype,
            out_dtype=out_dtype,
        )
        modes = (query_quant_mode, key_quant_mode, value_quant_mode)
        contract.emulated(modes == (0, 0, 0), "quant modes", "0", modes)
        call = Attention(
            contract=contract,
            layout=input_layout,
            tensors=(query, key, value),
            ropes=_both(contract, query_rope, key_rope),
            heads=(num_query_heads, num_key_value_heads or num_query_heads),
            scale=softmax_scale,
            mode=sparse_mode,
            mask=atten_mask,
            reach=(pre_tokens, next_tokens),
            query_lengths=actual_seq_qlen,
            key_lengths=actual_seq_kvlen,
            table=block_table,
            block_size=block_size,
            precision=inner_precise,
            wants_lse=return_softmax_lse,
            sink=learnable_sink,
            names=("actual_seq_qlen", "actual_seq_kvlen"),
        )
        return _run(call, lambda: self._triangle)


def _contract(vendor: Operators, name: str, version: str) -> Contract:
    return Contract(name, f"aclnnFusedInferAttentionScore{version}", vendor.profile)


def _both(
    contract: Contract, query_rope: Tensor | None, key_rope: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    came = "one of both"
    both = (query_rope is None) == (key_rope is None)
    contract.require(both, "query_rope and key_rope", "both or neither", came)
    return None if query_rope is None or key_rope is None else (query_rope, key_rope)


def _run(call: Attention, triangle: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Check the call, then compute request by request; rows of no request stay poisoned."""
    query = call.tensors[0]
    check_attention(call)
    check_mask(call, triangle)
    if call.table is not None:
        check_pages(call, call.table)
    rows, key = stored_with_rope(call)
    counts = call.key_counts()
    keys, values = (
        Keys(call.layout, stored, call.heads[1], call.table, counts)
        for stored in (key, call.tensors[2])
    )
    out = poison((*rows.shape[:2], call.value_size), query.dtype)
    lse = poison(rows.shape[:2], torch.float32)
    for request, (start, queries) in enumerate(call.query_spans()):
        own, count = slice(start, start + queries), counts[request]
        if not queries:
            continue
        if not count:
            out[own] = 0
            continue
        visible = visible_keys(call, request, queries, count)
        k, v = keys.of(request, count), values.of(request, count)
        found, logs = attend(rows[own], k, v, visible, call.scale, call.sink)
        # Causal rows without a key are corrected unasked; their lse is published nowhere.
        if call.precision >= 2 or call.mode == CAUSAL:
            found[~visible.any(1)] = 0
        out[own], lse[own] = rounded(found, query.dtype), logs.to(torch.float32)
    shaped = as_layout(call, out)
    if not call.wants_lse:
        return shaped, torch.empty(0)
    if call.packed:
        return shaped, lse[:, :, None]
    spread = lse.view(call.requests, call.longest, -1)
    return shaped, spread.transpose(1, 2)[..., None].contiguous()
