"""Products in int8 whose weights have scales by groups of inputs, composed group by group.

The vendor's operators take one scale an output, or weights in 4 bits in a form that is not
published. So sums come from `npu_quant_matmul`, which gives them in int32, and the rest is float32
operations in the order of `operands.Int8Weight`: codes of the inputs too, of which the vendor's
operator rounds some ties the other way. The bits are those that are promised.

`npu_grouped_matmul` gives no int32. Experts' codes are multiplied as float32 numbers instead, so
many at once that every sum is a whole number below 2^24, which float32 holds in any order of
adding. Weights stay in int8 in memory, and one group's at a time is widened.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.ascend.experts import JOINT, ROWS, SUMS
from surefoot.backend.ascend.vendor import Vendor
from surefoot.backend.operands import Int8Weight
from surefoot.backend.plain_int8 import codes_of

_MOST_EXACT = 1024
"""Inputs whose products of codes, at most 127 * 128 each, surely add up to less than 2^24."""


@dataclass(frozen=True)
class GroupScaledLinear:
    """A linear with scales by groups.

    Attributes:
        values: [G, inputs / G, outputs] int8.
        scales: [G, outputs] float32.
        one: [1] float32, the scale that the operator wants and does not use.
        bias: [outputs] float32, or None.
        vendor: computes.
    """

    values: Tensor
    scales: Tensor
    one: Tensor
    bias: Tensor | None
    vendor: Vendor

    @staticmethod
    def of(
        weight: Int8Weight, bias: Tensor | None, device: torch.device, vendor: Vendor
    ) -> GroupScaledLinear:
        """Bring a weight to the device, its groups apart."""
        apart = weight.values.unflatten(1, (weight.groups, -1)).permute(1, 2, 0)
        return GroupScaledLinear(
            values=apart.contiguous().to(device),
            scales=weight.scales.t().contiguous().to(device),
            one=torch.ones(1, device=device),
            bias=None if bias is None else bias.to(device).float(),
            vendor=vendor,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        if not x.shape[0]:
            return x.new_empty(0, self.values.shape[2])
        codes, scales = codes_of(x, None)
        worth: Tensor | None = None
        for part, values, scale in zip(
            codes.chunk(len(self.values), 1), self.values, self.scales, strict=True
        ):
            sums = self.vendor.npu_quant_matmul(
                part.contiguous(), values, self.one, output_dtype=torch.int32
            )
            own = sums.float() * scale
            worth = own if worth is None else worth + own
        assert worth is not None, "there is a group"
        y: Tensor = worth * scales[:, None]
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype)

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        return stream + self(x)


@dataclass(frozen=True)
class GroupScaledExperts:
    """Weights of experts with scales by groups; see experts.Groups.

    Attributes:
        values: [G, E, inputs / G, outputs] int8.
        scales: [G, E, outputs] float32.
        vendor: computes.
    """

    values: Tensor
    scales: Tensor
    vendor: Vendor

    @staticmethod
    def of(weight: Int8Weight, device: torch.device, vendor: Vendor) -> GroupScaledExperts:
        """Bring weights to the device, their groups apart."""
        apart = weight.values.unflatten(2, (weight.groups, -1)).permute(2, 0, 3, 1)
        scales = weight.scales.permute(2, 0, 1).contiguous()
        return GroupScaledExperts(apart.contiguous().to(device), scales.to(device), vendor)

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """See experts.Groups."""
        places = torch.arange(len(rows), device=rows.device)[:, None]
        # Of rows behind the last group nothing may be asked, not even a scale.
        codes, row_scales = codes_of(torch.where(places < ends[-1], rows, 0), None)
        expert = (places >= ends).sum(1).clamp(max=len(ends) - 1)
        worth: Tensor | None = None
        for part, values, scales in zip(
            codes.float().chunk(len(self.values), 1), self.values, self.scales, strict=True
        ):
            own = self._sums(part, values, ends) * scales[expert]
            worth = own if worth is None else worth + own
        assert worth is not None, "there is a group"
        y: Tensor = worth * row_scales[:, None]
        return y.to(rows.dtype)

    def _sums(self, codes: Tensor, values: Tensor, ends: Tensor) -> Tensor:
        """Exact sums of one group's products, in float32 as Int8Weight rounds them."""
        pairs = zip(codes.split(_MOST_EXACT, 1), values.split(_MOST_EXACT, 1), strict=True)
        whole = [
            self.vendor.npu_grouped_matmul(
                [part.contiguous()],
                [weight.float()],
                group_list=ends,
                split_item=JOINT,
                group_type=ROWS,
                group_list_type=SUMS,
            )[0].nan_to_num_(0)
            for part, weight in pairs
        ]
        if len(whole) == 1:
            return whole[0]
        return torch.stack([each.to(torch.int32) for each in whole]).sum(0).float()
