"""Steps that were captured in the vendor's graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from surefoot.backend.ascend.places import Places
from surefoot.backend.ascend.rows import AscendRows
from surefoot.backend.ascend.vendor import Vendor
from surefoot.backend.operands import RowLayout
from surefoot.backend.row_operators import RowOperators

_WARM_UPS = 2
"""Runs before a capture: operators plan on the host when they first see a shape."""


class AscendRecording:
    """A captured step; see Recording."""

    def __init__(
        self,
        places: Places,
        rows: Callable[[Places], AscendRows],
        work: Callable[[RowOperators], Sequence[Tensor]],
        vendor: Vendor,
    ) -> None:
        """Run `work` on `rows` of these places a few times, then capture it."""
        self._places, self._vendor = places, vendor
        for _ in range(_WARM_UPS):
            work(rows(places))
        vendor.npu.synchronize()
        self._graph = vendor.npu.NPUGraph()
        mine = rows(places)
        with vendor.npu.graph(self._graph, auto_dispatch_capture=True):
            self.outputs = work(mine)
        self._host_lists = mine.host_lists

    def replay(self, layout: RowLayout) -> None:
        """See Recording: the attention operator gets its lists through the graph's update."""
        self._places.move(layout)
        if self._host_lists:
            lists = {keyword: list(values) for keyword, values in self._host_lists.items()}
            self._graph.update(cpu_update_input=[lists])
        self._graph.replay()
