"""Products in int8: inputs become codes on the device, sums are exact, results have 16 bits.

What `operands.Int8Weight` says holds but for the last bits: the operators scale and round in their
own way. A row's result depends on no other row, as sums of int32 have no order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.ascend.experts import JOINT, ROWS, SUMS
from surefoot.backend.ascend.vendor import Vendor
from surefoot.backend.operands import FixedInput, Int8Weight

_OUT = torch.bfloat16


@dataclass(frozen=True)
class Int8Linear:
    """A linear in int8.

    Attributes:
        values: [inputs, outputs] int8.
        scales: [outputs] float32.
        fixed: how inputs become codes, if not row by row.
        bias: [outputs] or None.
        vendor: computes.
    """

    values: Tensor
    scales: Tensor
    fixed: FixedInput | None
    bias: Tensor | None
    vendor: Vendor

    @staticmethod
    def of(
        weight: Int8Weight, bias: Tensor | None, device: torch.device, vendor: Vendor
    ) -> Int8Linear:
        """Bring a weight to the device, as the operator wants it."""
        moved = weight.to(device)
        values = moved.values.T.contiguous()
        added = None if bias is None else bias.to(device).float()
        return Int8Linear(values, moved.scales, moved.fixed, added, vendor)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        if not x.shape[0]:
            return x.new_empty(0, self.values.shape[1])
        narrow = x.to(_OUT).contiguous()
        if self.fixed is None:
            codes, scale = self.vendor.npu_dynamic_quant(narrow)
            y = self.vendor.npu_quant_matmul(
                codes,
                self.values,
                self.scales,
                pertoken_scale=scale,
                bias=self.bias,
                output_dtype=_OUT,
            )
            return y.to(x.dtype)
        codes = fixed_codes(narrow, self.fixed)
        y = self.vendor.npu_quant_matmul(
            codes, self.values, self.scales, bias=self.fixed.added, output_dtype=_OUT
        )
        return (y if self.bias is None else (y + self.bias).to(_OUT)).to(x.dtype)

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        return stream + self(x)


def fixed_codes(x: Tensor, fixed: FixedInput) -> Tensor:
    """Codes of x by a scale that was settled beforehand; composed, as the offset may be any."""
    codes = torch.round(x.float() / fixed.scale) + fixed.offset
    return codes.clamp(-128, 127).to(torch.int8)


@dataclass(frozen=True)
class Int8Groups:
    """Weights of experts in int8; see AscendExperts.

    Attributes:
        values: [E, inputs, outputs] int8.
        scales: [E, outputs] bfloat16, as the operator takes them.
        vendor: computes.
    """

    values: Tensor
    scales: Tensor
    vendor: Vendor

    @staticmethod
    def of(weight: Int8Weight, device: torch.device, vendor: Vendor) -> Int8Groups:
        """Bring weights to the device, as the operator wants them."""
        moved = weight.to(device)
        return Int8Groups(moved.values.mT.contiguous(), moved.scales.to(_OUT), vendor)

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """See experts.Groups."""
        places = torch.arange(len(rows), device=rows.device)
        # Of those nothing may be asked, not even a scale.
        rows = torch.where((places < ends[-1])[:, None], rows, 0)
        codes, scale = self.vendor.npu_dynamic_quant(rows.to(_OUT).contiguous())
        return self.vendor.npu_grouped_matmul(
            [codes],
            [self.values],
            scale=[self.scales],
            per_token_scale=[scale],
            group_list=ends,
            split_item=JOINT,
            group_type=ROWS,
            group_list_type=SUMS,
            output_dtype=_OUT,
        )[0]
