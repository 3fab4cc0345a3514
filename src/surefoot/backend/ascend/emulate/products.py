"""Matrix products of eight-bit numbers, and of groups of rows with a weight each.

Eight-bit products are summed exactly; a sum that does not fit in 32 bits is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import poison, rounded, wide
from surefoot.backend.ascend.emulate.contract import (
    Contract,
    HostInts,
    Operators,
    Tensors,
    operator,
)
from surefoot.backend.ascend.emulate.dtypes import dtype_of

LONGEST = 65535
MOST_GROUPS = 1024
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
INT32 = torch.int32


@dataclass(frozen=True)
class Kind:
    """A published combination of dtypes.

    Attributes:
        out: of the output.
        per_token: whether each row has a scale.
        scale: what the scale of a column may be.
        bias: what the bias may be.
    """

    out: torch.dtype
    per_token: bool
    scale: tuple[torch.dtype, ...]
    bias: tuple[torch.dtype, ...]


# Where the page and the meta function differ, what both allow.
MATMUL_KINDS = (
    Kind(torch.int8, False, (F32,), (INT32,)),
    Kind(F16, False, (F32,), (INT32,)),
    Kind(F16, True, (F32,), (INT32, F32)),
    Kind(BF16, False, (F32, BF16), (INT32, BF16, F32)),
    Kind(BF16, True, (F32, BF16), (INT32, BF16, F32)),
    Kind(INT32, False, (F32, BF16), (INT32,)),
)
GROUPED_KINDS = (
    Kind(BF16, False, (BF16,), (INT32,)),
    Kind(F16, False, (F32,), (INT32,)),
    Kind(BF16, True, (BF16,), (INT32,)),
    Kind(F16, True, (F32,), (INT32,)),
)
# Of products of floats: their dtype, and that of their bias.
FLOAT_BIAS = {F16: F16, BF16: F32, F32: F32}


class Products(Operators):
    """`npu_quant_matmul`, `npu_grouped_matmul`."""

    @operator
    def npu_quant_matmul(
        self,
        x1: Tensor,
        x2: Tensor,
        scale: Tensor,
        *,
        offset: Tensor | None = None,
        pertoken_scale: Tensor | None = None,
        bias: Tensor | None = None,
        output_dtype: int | None = None,
        x1_dtype: int | None = None,
        x2_dtype: int | None = None,
        pertoken_scale_dtype: int | None = None,
        scale_dtype: int | None = None,
        group_sizes: HostInts | None = None,
        y_scale: Tensor | None = None,
    ) -> Tensor:
        """x1 x2 scaled back: (x1 x2 + bias) * scale * pertoken_scale with a bias of int32.

        A bias of floats is added last. Rules of the operator's page and its meta function. Not
        emulated: four bits, int64 scales, batches of x2, groups.

        Args:
            x1: [..., M, K] int8, 2 to 6 dimensions, not empty.
            x2: [K, N] int8.
            scale: [1] or [N]; float32 or bfloat16, see MATMUL_KINDS.
            offset: [1] or [N] float32, added before rounding to int8.
            pertoken_scale: [M] float32.
            bias: [N]; see MATMUL_KINDS.
            output_dtype: float16, bfloat16, int32, or int8, which is the default.
            x1_dtype: none, like all that follow.
            x2_dtype: none.
            pertoken_scale_dtype: none.
            scale_dtype: none.
            group_sizes: none.
            y_scale: none.

        Returns:
            [..., M, N] in the output's dtype.
        """
        contract = Contract("npu_quant_matmul", "aclnnQuantMatmulV4", self.profile)
        contract.unused(
            x1_dtype=x1_dtype,
            x2_dtype=x2_dtype,
            pertoken_scale_dtype=pertoken_scale_dtype,
            scale_dtype=scale_dtype,
            group_sizes=group_sizes,
            y_scale=y_scale,
        )
        _check_factors(contract, x1, x2)
        columns = x2.shape[-1]
        out = dtype_of(output_dtype, torch.int8)
        _check_kind(contract, MATMUL_KINDS, out, (scale, bias, pertoken_scale))
        _check_columns(contract, "scale", scale, columns)
        if bias is not None:
            contract.shape("bias", bias, columns)
        if pertoken_scale is not None:
            contract.shape("pertoken_scale", pertoken_scale, x1.shape[-2])
        if offset is not None:
            contract.require(out == torch.int8, "offset", "an output of int8", output_dtype)
            contract.dtype("offset", offset, F32)
            _check_columns(contract, "offset", offset, columns)
        acc = _sums(contract, x1, x2, bias)
        assert out is not None
        if out == INT32:
            return acc.to(INT32)
        return _scaled_back(acc, scale, pertoken_scale, bias, offset, out)

    @operator
    def npu_grouped_matmul(
        self,
        x: Tensors,
        weight: Tensors,
        *,
        bias: Tensors | None = None,
        scale: Tensors | None = None,
        offset: Tensors | None = None,
        antiquant_scale: Tensors | None = None,
        antiquant_offset: Tensors | None = None,
        per_token_scale: Tensors | None = None,
        group_list: Tensor | None = None,
        activation_input: Tensors | None = None,
        activation_quant_scale: Tensors | None = None,
        activation_quant_offset: Tensors | None = None,
        split_item: int | None = 0,
        group_type: int | None = None,
        group_list_type: int | None = 0,
        act_type: int | None = 0,
        tuning_config: HostInts | None = None,
        output_dtype: int | None = None,
        x_dtype: int | None = None,
        weight_dtype: int | None = None,
        scale_dtype: int | None = None,
        per_token_scale_dtype: int | None = None,
    ) -> list[Tensor]:
        """Each group of rows times a weight of its own.

        Rules of the operator's page for one x, one weight and one output. The page wants groups
        that cover all rows; kernels do not look, and rows past the groups hold anything, so that
        is what they hold here.

        Args:
            x: one [M, K], contiguous; float32, float16, bfloat16 or int8.
            weight: one [E, K, N], the dtype of x; may be a transposed view.
            bias: one [E, N]: float32 for bfloat16, int32 for int8, otherwise the dtype of x.
            scale: one [E, N], for int8; see GROUPED_KINDS.
            offset: none, as all that is not named here.
            antiquant_scale: none.
            antiquant_offset: none.
            per_token_scale: one [M] float32, for int8.
            group_list: [E] int64.
            activation_input: none.
            activation_quant_scale: none.
            activation_quant_offset: none.
            split_item: 2 or 3. The default is not emulated.
            group_type: 0, groups of rows. The default is refused.
            group_list_type: 0 for running sums, 1 for counts, of which there must be several.
            act_type: 0.
            tuning_config: none.
            output_dtype: by default x's. int8 gives bfloat16 or float16.
            x_dtype: none.
            weight_dtype: none.
            scale_dtype: none.
            per_token_scale_dtype: none.

        Returns:
            One [M, N].
        """
        contract = Contract("npu_grouped_matmul", "aclnnGroupedMatmulV4", self.profile)
        contract.unused(
            offset=offset,
            antiquant_scale=antiquant_scale,
            antiquant_offset=antiquant_offset,
            activation_input=activation_input,
            activation_quant_scale=activation_quant_scale,
            activation_quant_offset=activation_quant_offset,
            tuning_config=tuning_config,
            x_dtype=x_dtype,
            weight_dtype=weight_dtype,
            scale_dtype=scale_dtype,
            per_token_scale_dtype=per_token_scale_dtype,
        )
        contract.require(group_type in (-1, 0, 2), "group_type", "-1, 0 or 2", group_type)
        contract.emulated(group_type == 0, "group_type", "0", group_type)
        contract.emulated(split_item in (2, 3), "split_item", "2 or 3", split_item)
        contract.emulated(act_type in (None, 0), "act_type", "0", act_type)
        one_x, one_weight = _only(contract, "x", x), _only(contract, "weight", weight)
        extras = tuple(
            None if value is None else _only(contract, name, value)
            for name, value in (
                ("bias", bias),
                ("scale", scale),
                ("per_token_scale", per_token_scale),
            )
        )
        out = dtype_of(output_dtype, one_x.dtype)
        _check_grouped(contract, one_x, one_weight, extras, out)
        stops = _stops(contract, group_list, group_list_type, one_x, one_weight)
        assert out is not None
        return [_grouped(contract, one_x, one_weight, extras, stops, out)]


def _check_factors(contract: Contract, x1: Tensor, x2: Tensor) -> None:
    for name, factor in (("x1", x1), ("x2", x2)):
        contract.emulated(factor.dtype != INT32, f"dtype of {name}", "int8", factor)
        contract.dtype(name, factor, torch.int8)
        contract.dims(name, factor, 2, 3, 4, 5, 6)
        contract.require(factor.numel() > 0, f"{name} not empty", "elements", factor)
        short = factor.shape[-1] <= LONGEST
        contract.require_size(short, f"last dimension of {name}", f"at most {LONGEST}", factor)
    contract.emulated(x2.dim() == 2, "dimensions of x2", "two", x2)
    same = x1.shape[-1] == x2.shape[0]
    contract.require(same, "k dim of x1 and x2", f"{x1.shape[-1]} rows", x2)


def _check_kind(
    contract: Contract,
    kinds: tuple[Kind, ...],
    out: torch.dtype | None,
    operands: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """The dtypes of scale, bias and scale per token go with the output's."""
    scale, bias, per_token = operands
    fitting = [kind for kind in kinds if kind.out == out]
    contract.require(len(fitting) > 0, "output_dtype", f"one of {[k.out for k in kinds]}", out)
    fitting = [kind for kind in fitting if kind.per_token == (per_token is not None)]
    contract.require(len(fitting) > 0, "scale per token", f"as {out} allows it", per_token)
    if scale is not None:
        contract.emulated(scale.dtype != torch.int64, "dtype of scale", "floats", scale)
        contract.dtype("scale", scale, *fitting[0].scale)
    if bias is not None:
        contract.dtype("bias", bias, *fitting[0].bias)
    if per_token is not None:
        contract.dtype("scale per token", per_token, F32)


def _check_columns(contract: Contract, name: str, values: Tensor, columns: int) -> None:
    contract.dims(name, values, 1)
    fits = len(values) in (1, columns)
    contract.require(fits, f"shape of {name}", f"[1] or [{columns}]", values)


def _sums(contract: Contract, x1: Tensor, x2: Tensor, bias: Tensor | None) -> Tensor:
    """Exact sums of products in float64, with a bias of int32."""
    acc = wide(x1) @ wide(x2)
    if bias is not None and bias.dtype == INT32:
        acc = acc + wide(bias)
    limits = torch.iinfo(INT32)
    fits = bool(((acc >= limits.min) & (acc <= limits.max)).all())
    contract.trust(fits, "range of sums", "sums that fit in 32 bits", x1)
    return acc


def _scaled_back(
    acc: Tensor,
    scale: Tensor,
    per_token: Tensor | None,
    bias: Tensor | None,
    offset: Tensor | None,
    out: torch.dtype,
) -> Tensor:
    values = acc * wide(scale)
    if per_token is not None:
        values = values * wide(per_token)[:, None]
    if bias is not None and bias.dtype != INT32:
        values = values + wide(bias)
    if out != torch.int8:
        return rounded(values, out)
    if offset is not None:
        values = values + wide(offset)
    return torch.round(values).clamp(-128, 127).to(torch.int8)


def _only(contract: Contract, name: str, tensors: Tensors) -> Tensor:
    contract.emulated(len(tensors) == 1, f"count of {name}", "one tensor", tensors)
    return tensors[0]


Extras = tuple[Tensor | None, ...]


def _check_grouped(
    contract: Contract, x: Tensor, weight: Tensor, extras: Extras, out: torch.dtype | None
) -> None:
    bias, scale, per_token = extras
    contract.dtype("x", x, F16, BF16, F32, torch.int8)
    contract.dims("x", x, 2)
    contract.contiguous(x=x)
    contract.emulated(weight.dim() == 3, "dimensions of weight", "three", weight)
    contract.dtype("weight", weight, x.dtype)
    groups, size, columns = weight.shape
    contract.shape("weight", weight, groups, x.shape[1], columns)
    short = max(size, columns) <= LONGEST and groups <= MOST_GROUPS
    wanted = f"at most {MOST_GROUPS} groups and sides of {LONGEST}"
    contract.require_size(short, "sides of weight", wanted, weight)
    if x.dtype == torch.int8:
        contract.require(scale is not None, "scale", "a tensor for int8", scale)
        _check_kind(contract, GROUPED_KINDS, out, (scale, bias, per_token))
    else:
        contract.require(scale is None, "scale", "none for floats", scale)
        contract.require(per_token is None, "scale per token", "none for floats", per_token)
        contract.require(out == x.dtype, "output_dtype", f"{x.dtype} like x", out)
        if bias is not None:
            contract.dtype("bias", bias, FLOAT_BIAS[x.dtype])
    for name, value in (("bias", bias), ("scale", scale)):
        if value is not None:
            contract.shape(name, value, groups, columns)
    if per_token is not None:
        contract.shape("per_token_scale", per_token, len(x))


def _stops(
    contract: Contract, groups: Tensor | None, kind: int | None, x: Tensor, weight: Tensor
) -> list[int]:
    """Where each group's rows stop."""
    contract.require(groups is not None, "group_list", "a tensor", groups)
    assert groups is not None
    contract.require(kind in (0, 1, 2), "group_list_type", "0, 1 or 2", kind)
    contract.emulated(kind != 2, "group_list_type", "0 or 1", kind)
    contract.dtype("group_list", groups, torch.int64)
    contract.shape("group_list", groups, len(weight))
    contract.require(kind != 1 or len(groups) != 1, "one group", "several counts", groups)
    given = groups.tolist()
    counts = given if kind == 1 else groups.diff(prepend=groups.new_zeros(1)).tolist()
    fits = min(counts, default=0) >= 0 and sum(counts) <= len(x)
    wanted = f"{'counts' if kind == 1 else 'running sums'} of at most the {len(x)} rows"
    contract.trust(fits, "group_list", wanted, given)
    return torch.tensor(counts).cumsum(0).tolist()


def _grouped(
    contract: Contract,
    x: Tensor,
    weight: Tensor,
    extras: Extras,
    stops: list[int],
    out: torch.dtype,
) -> Tensor:
    bias, scale, per_token = extras
    y = poison((len(x), weight.shape[2]), out)
    start = 0
    for group, stop in enumerate(stops):
        rows = slice(start, stop)
        own = None if bias is None else bias[group]
        if scale is None:
            product = wide(x[rows]) @ wide(weight[group])
            y[rows] = rounded(product if own is None else product + wide(own), out)
        else:
            acc = _sums(contract, x[rows], weight[group], own)
            tokens = None if per_token is None else per_token[rows]
            y[rows] = _scaled_back(acc, scale[group], tokens, None, None, out)
        start = stop
    return y
