"""The attention of one request, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import wide


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the visible keys; masked ones are not touched, whatever they hold.

    Args:
        q: [n, N, D].
        k: [K, L, D], where K divides N.
        v: [K, L, Dv].
        visible: [n, L] bool.
        scale: factor on the scores.
        sink: [N] a further score of each head, which joins the denominators only.

    Returns:
        [n, N, Dv] and log(sum(exp(score))) as [n, N], both float64; NaN in rows that see nothing.
    """
    count, heads, size = q.shape
    groups, keys = k.shape[:2]
    shared = heads // groups
    queries = wide(q).transpose(0, 1).reshape(groups, shared * count, size)
    scores = (queries @ wide(k).transpose(1, 2)).view(groups, shared, count, keys)
    scores = torch.where(visible, scores * scale, float("-inf"))
    if sink is not None:
        extra = wide(sink).view(groups, shared, 1, 1).expand(groups, shared, count, 1)
        scores = torch.cat([scores, extra], -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()[..., :keys]
    out = _weigh(weights, v, visible)
    blind = ~visible.any(1)
    out[:, :, blind], lse[:, :, blind] = float("nan"), float("nan")
    return (
        out.permute(2, 0, 1, 3).reshape(count, heads, v.shape[2]),
        lse.permute(2, 0, 1).reshape(count, heads),
    )


def _weigh(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Weights [K, g, n, L] times values [K, L, Dv]: [K, g, n, Dv]."""
    groups, shared, count, _ = weights.shape
    values, finite = wide(v), v.isfinite()
    clean = torch.where(finite, values, 0.0)
    out = (weights.flatten(1, 2) @ clean).view(groups, shared, count, v.shape[2])
    if not finite.all():
        # 0 * NaN is NaN: a visible entry that is not finite spoils its column, a masked one not.
        spoilt = (wide(visible) @ wide(~finite)) > 0
        out = torch.where(spoilt[:, None], float("nan"), out)
    return out
