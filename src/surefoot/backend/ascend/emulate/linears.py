"""The plain product with a weight."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import rounded, wide
from surefoot.backend.ascend.emulate.contract import Contract, Operators, operator


class Linears(Operators):
    """`npu_linear`."""

    @operator
    def npu_linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Input times the transposed weight, plus bias.

        Shapes are those of the published schema; products of 16-bit numbers are exact in the
        float64 that they are added up in, so a row does not depend on the rows beside it.

        Args:
            input: [rows, inputs]; float32, float16 or bfloat16.
            weight: [outputs, inputs], of the same dtype.
            bias: [outputs], likewise.

        Returns:
            [rows, outputs] as `input`.
        """
        contract = Contract("npu_linear", "aclnnMatmul", self.profile)
        contract.dtype("input", input, torch.float32, torch.float16, torch.bfloat16)
        contract.dims("input", input, 2)
        contract.dims("weight", weight, 2)
        contract.dtype("weight", weight, input.dtype)
        contract.shape("weight", weight, weight.shape[0], input.shape[1])
        contract.contiguous(input=input, weight=weight)
        y = wide(input) @ self.lasting.wide(weight).T
        if bias is not None:
            contract.shape("bias", bias, weight.shape[0])
            contract.dtype("bias", bias, input.dtype)
            y = y + wide(bias)
        return rounded(y, input.dtype)
