"""Parts of one attention, put together."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import poison, rounded, wide
from surefoot.backend.ascend.emulate.contract import Contract, Operators, Tensors, operator

MOST_PARTS = 16


class Merges(Operators):
    """`npu_attention_update`."""

    @operator
    def npu_attention_update(
        self, lse: Tensors, local_out: Tensors, update_type: int
    ) -> tuple[Tensor, Tensor]:
        """The attention over all keys from attentions over some each.

        The rules are those of the operator's own page. A part whose lse is -inf has the weight 0,
        which does not hide a NaN of its output.

        Args:
            lse: log(sum(exp(score))) of each part: [M] float32, at most 16 parts.
            local_out: output of each part: [M, D], float32, float16 or bfloat16, D a multiple of
                8 from 8 to 512.
            update_type: 0 for the output alone, 1 for its lse too.

        Returns:
            [M, D] in the dtype of the parts; [M] float32, undefined with type 0.
        """
        contract = Contract("npu_attention_update", "aclnnAttentionUpdate", self.profile)
        contract.require(update_type in (0, 1), "update_type", "0 or 1", update_type)
        parts = len(lse)
        contract.require(1 <= parts <= MOST_PARTS, "parts", f"1 to {MOST_PARTS}", parts)
        contract.require(len(local_out) == parts, "length of local_out", str(parts), local_out)
        first = local_out[0]
        contract.dims("local_out[0]", first, 2)
        rows, size = first.shape
        contract.dtype("local_out[0]", first, torch.float32, torch.float16, torch.bfloat16)
        fits = size % 8 == 0 and 8 <= size <= 512
        contract.require_size(fits, "D of local_out", "a multiple of 8, 8 to 512", size)
        for at, (each, out) in enumerate(zip(lse, local_out, strict=True)):
            contract.dtype(f"lse[{at}]", each, torch.float32)
            contract.shape(f"lse[{at}]", each, rows)
            contract.dtype(f"local_out[{at}]", out, first.dtype)
            contract.shape(f"local_out[{at}]", out, rows, size)
        logs = wide(torch.stack(list(lse)))
        most = logs.amax(0)
        total = most + (logs - most).exp().sum(0).log()
        weights = (logs - total).exp()
        merged = (weights[..., None] * wide(torch.stack(list(local_out)))).sum(0)
        known = total.to(torch.float32) if update_type else poison((rows,), torch.float32)
        return rounded(merged, first.dtype), known
