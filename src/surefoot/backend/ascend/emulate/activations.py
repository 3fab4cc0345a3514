"""Activations."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import rounded, wide
from surefoot.backend.ascend.emulate.contract import Contract, Operators, operator


class Activations(Operators):
    """`npu_swiglu`."""

    @operator
    def npu_swiglu(self, input: Tensor, dim: int = -1) -> Tensor:
        """silu(first half) * second half along `dim`.

        Dtypes and shapes are those of the page of `aclnnSwiGlu`.

        Args:
            input: float32, float16 or bfloat16; an even size along `dim`.
            dim: the dimension that holds both halves.

        Returns:
            As `input` with half the size along `dim`.
        """
        contract = Contract("npu_swiglu", "aclnnSwiGlu", self.profile)
        contract.dtype("input", input, torch.float32, torch.float16, torch.bfloat16)
        rank = input.dim()
        contract.require(rank >= 1, "dimensions of input", "at least one", input)
        contract.require(-rank <= dim < rank, "dim", f"one of {rank} dimensions", dim)
        size = input.shape[dim]
        contract.require(size % 2 == 0, "size along dim", "an even size", size)
        gate, up = wide(input).chunk(2, dim)
        return rounded(torch.nn.functional.silu(gate) * up, input.dtype)
