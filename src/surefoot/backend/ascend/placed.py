"""What all row operators of this backend share: the places of a step, and entries by position."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.places import Derived, Places
from surefoot.backend.ascend.vendor import Vendor


class PlacedRows:
    """A step on the device. Reads tensors only, so that its calls can be recorded."""

    def __init__(self, places: Places, vendor: Vendor) -> None:
        """Serve the rows of `places` with operators of `vendor`."""
        self.places = places
        self.derived = Derived(places)
        self.vendor = vendor

    def entries_at(self, own: Tensor, ring: Tensor, positions: Tensor) -> Tensor:
        """What each token's row has at some positions: of the step, or of the ring before it.

        Args:
            own: [T, *shape] of the step.
            ring: [slots, capacity, *shape].
            positions: [T, n] int64; what a negative one gives is open.

        Returns:
            [T, n, *shape] in own's dtype.
        """
        places, derived = self.places, self.derived
        behind = positions - derived.of_rows(places.first)[:, None]
        mine = derived.of_rows(places.begin)[:, None] + behind.clamp(min=0)
        slots = derived.of_rows(places.slot)[:, None].expand_as(positions)
        before = ring[slots, positions % ring.shape[1]].to(own.dtype)
        current = own[mine.clamp(max=max(0, len(own) - 1))]
        is_own = (behind >= 0).view(*positions.shape, *[1] * (own.dim() - 1))
        return torch.where(is_own, current, before)
