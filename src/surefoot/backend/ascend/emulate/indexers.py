"""The choice of the keys that sparse attention looks at."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import poison, wide
from surefoot.backend.ascend.emulate.contract import Contract, Operators, operator
from surefoot.backend.ascend.emulate.selection import FAR, Selecting, Span, check_reach

MOST_SELECTED = 2048
FURTHER_COUNTS = (3072, 4096, 5120, 6144, 7168, 8192)


class Indexers(Operators):
    """`npu_lightning_indexer`."""

    @operator
    def npu_lightning_indexer(
        self,
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        *,
        actual_seq_lengths_query: Tensor | None = None,
        actual_seq_lengths_key: Tensor | None = None,
        block_table: Tensor | None = None,
        layout_query: str = "BSND",
        layout_key: str = "BSND",
        sparse_count: int = 2048,
        sparse_mode: int = 3,
        pre_tokens: int = FAR,
        next_tokens: int = FAR,
        return_value: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The `sparse_count` keys with the highest sum over heads of weight * relu(query . key).

        The rules are those of the operator's page for A2 and A3. In which order the device gives
        the chosen keys, and which of several equal ones it leaves out, is published nowhere; here
        the highest score comes first and of equal ones the lowest position.

        Args:
            query: [T, N, 128] or [B, S, N, 128], N at most 64; float16 or bfloat16.
            key: pages [pages, size, 1, 128], [T', 1, 128] or [B, L, 1, 128]; dtype of query.
            weights: [T, N] or [B, S, N]; dtype of query, or float32.
            actual_seq_lengths_query: int32 [B]: running sums in TND, else by request.
            actual_seq_lengths_key: int32 [B]: running sums in TND, else by request.
            block_table: int32 [B, columns] with PA_BSND, else None.
            layout_query: TND or BSND.
            layout_key: PA_BSND, or as layout_query.
            sparse_count: 1 to 2048, or a multiple of 1024 up to 8192.
            sparse_mode: 0 for all keys; 3 for keys up to the row's own position, where the last
                row stands at the last key.
            pre_tokens: 2^63 - 1.
            next_tokens: 2^63 - 1.
            return_value: not emulated.

        Returns:
            int32 [T, 1, K] or [B, S, 1, K], -1 after the last visible key, undefined in rows of
            no request; an empty tensor.
        """
        contract = Contract("npu_lightning_indexer", "aclnnLightningIndexer", self.profile)
        call = Selecting(
            contract,
            query,
            key,
            (layout_query, layout_key),
            actual_seq_lengths_query,
            actual_seq_lengths_key,
            block_table,
            ("layout_key", "actual_seq_lengths_key"),
        )
        call.check()
        check_reach(contract, sparse_mode, pre_tokens, next_tokens)
        contract.emulated(not return_value, "return_value", "False", return_value)
        contract.dtype("weights", weights, query.dtype, torch.float32)
        contract.shape("weights", weights, *query.shape[:-1])
        contract.contiguous(weights=weights)
        heads, size = query.shape[-2:]
        contract.require_size(heads <= 64, "N of query", "at most 64", heads)
        contract.require_size(size == 128, "D of query", "128", size)
        contract.require(sparse_count > 0, "sparse_count", "more than 0", sparse_count)
        known = sparse_count <= MOST_SELECTED or sparse_count in FURTHER_COUNTS
        wanted = f"1 to {MOST_SELECTED} or {FURTHER_COUNTS}"
        contract.require_size(known, "sparse_count", wanted, sparse_count)
        spans = call.spans()
        keys = call.stored(key, spans)
        rows, scales = query.reshape(-1, heads, size), weights.reshape(-1, heads)
        chosen = poison((len(rows), 1, sparse_count), torch.int32)
        for span in spans:
            k = keys.of(span.request, span.keys)[0]
            scores = _scores(rows[span.rows], k, scales[span.rows])
            chosen[span.rows, 0] = _choose(scores, span, sparse_mode, sparse_count)
        return chosen.view(*query.shape[:-2], 1, sparse_count), torch.empty(0, dtype=query.dtype)


def _scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """[n, N, D], [L, D], [n, N] -> [n, L]."""
    each = (wide(query) @ wide(key).T).relu()
    return (wide(weights)[..., None] * each).sum(1)


def _choose(scores: Tensor, span: Span, sparse_mode: int, count: int) -> Tensor:
    """[n, count] positions, -1 where there is none."""
    limits = span.limits(sparse_mode)[:, None]
    hidden = torch.arange(span.keys) >= limits
    order = scores.masked_fill(hidden, float("-inf")).argsort(stable=True, descending=True)
    chosen = torch.full((len(scores), count), -1, dtype=torch.int32)
    kept = min(count, span.keys)
    inside = torch.arange(kept) < limits
    chosen[:, :kept] = torch.where(inside, order[:, :kept], -1).to(torch.int32)
    return chosen
