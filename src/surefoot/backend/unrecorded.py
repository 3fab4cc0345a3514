"""Part of backends that run every step anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from surefoot.backend.operands import CacheShape, LayoutBounds, RowLayout
from surefoot.backend.protocol import Recording
from surefoot.backend.row_operators import RowOperators


class Unrecorded:
    """A backend that cannot record, as its capabilities say, and takes caches of any size."""

    def check_caches(self, caches: Sequence[CacheShape], page_tokens: int) -> None:
        """See Backend: any will do."""

    def record(
        self,
        layout: RowLayout,
        bounds: LayoutBounds,
        inputs: Sequence[Tensor],
        work: Callable[[RowOperators], Sequence[Tensor]],
    ) -> Recording | None:
        """See Backend."""
        raise NotImplementedError(f"{type(self).__name__} cannot record steps")
