"""Rows of tokens brought to their experts, and the experts' answers brought back.

A token that goes to no expert, as padding does, is best given an expert of its own that is not
among the active ones: rows of experts that are not active come last and are not copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import poison, rounded, wide
from surefoot.backend.ascend.emulate.contract import Contract, HostInts, Operators, operator
from surefoot.backend.ascend.emulate.quantising import quantised

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MOST_EXPERTS = 10240
MOST_CHOSEN = 512
ALL_EXPERTS: HostInts = []


class Permuting(Operators):
    """`npu_moe_init_routing_v2`, `npu_moe_token_unpermute`, `npu_moe_finalize_routing`."""

    @operator
    def npu_moe_init_routing_v2(
        self,
        x: Tensor,
        expert_idx: Tensor,
        *,
        scale: Tensor | None = None,
        offset: Tensor | None = None,
        active_num: int = -1,
        expert_capacity: int = -1,
        expert_num: int = -1,
        drop_pad_mode: int = 0,
        expert_tokens_num_type: int = 0,
        expert_tokens_num_flag: bool = False,
        quant_mode: int = -1,
        active_expert_range: HostInts = ALL_EXPERTS,
        row_idx_type: int = 0,
        x_dtype: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A copy of each token for each of its experts, ordered by expert, then by token.

        Rules of the operator's page and its tiling; nothing is dropped, and rounding is dynamic or
        left out. Only the first n rows are defined, n being how many choices fall on active
        experts.

        Args:
            x: [T, H]; float32, float16, bfloat16 or, without rounding, int8.
            expert_idx: [T, k] int32, all below `expert_num`.
            scale: without rounding [T] float32, which goes along with the rows; with rounding
                factors on the rows first, [active experts, H] or [1, H] float32.
            offset: none.
            active_num: -1, or T * k.
            expert_capacity: not looked at.
            expert_num: how many experts there are.
            drop_pad_mode: 0.
            expert_tokens_num_type: 0 for running sums, 1 for counts.
            expert_tokens_num_flag: whether they are wanted.
            quant_mode: -1 for no rounding, 1 for int8 with a scale for each row.
            active_expert_range: the first active expert and the one behind the last; all if empty.
            row_idx_type: what the second result is, see there.
            x_dtype: none.

        Returns:
            [T * k, H] in x's dtype or int8. [T * k] int32: of choice j of token t, at t * k + j,
            the row it went to, -1 if to none; or for `row_idx_type` 1 the choice each row came
            from. int64 [active experts], how many rows they have. [T * k] float32, the scale of
            each row. What was not asked for is undefined.
        """
        contract = Contract("npu_moe_init_routing_v2", "aclnnMoeInitRoutingV3", self.profile)
        contract.unused(offset=offset, x_dtype=x_dtype)
        contract.emulated(drop_pad_mode == 0, "drop_pad_mode", "0", drop_pad_mode)
        contract.emulated(quant_mode in (-1, 1), "quant_mode", "-1 or 1", quant_mode)
        counted = expert_tokens_num_type
        contract.emulated(counted in (0, 1), "expert_tokens_num_type", "0 or 1", counted)
        contract.require(row_idx_type in (0, 1), "row_idx_type", "0 or 1", row_idx_type)
        first, stop = _active_range(contract, active_expert_range, expert_num)
        _check_tokens(contract, x, expert_idx, quant_mode)
        choices = expert_idx.numel()
        wanted = f"-1 or {choices}, all choices"
        contract.require(active_num in (-1, choices), "active_num", wanted, active_num)
        _check_scale(contract, scale, x, quant_mode, stop - first)
        experts = _expert_ids(contract, "expert_idx", expert_idx, expert_num).reshape(-1)
        # Those that are not active come last.
        order = torch.where((experts >= first) & (experts < stop), experts, expert_num)
        order = order.sort(stable=True).indices
        counts = torch.bincount(experts, minlength=expert_num)[first:stop]
        order = order[: int(counts.sum())]
        rows = (x, order // expert_idx.shape[1], experts[order] - first)
        expanded, scales = _expanded(rows, scale, quant_mode, choices)
        tokens = counts.cumsum(0) if counted == 0 else counts
        if not expert_tokens_num_flag:
            tokens = poison((), torch.int64)
        return expanded, _row_index(order, choices, row_idx_type), tokens, scales

    @operator
    def npu_moe_token_unpermute(
        self,
        permuted_tokens: Tensor,
        sorted_indices: Tensor,
        probs: Tensor | None = None,
        padded_mode: bool = False,
        restore_shape: HostInts | None = None,
    ) -> Tensor:
        """For each token the sum of its rows, weighted.

        Rules of the operator's page.

        Args:
            permuted_tokens: [T * k, H]; float32, float16 or bfloat16.
            sorted_indices: [T * k] int32, the row of choice j of token t at t * k + j; each row
                once.
            probs: [T, k] weights; float32, float16 or bfloat16. None for weights 1 and k = 1.
            padded_mode: False.
            restore_shape: none.

        Returns:
            [T, H] in the rows' dtype.
        """
        contract = Contract("npu_moe_token_unpermute", "aclnnMoeTokenUnpermute", self.profile)
        contract.emulated(not padded_mode, "padded_mode", "False", padded_mode)
        contract.unused(restore_shape=restore_shape)
        contract.dtype("permuted_tokens", permuted_tokens, *FLOATS)
        contract.dims("permuted_tokens", permuted_tokens, 2)
        contract.dtype("sorted_indices", sorted_indices, torch.int32)
        contract.shape("sorted_indices", sorted_indices, len(permuted_tokens))
        choices = 1
        if probs is not None:
            contract.dtype("probs", probs, *FLOATS)
            contract.dims("probs", probs, 2)
            choices = probs.shape[1]
            whole = probs.numel() == len(sorted_indices)
            contract.require(whole, "shape of probs", "a weight for each row", probs)
        few = choices <= MOST_CHOSEN
        contract.require_size(few, "choices of a token", f"at most {MOST_CHOSEN}", choices)
        rows = _rows_once(contract, "sorted_indices", sorted_indices, len(permuted_tokens))
        values = wide(permuted_tokens)[rows].unflatten(0, (len(rows) // choices, choices))
        if probs is not None:
            values = values * wide(probs)[..., None]
        return rounded(values.sum(1), permuted_tokens.dtype)

    @operator
    def npu_moe_finalize_routing(  # noqa: PLR0917
        self,
        expanded_permuted_rows: Tensor,
        skip1: Tensor | None,
        skip2: Tensor | None,
        bias: Tensor | None,
        scales: Tensor | None,
        expanded_src_to_dst_row: Tensor,
        export_for_source_row: Tensor | None,
        drop_pad_mode: int | None = 0,
        k: int | None = 1,
    ) -> Tensor:
        """skip1 + skip2 + the sum over choices of scale * (row + bias of the expert).

        Rules of the operator's page, which calls the last tensor expert_for_source_row; the modes
        that drop are not emulated.

        Args:
            expanded_permuted_rows: [T * k, H]; float32, float16 or bfloat16.
            skip1: [T, H] or None; all floats have the dtype of the rows.
            skip2: [T, H] or None; only together with `skip1`.
            bias: [E, H] or None.
            scales: [T, k], or None for 1.
            expanded_src_to_dst_row: [T * k] int32, the row of choice j of token t: at t + j * T
                in mode 0, at t * k + j in mode 2.
            export_for_source_row: [T, k] int32, which expert each choice is; needed by `bias`.
            drop_pad_mode: 0 or 2.
            k: choices of a token, unless `scales` tells.

        Returns:
            [T, H] in the rows' dtype.
        """
        contract = Contract("npu_moe_finalize_routing", "aclnnMoeFinalizeRoutingV2", self.profile)
        contract.require(drop_pad_mode in (0, 1, 2, 3), "drop_pad_mode", "0 to 3", drop_pad_mode)
        contract.emulated(drop_pad_mode in (0, 2), "drop_pad_mode", "0 or 2", drop_pad_mode)
        contract.dtype("rows", expanded_permuted_rows, *FLOATS)
        contract.dims("rows", expanded_permuted_rows, 2)
        count, size = expanded_permuted_rows.shape
        contract.dtype("expanded_src_to_dst_row", expanded_src_to_dst_row, torch.int32)
        contract.shape("expanded_src_to_dst_row", expanded_src_to_dst_row, count)
        choices = k if scales is None else scales.shape[-1]
        whole = choices is not None and choices > 0 and count % choices == 0
        contract.require(whole, "choices of a token", f"a divisor of the {count} rows", choices)
        assert choices is not None
        tokens = count // choices
        floats = {"skip1": skip1, "skip2": skip2, "bias": bias, "scales": scales}
        shapes = {"skip1": (tokens, size), "skip2": (tokens, size), "scales": (tokens, choices)}
        for name, value in floats.items():
            if value is not None:
                contract.dtype(name, value, expanded_permuted_rows.dtype)
                contract.shape(name, value, *shapes.get(name, (len(value), size)))
        both = skip2 is None or skip1 is not None
        contract.require(both, "skip1", "a tensor with skip2", skip1)
        rows = _row_ids(contract, "expanded_src_to_dst_row", expanded_src_to_dst_row, count)
        rows = rows.view(choices, tokens).t() if drop_pad_mode == 0 else rows.view(tokens, choices)
        values = wide(expanded_permuted_rows)[rows]
        values = values + _bias_of(contract, bias, export_for_source_row, (tokens, choices))
        if scales is not None:
            values = values * wide(scales)[..., None]
        out = values.sum(1)
        for skip in (skip1, skip2):
            out = out if skip is None else out + wide(skip)
        return rounded(out, expanded_permuted_rows.dtype)


def _active_range(contract: Contract, given: HostInts, experts: int) -> tuple[int, int]:
    contract.require(experts > 0, "expert_num", "more than 0", experts)
    most = f"at most {MOST_EXPERTS}"
    contract.require_size(experts <= MOST_EXPERTS, "expert_num", most, experts)
    if not given:
        return 0, experts
    fits = len(given) == 2 and 0 <= given[0] < given[1] <= experts
    wanted = f"two ascending numbers up to {experts}"
    contract.require(fits, "active_expert_range", wanted, given)
    return given[0], given[1]


def _check_tokens(contract: Contract, x: Tensor, experts: Tensor, quant_mode: int) -> None:
    kinds = FLOATS if quant_mode == 1 else (*FLOATS, torch.int8)
    contract.dtype("x", x, *kinds)
    contract.dims("x", x, 2)
    contract.dtype("expert_idx", experts, torch.int32)
    contract.dims("expert_idx", experts, 2)
    same = len(x) == len(experts)
    contract.require(same, "rows of expert_idx", f"{len(x)} like x", experts)


def _check_scale(
    contract: Contract, scale: Tensor | None, x: Tensor, quant_mode: int, active: int
) -> None:
    if scale is None:
        return
    contract.dtype("scale", scale, torch.float32)
    if quant_mode == -1:
        contract.shape("scale", scale, len(x))
    else:
        contract.dims("scale", scale, 2)
        fits = scale.shape[0] in (1, active) and scale.shape[1] == x.shape[1]
        wanted = f"[{active}, {x.shape[1]}] or one row"
        contract.require(fits, "shape of scale", wanted, scale)


def _expert_ids(contract: Contract, name: str, ids: Tensor, experts: int) -> Tensor:
    outside = (ids < 0) | (ids >= experts)
    came = ids[outside][:1].tolist()
    contract.trust(not came, f"range of {name}", f"experts below {experts}", came)
    return ids.long()


def _row_ids(contract: Contract, name: str, rows: Tensor, count: int) -> Tensor:
    outside = (rows < 0) | (rows >= count)
    came = rows[outside][:1].tolist()
    contract.trust(not came, f"range of {name}", f"rows below {count}", came)
    return rows.long()


def _rows_once(contract: Contract, name: str, rows: Tensor, count: int) -> Tensor:
    rows = _row_ids(contract, name, rows, count)
    times = torch.bincount(rows, minlength=count)
    twice = (times > 1).nonzero().flatten()[:1].tolist()
    contract.trust(not twice, f"repeats in {name}", "each row once", twice)
    return rows


def _expanded(
    rows: tuple[Tensor, Tensor, Tensor], scale: Tensor | None, quant_mode: int, choices: int
) -> tuple[Tensor, Tensor]:
    x, tokens, experts = rows
    count = len(tokens)
    scales = poison((choices,), torch.float32)
    if quant_mode == -1:
        expanded = poison((choices, x.shape[1]), x.dtype)
        expanded[:count] = x[tokens]
        if scale is not None:
            scales[:count] = scale[tokens]
        return expanded, scales
    values = wide(x[tokens])
    if scale is not None:
        values = values * wide(scale)[experts if len(scale) > 1 else 0]
    expanded = poison((choices, x.shape[1]), torch.int8)
    expanded[:count], scales[:count] = quantised(values)
    return expanded, scales


def _row_index(order: Tensor, choices: int, kind: int) -> Tensor:
    if kind == 1:
        index = poison((choices,), torch.int32)
        index[: len(order)] = order.to(torch.int32)
        return index
    index = torch.full((choices,), -1, dtype=torch.int32)
    index[order] = torch.arange(len(order), dtype=torch.int32)
    return index


def _bias_of(
    contract: Contract, bias: Tensor | None, experts: Tensor | None, shape: tuple[int, int]
) -> Tensor:
    """The bias of each choice."""
    if experts is not None:
        contract.dtype("export_for_source_row", experts, torch.int32)
        contract.shape("export_for_source_row", experts, *shape)
    if bias is None:
        return torch.zeros((), dtype=torch.float64)
    contract.require(experts is not None, "export_for_source_row", "a tensor with bias", experts)
    assert experts is not None
    return wide(bias)[_expert_ids(contract, "export_for_source_row", experts, len(bias))]
