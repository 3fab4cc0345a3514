"""The gated delta rule over chunks of 64 tokens, without triangular solves.

Sources: the recurrence and its chunk form are those of Gated DeltaNet (Yang, Kautz, Hatamizadeh,
2024). The inverse of a unit lower triangular matrix is grown by doubling: with X inverse on
diagonal blocks of size b, X - X @ E @ X is inverse on blocks of size 2b, where E holds the lower
left quarter of each block of size 2b.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

CHUNK = 64


def _quarters() -> Tensor:
    """Masks [levels, CHUNK, CHUNK] of the lower left quarters of blocks of 2, 4, .. CHUNK."""
    index = torch.arange(CHUNK)
    row, column = index[:, None], index[None, :]
    levels = []
    half = 1
    while half < CHUNK:
        same = row // (2 * half) == column // (2 * half)
        levels.append(same & (row // half > column // half))
        half *= 2
    return torch.stack(levels).float()


class _UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for strictly lower triangular L [N, CHUNK, CHUNK]."""

    @staticmethod
    def forward(ctx: FunctionCtx, lower: Tensor, quarters: Tensor) -> Tensor:
        inverse = torch.eye(CHUNK) - lower * quarters[0]
        for mask in quarters[1:]:
            inverse = inverse - inverse @ ((lower * mask) @ inverse)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        turned = inverse.transpose(-1, -2)
        return -(turned @ gradient @ turned), None


def gated_delta(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, write: Tensor) -> Tensor:
    """Read [B, T, V, dv] of the delta rule from an empty state.

    Args:
        query, key: [B, T, K, dk], of unit length; V is a multiple of K.
        value: [B, T, V, dv].
        decay: [B, T, V], logarithm of what the state keeps, at most 0.
        write: [B, T, V], in 0..1.
    """
    count = query.shape[1]
    rest = -count % CHUNK
    if rest:
        query, key, value, decay, write = (
            torch.cat([part, part.new_zeros(part.shape[0], rest, *part.shape[2:])], 1)
            for part in (query, key, value, decay, write)
        )
    read = _over_chunks(query * query.shape[-1] ** -0.5, key, value, decay, write)
    return read[:, :count]


def _chunks(x: Tensor) -> Tensor:
    """[B, T, heads, ...] to [B, heads, chunks, CHUNK, ...]."""
    split: Tensor = x.unflatten(1, (-1, CHUNK))
    return split.movedim(3, 1)


def _over_chunks(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, write: Tensor) -> Tensor:
    query, key, value, decay, write = (_chunks(x) for x in (query, key, value, decay, write))
    group = value.shape[1] // key.shape[1]
    total = decay.cumsum(-1)
    kept = total.exp()[..., None]
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(above, float("-inf")).exp()
    # Products of keys are the same for all value heads of a group.
    likeness = (key @ key.transpose(-1, -2)).repeat_interleave(group, dim=1)
    reading = (query @ key.transpose(-1, -2)).repeat_interleave(group, dim=1) * between
    key, query = (x.repeat_interleave(group, dim=1) for x in (key, query))
    quarters = _quarters()
    lower = likeness * between * write[..., None] * quarters.sum(0)
    inverse = _UnitLowerInverse.apply(lower.flatten(0, 2), quarters).view(lower.shape)  # type: ignore[no-untyped-call]
    fresh = inverse @ (value * write[..., None])
    erased = inverse @ (key * (write[..., None] * kept))
    late = key * (total[..., -1:] - total).exp()[..., None]
    corrections, carried = _carry(fresh, erased, late, query * kept, kept)
    read = carried + reading @ corrections
    return read.movedim(1, 3).flatten(1, 2)


def _carry(
    fresh: Tensor, erased: Tensor, late: Tensor, query: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Walk the state over the chunks; what each writes, and what it reads of those before it."""
    corrections = [fresh[:, :, 0]]
    carried = [torch.zeros_like(fresh[:, :, 0])]
    state = late[:, :, 0].transpose(-1, -2) @ fresh[:, :, 0]
    for chunk in range(1, fresh.shape[2]):
        both = torch.cat([erased[:, :, chunk], query[:, :, chunk]], -2) @ state
        gone, read = both.split(CHUNK, dim=-2)
        corrections.append(fresh[:, :, chunk] - gone)
        carried.append(read)
        if chunk + 1 < fresh.shape[2]:
            added = late[:, :, chunk].transpose(-1, -2) @ corrections[-1]
            state = state * kept[:, :, chunk, -1:] + added
    return torch.stack(corrections, 2), torch.stack(carried, 2)
