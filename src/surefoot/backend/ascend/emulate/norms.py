"""Norms by the root of the mean square."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import rounded, wide
from surefoot.backend.ascend.emulate.contract import Contract, Operators, operator

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Norms(Operators):
    """`npu_rms_norm`, `npu_add_rms_norm`, `npu_gemma_rms_norm`."""

    @operator
    def npu_rms_norm(
        self, input: Tensor, gamma: Tensor, epsilon: float = 1e-06
    ) -> tuple[Tensor, Tensor]:
        """Scale to a mean square of 1 over gamma's dimensions: input / root * gamma.

        Dtypes and shapes are those of the page of `aclnnRmsNorm`.

        Args:
            input: [*, *normed], 1 to 8 dimensions; float32, float16 or bfloat16.
            gamma: [*normed], the last dimensions of `input`; of input's dtype, or float32.
            epsilon: added to the mean.

        Returns:
            The result as `input`; 1 / root as float32 [*, 1...].
        """
        contract = Contract("npu_rms_norm", "aclnnRmsNorm", self.profile)
        _check_norm(contract, input, gamma)
        same = gamma.dtype in (input.dtype, torch.float32)
        wanted = f"{input.dtype} as input, or float32"
        contract.require(same, "dtype of gamma", wanted, gamma)
        y, rstd = _rms_norm(wide(input), wide(gamma), epsilon)
        return rounded(y, input.dtype), rstd.to(torch.float32)

    @operator
    def npu_add_rms_norm(
        self, x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The norm of x1 + x2, and the sum.

        Dtypes and shapes are those of the operator's own page. Whether the device rounds the sum
        before it takes the norm is not published; here the norm sees the rounded sum.

        Args:
            x1: [*, *normed], 1 to 8 dimensions; float32, float16 or bfloat16.
            x2: like `x1`.
            gamma: [*normed]; dtype of x1.
            epsilon: added to the mean.

        Returns:
            The norm as `x1`; 1 / root as float32 [*, 1...]; the sum as `x1`.
        """
        contract = Contract("npu_add_rms_norm", "aclnnAddRmsNorm", self.profile)
        _check_norm(contract, x1, gamma)
        contract.shape("x2", x2, *x1.shape)
        contract.dtype("x2", x2, x1.dtype)
        contract.dtype("gamma", gamma, x1.dtype)
        total = rounded(wide(x1) + wide(x2), x1.dtype)
        y, rstd = _rms_norm(wide(total), wide(gamma), epsilon)
        return rounded(y, x1.dtype), rstd.to(torch.float32), total

    @operator
    def npu_gemma_rms_norm(
        self, input: Tensor, gamma: Tensor, epsilon: float = 1e-06
    ) -> tuple[Tensor, Tensor]:
        """As `npu_rms_norm` with 1 + gamma in place of gamma.

        Dtypes and shapes are those of the page of `aclnnGemmaRmsNorm`.

        Args:
            input: [*, *normed], 1 to 8 dimensions; float32, float16 or bfloat16.
            gamma: [*normed], the last dimensions of `input`; dtype of input.
            epsilon: added to the mean.

        Returns:
            The result as `input`; 1 / root as float32 [*, 1...].
        """
        contract = Contract("npu_gemma_rms_norm", "aclnnGemmaRmsNorm", self.profile)
        _check_norm(contract, input, gamma)
        contract.dtype("gamma", gamma, input.dtype)
        y, rstd = _rms_norm(wide(input), 1 + wide(gamma), epsilon)
        return rounded(y, input.dtype), rstd.to(torch.float32)


def _check_norm(contract: Contract, x: Tensor, gamma: Tensor) -> None:
    contract.dtype("input", x, *FLOATS)
    contract.dims("input", x, *range(1, 9))
    contract.dims("gamma", gamma, *range(1, x.dim() + 1))
    last = tuple(x.shape[x.dim() - gamma.dim() :])
    contract.shape("gamma", gamma, *last)


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    normed = tuple(range(x.dim() - gamma.dim(), x.dim()))
    rstd = (x.square().mean(normed, keepdim=True) + epsilon).rsqrt()
    return x * rstd * gamma, rstd
