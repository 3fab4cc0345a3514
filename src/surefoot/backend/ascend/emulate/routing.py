"""Choice of experts by the scores of a router.

Among equal scores the lowest expert wins, as in the published reference code; the device leaves
it open.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import poison, rounded, wide
from surefoot.backend.ascend.emulate.contract import Contract, Operators, operator

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MOST_EXPERTS, LEAST_IN_GROUP, EXPERTS_UNIT = 2048, 2, 32
MOST_CHOSEN = 1024


class Routing(Operators):
    """`npu_moe_gating_top_k`, `npu_moe_gating_top_k_softmax`."""

    @operator
    def npu_moe_gating_top_k(
        self,
        x: Tensor,
        k: int,
        *,
        bias: Tensor | None = None,
        input_ids: Tensor | None = None,
        tid2eid: Tensor | None = None,
        k_group: int = 1,
        group_count: int = 1,
        group_select_mode: int = 0,
        renorm: int = 0,
        norm_type: int = 0,
        out_flag: bool = False,
        routed_scaling_factor: float = 1.0,
        eps: float = 1e-20,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The k best experts out of the best groups, and their weights.

        Rules and order of steps of the operator's page. The bias counts for the choice only.

        Args:
            x: [T, E] scores; float32, float16 or bfloat16.
            k: how many, at most those in `k_group` groups.
            bias: [E], dtype of x.
            input_ids: not emulated, like `tid2eid`.
            tid2eid: see there.
            k_group: how many groups experts are taken from.
            group_count: of equal groups, each of more than two experts.
            group_select_mode: a group counts by its best (0) or the sum of its two best (1).
            renorm: 0.
            norm_type: softmax (0), or sigmoid (1), which is then divided by the sum of the chosen
                + eps.
            out_flag: whether the normed scores are wanted.
            routed_scaling_factor: on the weights.
            eps: see `norm_type`.

        Returns:
            Weights [T, k] in x's dtype, the best first; experts [T, k] int32; the normed scores
            [T, E] float32, undefined unless asked for.
        """
        contract = Contract("npu_moe_gating_top_k", "aclnnMoeGatingTopK", self.profile)
        contract.unused(input_ids=input_ids, tid2eid=tid2eid)
        contract.dtype("x", x, *FLOATS)
        contract.dims("x", x, 2)
        if bias is not None:
            contract.dtype("bias", bias, x.dtype)
            contract.shape("bias", bias, x.shape[1])
        contract.require(renorm == 0, "renorm", "0", renorm)
        contract.require(norm_type in (0, 1), "norm_type", "0 or 1", norm_type)
        modes = (0, 1)
        contract.require(
            group_select_mode in modes, "group_select_mode", "0 or 1", group_select_mode
        )
        _check_group_count(contract, x.shape[1], group_count)
        _check_choice(contract, x.shape[1], k, k_group, group_count)
        normed = wide(x).softmax(-1) if norm_type == 0 else wide(x).sigmoid()
        biased = normed if bias is None else normed + wide(bias)
        open_to = _in_best_groups(biased, group_count, k_group, group_select_mode)
        experts = _best(biased.masked_fill(~open_to, -torch.inf), k)
        weights = normed.gather(1, experts)
        if norm_type == 1:
            weights = weights / (weights.sum(-1, keepdim=True) + eps)
        weights = rounded(weights * routed_scaling_factor, x.dtype)
        out = normed.to(torch.float32) if out_flag else poison(x.shape, torch.float32)
        return weights, experts.to(torch.int32), out

    @operator
    def npu_moe_gating_top_k_softmax(
        self, x: Tensor, finished: Tensor | None = None, k: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The k greatest of the softmax of each row.

        Rules of the operator's page; `finished` and three dimensions are not emulated.

        Args:
            x: [T, E]; float32, float16 or bfloat16.
            finished: none.
            k: how many, up to E.

        Returns:
            The greatest [T, k] in x's dtype, the greatest first; where they lie, [T, k] int32; and
            int32 [T, k] with choice * T + token.
        """
        contract = Contract(
            "npu_moe_gating_top_k_softmax", "aclnnMoeGatingTopKSoftmax", self.profile
        )
        contract.unused(finished=finished)
        contract.dtype("x", x, *FLOATS)
        contract.dims("x", x, 2, 3)
        contract.emulated(x.dim() == 2, "dimensions of x", "two", x)
        contract.require(0 < k <= x.shape[1], "k", f"1 to {x.shape[1]}", k)
        contract.require_size(k <= MOST_CHOSEN, "k", f"at most {MOST_CHOSEN}", k)
        shares = wide(x).softmax(-1)
        experts = _best(shares, k)
        rows = torch.arange(len(x) * k, dtype=torch.int32).view(k, len(x)).t().contiguous()
        return rounded(shares.gather(1, experts), x.dtype), experts.to(torch.int32), rows


def _check_group_count(contract: Contract, experts: int, count: int) -> None:
    most = f"at most {MOST_EXPERTS}"
    contract.require_size(experts <= MOST_EXPERTS, "experts", most, experts)
    divides = count > 0 and experts % count == 0
    contract.require(divides, "group_count", f"a divisor of {experts}", count)
    size = experts // count
    more = f"more than {LEAST_IN_GROUP}"
    contract.require(size > LEAST_IN_GROUP, "experts of a group", more, size)
    padded = -(-size // EXPERTS_UNIT) * EXPERTS_UNIT * count
    wanted = f"at most {MOST_EXPERTS} in units of {EXPERTS_UNIT} a group"
    contract.require_size(padded <= MOST_EXPERTS, "padded experts", wanted, padded)


def _check_choice(contract: Contract, experts: int, k: int, k_group: int, count: int) -> None:
    contract.require(1 <= k_group <= count, "k_group", f"1 to {count}", k_group)
    most = experts // count * k_group
    contract.require(1 <= k <= most, "k", f"1 to {most}", k)


def _in_best_groups(scores: Tensor, count: int, k_group: int, mode: int) -> Tensor:
    """[T, E] bool: the experts of the groups that count most."""
    groups = scores.unflatten(1, (count, scores.shape[1] // count))
    worth = groups.amax(-1) if mode == 0 else groups.topk(2, -1).values.sum(-1)
    open_to = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, _best(worth, k_group), True)
    return open_to[..., None].expand_as(groups).reshape(scores.shape)


def _best(scores: Tensor, k: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
