"""The gated delta rule from checkpoints, block by block, by the vendor's chunked operator.

    checkpoint of each row -> block 0 of each row -> block 1 -> ...     one call each
         at `base`            inputs of the ring, then of the step; zeros behind the row's last

Blocks lie at absolute positions, and each call gets whole blocks, of which a row that ends earlier
fills the rest with inputs that change nothing (k = v = q = 0, beta = 0, decay = 0). So what a token
gets does not depend on how its row was cut or on the rows beside it, as far as the operator itself
keeps sequences apart.

The operator takes and gives 16-bit states and reads v itself. So the rings keep v, and a
checkpoint, though stored as float32, holds numbers of 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.ascend.placed import PlacedRows
from surefoot.backend.ascend.vendor import Vendor
from surefoot.backend.operands import DeltaCaches, DeltaInputs, Fold

_NARROW = torch.bfloat16


@dataclass(frozen=True)
class Block:
    """What one call reads, all rows having `block` positions.

    Attributes:
        q: [m, block, Hk, dk], like k and v in the operator's dtype.
        k: [m, block, Hk, dk].
        v: [m, block, Hv, dv].
        decay: [m, block, Hv] float32.
        beta: [m, block, Hv] in the operator's dtype.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    def run(self, vendor: Vendor, state: Tensor) -> tuple[Tensor, Tensor]:
        """From states [m, Hv, dv, dk]: outputs [m * block, Hv, dv], and the states after it."""
        count, block = self.q.shape[:2]
        lengths = torch.full((count,), block, dtype=torch.int32, device=state.device)
        parts = (self.q, self.k, self.v, self.beta, self.decay)
        q, k, v, beta, decay = (part.flatten(0, 1).contiguous() for part in parts)
        return vendor.npu_chunk_gated_delta_rule(
            q,
            k,
            v,
            beta=beta,
            initial_state=state.contiguous(),
            actual_seq_lengths=lengths,
            scale=1.0,
            g=decay,
        )


def delta_rule(rows: PlacedRows, inputs: DeltaInputs, caches: DeltaCaches) -> Tensor:
    """See RowOperators. Padding rows get zeros where they are longer than what is computed."""
    places, block, inputs = rows.places, caches.block, _narrowed(inputs)
    # Entry 0 takes what belongs to no token; token t is entry t + 1.
    out = torch.zeros(places.tokens + 1, *inputs.v.shape[1:], dtype=_NARROW, device=inputs.v.device)
    if not places.tokens:
        return out[1:].float()
    base = places.settled // block * block
    due = places.settles // block - places.settled // block
    state = kept = _entering(caches, places.slot, base)
    for number, some in enumerate(rows.derived.walk(block)):
        begin = base.index_select(0, some) + number * block
        entries, of_token = _entries(rows, some, begin, inputs, caches)
        whole = len(some) == places.rows
        found, after = entries.run(rows.vendor, state if whole else state.index_select(0, some))
        rows.write(out, of_token.view(-1, 1), found)
        state = after if whole else state.index_copy(0, some, after)
        kept = torch.where((due == number + 1)[:, None, None, None], state, kept)
    _store(rows.vendor, caches.state, places.slot.masked_fill(due == 0, 0), kept)
    rows.ring_write(caches.k, inputs.k)
    rows.ring_write(caches.value, inputs.v)
    rows.ring_write(caches.decay, inputs.decay)
    rows.ring_write(caches.beta, inputs.beta)
    return out[1:].float()


def fold_delta(vendor: Vendor, caches: DeltaCaches, folds: Sequence[Fold]) -> None:
    """See Backend."""
    if not folds:
        return
    numbers = torch.tensor([(fold.slot, fold.base) for fold in folds], device=caches.state.device)
    slot, base = numbers.unbind(1)
    positions = base[:, None] + torch.arange(caches.block, device=base.device)
    at = slot[:, None], positions % caches.k.shape[1]
    k, v, beta = (ring[at].to(_NARROW) for ring in (caches.k, caches.value, caches.beta))
    entries = Block(torch.zeros_like(k), k, v, caches.decay[at].float(), beta)
    _, after = entries.run(vendor, _entering(caches, slot, base))
    _store(vendor, caches.state, slot, after)


def _narrowed(inputs: DeltaInputs) -> DeltaInputs:
    """Inputs as the operator takes them, which is what the rings keep."""
    return DeltaInputs(
        q=inputs.q.to(_NARROW),
        k=inputs.k.to(_NARROW),
        v=inputs.v.to(_NARROW),
        decay=inputs.decay,
        beta=inputs.beta.to(_NARROW),
    )


def _entries(
    rows: PlacedRows, some: Tensor, begin: Tensor, inputs: DeltaInputs, caches: DeltaCaches
) -> tuple[Block, Tensor]:
    """One block of some rows [m], from positions `begin` [m] on.

    Returns:
        The block; and [m, block] int64, one more than the token of each position, 0 for none.
    """
    places = rows.places
    positions = begin[:, None] + torch.arange(caches.block, device=begin.device)
    stop = (places.first + places.count).index_select(0, some)[:, None]
    exists, lines = positions < stop, rows.lines(some, positions)

    def existing(found: Tensor) -> Tensor:
        mask = exists[..., None] if found.dim() == 3 else exists[..., None, None]
        return torch.where(mask, found, 0)

    return Block(
        q=existing(lines.of_step(inputs.q)),
        k=existing(lines.entries(inputs.k, caches.k)),
        v=existing(lines.entries(inputs.v, caches.value)),
        decay=existing(lines.entries(inputs.decay, caches.decay)),
        beta=existing(lines.entries(inputs.beta, caches.beta)),
    ), (lines.own + 1).masked_fill(~(exists & lines.is_own), 0)


def _entering(caches: DeltaCaches, slot: Tensor, base: Tensor) -> Tensor:
    """Checkpoints as the operator takes states, [m, Hv, dv, dk]; zeros before position 0."""
    state = caches.state.index_select(0, slot).mT.to(_NARROW)
    return torch.where((base == 0)[:, None, None, None], 0, state)


def _store(vendor: Vendor, state: Tensor, slot: Tensor, after: Tensor) -> None:
    """Put states of the operator's form into slots [m]; the sink may come more than once."""
    updates = after.mT.to(state.dtype).flatten(1)
    vendor.npu_scatter_nd_update_(state.view(len(state), -1), slot[:, None], updates)
