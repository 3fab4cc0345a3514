"""What all row operators of this backend share: a step's places, entries by position, writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.ascend.places import Derived, Places
from surefoot.backend.ascend.vendor import Vendor


@dataclass(frozen=True)
class Lines:
    """Some positions of some rows: where in the step their tokens are, or where in a ring.

    Attributes:
        position: [m, n] int64, absolute.
        slot: [m, 1] int64, rows of the bounded pools.
        is_own: [m, n] bool, whether the step has it; what comes behind a row counts as such.
        own: [m, n] int64, index into the step's tokens; any token where it is not the step's.
    """

    position: Tensor
    slot: Tensor
    is_own: Tensor
    own: Tensor

    def entries(self, own: Tensor, ring: Tensor) -> Tensor:
        """What is there, [m, n, *shape] in own's dtype; what a negative position gives is open.

        Args:
            own: [T, *shape] of the step.
            ring: [slots, capacity, *shape], entries from before it.
        """
        before = ring[self.slot, self.position % ring.shape[1]].to(own.dtype)
        return torch.where(_spread(self.is_own, before), own[self.own], before)

    def of_step(self, own: Tensor) -> Tensor:
        """What the step has there, [m, n, *shape], and zeros elsewhere."""
        found = own[self.own]
        return torch.where(_spread(self.is_own, found), found, 0)


class PlacedRows:
    """A step on the device. Reads tensors only, so that its calls can be recorded."""

    def __init__(self, places: Places, vendor: Vendor) -> None:
        """Serve the rows of `places` with operators of `vendor`."""
        self.places = places
        self.derived = Derived(places)
        self.vendor = vendor

    def lines(self, rows: Tensor, positions: Tensor) -> Lines:
        """Positions [m, n] int64 of rows [m] int64 each."""
        places = self.places
        behind = positions - places.first.index_select(0, rows)[:, None]
        own = places.begin.index_select(0, rows)[:, None] + behind
        slot = places.slot.index_select(0, rows)[:, None]
        return Lines(positions, slot, behind >= 0, own.clamp(0, max(0, places.tokens - 1)))

    def entries_at(self, own: Tensor, ring: Tensor, positions: Tensor) -> Tensor:
        """What each token's row has at some positions: of the step, or of the ring before it.

        Args:
            own: [T, *shape] of the step.
            ring: [slots, capacity, *shape].
            positions: [T, n] int64; what a negative one gives is open.

        Returns:
            [T, n, *shape] in own's dtype.
        """
        return self.lines(self.places.row, positions).entries(own, ring)

    def ring_write(self, ring: Tensor, entries: Tensor) -> None:
        """See RowOperators; what is not among the last of its row goes to the sink."""
        places, derived, capacity = self.places, self.derived, ring.shape[1]
        left = derived.of_rows(places.first + places.count) - places.position
        slot = derived.of_rows(places.slot).masked_fill(left > capacity, 0)
        column = places.position % capacity
        flat = ring.view(ring.shape[0], capacity, -1)
        self.write(flat, torch.stack((slot, column), dim=-1), entries.flatten(1))

    def write(self, target: Tensor, indices: Tensor, entries: Tensor) -> None:
        """Put entries [n, ...] at indices [n, a] of `target`, in place; n may be 0."""
        if len(indices):
            updates = entries.to(target.dtype).contiguous()
            self.vendor.npu_scatter_nd_update_(target, indices, updates)


def _spread(mask: Tensor, entries: Tensor) -> Tensor:
    """A mask [m, n] as wide as entries [m, n, ...]."""
    return mask.view(*mask.shape, *[1] * (entries.dim() - 2))
