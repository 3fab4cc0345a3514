"""Rounding of floats to eight bits, alone and behind an activation.

Where the device would compute in float32 the emulation computes in float64 and rounds once, halves
to the even neighbour. The scale is rounded to float32 before anything is divided by it, so that
the numbers agree with the scale that is given out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import poison, wide
from surefoot.backend.ascend.emulate.contract import Contract, Operators, operator
from surefoot.backend.ascend.emulate.dtypes import dtype_of

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MOST_GROUPS = 1024
WIDEST_SWIGLU, SWIGLU_UNIT = 10496, 64


class Quantising(Operators):
    """`npu_dynamic_quant`, `npu_quantize`, `npu_dequant_swiglu_quant`."""

    @operator
    def npu_dynamic_quant(
        self,
        input: Tensor,
        *,
        smooth_scales: Tensor | None = None,
        group_index: Tensor | None = None,
        dst_type: int | None = None,
        quant_mode: str = "pertoken",
        dst_type_max: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Each row divided by its own scale, the greatest magnitude in it / 127.

        Rules of the operator's page; int8 and one scale a row only. A row of zeros has the scale
        0 and stays zeros, which the page leaves open.

        Args:
            input: [..., D], at least two dimensions; float16 or bfloat16.
            smooth_scales: factors on the input first: [D], or [E, D] with `group_index`; dtype of
                the input.
            group_index: [E] int32, running sums of the rows that belong to each row of
                `smooth_scales`; the last is the number of rows.
            dst_type: int8, also by default.
            quant_mode: "pertoken".
            dst_type_max: 0.

        Returns:
            int8 like `input`; float32 [...].
        """
        contract = Contract("npu_dynamic_quant", "aclnnDynamicQuantV2", self.profile)
        is_int8 = dtype_of(dst_type, torch.int8) == torch.int8
        contract.emulated(is_int8, "dst_type", "int8", dst_type)
        contract.emulated(quant_mode == "pertoken", "quant_mode", "'pertoken'", quant_mode)
        contract.emulated(dst_type_max == 0, "dst_type_max", "0", dst_type_max)
        contract.dtype("input", input, torch.float16, torch.bfloat16)
        contract.require(input.dim() > 1, "dimensions of input", "at least 2", input)
        factors = _smoothing(contract, input, smooth_scales, group_index)
        rows, scale = quantised(wide(input).reshape(-1, input.shape[-1]) * factors)
        return rows.reshape(input.shape), scale.reshape(input.shape[:-1])

    @operator
    def npu_quantize(
        self,
        input: Tensor,
        scales: Tensor,
        zero_points: Tensor | None,
        dtype: int,
        axis: int = 1,
        div_mode: bool = True,
    ) -> Tensor:
        """Round(input / scales + zero_points), or input * scales without `div_mode`.

        Rules of the operator's page. What does not fit saturates.

        Args:
            input: float32, float16 or bfloat16.
            scales: along `axis`, or one number: [n], or as many dimensions as `input`, all others
                1. With `div_mode` float32 or bfloat16, otherwise the dtype of the input.
            zero_points: shaped like `scales`. With `div_mode` int8, uint8, int32 or bfloat16,
                otherwise the dtype of the scales.
            dtype: qint8, with `div_mode` also quint8 or int32, otherwise also int8.
            axis: with `div_mode` any; otherwise -2 or, by any greater number, the last.
            div_mode: whether scales divide.

        Returns:
            int8, uint8 or int32 like `input`.
        """
        contract = Contract(
            "npu_quantize", "aclnnQuantize" if div_mode else "aclnnAscendQuantV3", self.profile
        )
        contract.dtype("input", input, *FLOATS)
        limits = _quantised_dtype(contract, dtype, div_mode)
        along = _quantised_axis(contract, input, axis, div_mode)
        _check_quantize_dtypes(contract, input, scales, zero_points, div_mode)
        factors = _along(contract, "scales", scales, input, along)
        x = wide(input) / factors if div_mode else wide(input) * factors
        if zero_points is not None:
            contract.shape("zero_points", zero_points, *scales.shape)
            x = x + _along(contract, "zero_points", zero_points, input, along)
        return _saturated(x, limits)

    @operator
    def npu_dequant_swiglu_quant(
        self,
        x: Tensor,
        *,
        weight_scale: Tensor | None = None,
        activation_scale: Tensor | None = None,
        bias: Tensor | None = None,
        quant_scale: Tensor | None = None,
        quant_offset: Tensor | None = None,
        group_index: Tensor | None = None,
        activate_left: bool = False,
        quant_mode: int = 0,
        dst_type: int | None = None,
        round_mode: int | None = None,
        activate_dim: int | None = None,
        swiglu_mode: int = 0,
        clamp_limit: float = 7.0,
        glu_alpha: float = 1.702,
        glu_bias: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Scale back, activate, and scale to int8 row by row; group by group of rows.

        Rules of the operator's page. By default the right half is activated. Rows past the groups
        hold anything.

        Args:
            x: [T, 2H]; int32 or bfloat16.
            weight_scale: [G, 2H] float32; G is 1 without groups.
            activation_scale: [T, 1] float32; int32 needs it, bfloat16 forbids it.
            bias: not emulated, like `quant_offset`.
            quant_scale: [G, H], factors before rounding; float32, float16 or bfloat16.
            quant_offset: see there.
            group_index: [G] int64, how many rows belong to each group.
            activate_left: whether the left half is activated.
            quant_mode: 1, a scale for each row. The default 0 is not emulated.
            dst_type: int8, also by default.
            round_mode: 0, also by default.
            activate_dim: the last, also by default.
            swiglu_mode: 0, silu(a) * b with the halves a and b; 1, a * sigmoid(glu_alpha * a) *
                (b + glu_bias) where even columns are a and odd ones b; 2, that with halves. In 1
                and 2 a is cut off above `clamp_limit`, b below its negative too.
            clamp_limit: see `swiglu_mode`.
            glu_alpha: see `swiglu_mode`.
            glu_bias: see `swiglu_mode`.

        Returns:
            int8 [T, H]; float32 [T].
        """
        contract = Contract("npu_dequant_swiglu_quant", "aclnnDequantSwigluQuantV2", self.profile)
        contract.unused(bias=bias, quant_offset=quant_offset)
        contract.emulated(quant_mode == 1, "quant_mode", "1", quant_mode)
        is_int8 = dtype_of(dst_type, torch.int8) == torch.int8
        contract.emulated(is_int8, "dst_type", "int8", dst_type)
        contract.emulated(round_mode in (None, 0), "round_mode", "0", round_mode)
        contract.emulated(activate_dim in (None, -1, 1), "activate_dim", "the last", activate_dim)
        contract.require(swiglu_mode in (0, 1, 2), "swiglu_mode", "0, 1 or 2", swiglu_mode)
        groups = _check_swiglu(
            contract, x, weight_scale, activation_scale, quant_scale, group_index
        )
        values = wide(x)
        if weight_scale is not None:
            values = values * wide(weight_scale)[groups]
        if activation_scale is not None:
            values = values * wide(activation_scale)
        out = _swiglu(values, activate_left, swiglu_mode, (clamp_limit, glu_alpha, glu_bias))
        if quant_scale is not None:
            out = out * wide(quant_scale)[groups]
        rows, scale = quantised(out)
        used = _used_rows(group_index, len(x))
        rows[used:] = poison(rows[used:].shape, rows.dtype)
        scale[used:] = torch.nan
        return rows, scale


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float64 [T, D] as int8 with a float32 scale [T] for each row."""
    peak = rows.abs().amax(-1) if rows.shape[-1] else rows.new_zeros(len(rows))
    scale = (peak / 127).to(torch.float32)
    divisor = torch.where(scale == 0, 1.0, scale.to(torch.float64))
    return _saturated(rows / divisor[:, None], torch.int8), scale


def _saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    # What a number that is none becomes is open; the lowest is as wrong as any.
    whole = torch.nan_to_num(torch.round(values), limits.min, limits.max, limits.min)
    return whole.clamp(limits.min, limits.max).to(dtype)


def _smoothing(
    contract: Contract, x: Tensor, scales: Tensor | None, groups: Tensor | None
) -> Tensor:
    """Factors [T or 1, D] on the rows."""
    size, rows = x.shape[-1], x.shape[:-1].numel()
    if groups is not None:
        contract.require(scales is not None, "smooth_scales", "a tensor with group_index", scales)
    if scales is None:
        return torch.ones(1, size, dtype=torch.float64)
    contract.dtype("smooth_scales", scales, x.dtype)
    if groups is None:
        contract.shape("smooth_scales", scales, size)
        return wide(scales)[None]
    contract.dims("smooth_scales", scales, 2)
    contract.shape("smooth_scales", scales, scales.shape[0], size)
    few = 1 <= len(scales) <= MOST_GROUPS
    contract.require_size(few, "groups", f"1 to {MOST_GROUPS}", len(scales))
    contract.dtype("group_index", groups, torch.int32)
    contract.shape("group_index", groups, len(scales))
    stops = groups.tolist()
    contract.trust(
        stops == sorted(stops) and stops[0] >= 0 and stops[-1] == rows,
        "group_index",
        f"running sums up to the {rows} rows",
        stops,
    )
    return wide(scales)[_group_of(groups.diff(prepend=groups.new_zeros(1)), rows)]


def _group_of(counts: Tensor, rows: int) -> Tensor:
    """The group of each row; rows past all groups count to the last."""
    ids = torch.arange(len(counts)).repeat_interleave(counts.long())
    return torch.cat([ids, torch.full((rows - len(ids),), len(counts) - 1)])


def _quantised_dtype(contract: Contract, dtype: int, div_mode: bool) -> torch.dtype:
    kinds = {torch.qint8: torch.int8}
    if div_mode:
        kinds |= {torch.quint8: torch.uint8, torch.int32: torch.int32}
    else:
        kinds |= {torch.int8: torch.int8}
    asked = dtype_of(dtype, torch.int8)
    contract.emulated(asked != torch.quint4x2, "dtype", "eight bits and more", dtype)
    contract.require(asked in kinds, "dtype", f"one of {sorted(map(str, kinds))}", dtype)
    assert asked is not None
    return kinds[asked]


def _quantised_axis(contract: Contract, x: Tensor, axis: int, div_mode: bool) -> int:
    rank = x.dim()
    if div_mode:
        contract.require(-rank <= axis < rank, "axis", f"one of {rank} dimensions", axis)
        return axis % rank
    contract.require(-2 <= axis < rank, "axis", f"-2 to {rank - 1}", axis)
    contract.require(rank + min(axis, -1) >= 0, "axis", f"one of {rank} dimensions", axis)
    return rank - 2 if axis == -2 else rank - 1


def _check_quantize_dtypes(
    contract: Contract, x: Tensor, scales: Tensor, zero_points: Tensor | None, div_mode: bool
) -> None:
    if div_mode:
        contract.dtype("scales", scales, torch.float32, torch.bfloat16)
    else:
        contract.dtype("scales", scales, x.dtype)
    if zero_points is None:
        return
    if div_mode:
        kinds = (torch.int8, torch.uint8, torch.int32, torch.bfloat16)
        contract.dtype("zero_points", zero_points, *kinds)
    else:
        contract.dtype("zero_points", zero_points, scales.dtype)


def _along(contract: Contract, name: str, values: Tensor, x: Tensor, axis: int) -> Tensor:
    """The values in float64, shaped so that they spread over x."""
    shape = [1] * x.dim()
    shape[axis] = values.shape[0] if values.dim() == 1 else values.shape[axis - x.dim()]
    contract.dims(name, values, 1, x.dim())
    contract.require(shape[axis] in (1, x.shape[axis]), f"shape of {name}", "the axis or 1", values)
    if values.dim() > 1:
        contract.shape(name, values, *shape)
    return wide(values).reshape(shape)


def _check_swiglu(
    contract: Contract,
    x: Tensor,
    weight_scale: Tensor | None,
    activation_scale: Tensor | None,
    quant_scale: Tensor | None,
    group_index: Tensor | None,
) -> Tensor:
    """The group of each row."""
    contract.dtype("x", x, torch.int32, torch.bfloat16)
    contract.dims("x", x, 2)
    rows, double = x.shape
    contract.require(double % 2 == 0 and double > 0, "last dimension of x", "an even size", double)
    groups, half = 1, double // 2
    if group_index is not None:
        groups = _check_groups(contract, group_index, rows)
        fits = half <= WIDEST_SWIGLU and half % SWIGLU_UNIT == 0
        wanted = f"multiples of {SWIGLU_UNIT} up to {WIDEST_SWIGLU} with groups"
        contract.require_size(fits, "half of the last dimension of x", wanted, half)
    if weight_scale is not None:
        contract.dtype("weight_scale", weight_scale, torch.float32)
        contract.shape("weight_scale", weight_scale, groups, double)
    is_int = x.dtype == torch.int32
    wanted = "a tensor for int32, none otherwise"
    given = activation_scale is not None
    contract.require(given == is_int, "activation_scale", wanted, activation_scale)
    if activation_scale is not None:
        contract.dtype("activation_scale", activation_scale, torch.float32)
        contract.shape("activation_scale", activation_scale, rows, 1)
    if quant_scale is not None:
        contract.dtype("quant_scale", quant_scale, *FLOATS)
        contract.shape("quant_scale", quant_scale, groups, half)
    if group_index is None:
        return torch.zeros(rows, dtype=torch.int64)
    return _group_of(group_index, rows)


def _check_groups(contract: Contract, groups: Tensor, rows: int) -> int:
    contract.dtype("group_index", groups, torch.int64)
    contract.dims("group_index", groups, 1)
    contract.require(len(groups) > 0, "shape of group_index", "at least one group", groups)
    counts = groups.tolist()
    contract.trust(
        min(counts) >= 0 and sum(counts) <= rows,
        "group_index",
        f"counts whose sum is at most the {rows} rows",
        counts,
    )
    return len(counts)


def _used_rows(groups: Tensor | None, rows: int) -> int:
    return rows if groups is None else int(groups.sum())


def _swiglu(x: Tensor, left: bool, mode: int, form: tuple[float, float, float]) -> Tensor:
    if mode == 1:
        active, linear = x[:, 0::2], x[:, 1::2]
    else:
        first, second = x.chunk(2, -1)
        active, linear = (first, second) if left else (second, first)
    if mode == 0:
        return torch.nn.functional.silu(active) * linear
    limit, alpha, bias = form
    active, linear = active.clamp(max=limit), linear.clamp(-limit, limit)
    return active * torch.sigmoid(alpha * active) * (linear + bias)
