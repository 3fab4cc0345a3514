"""Row operators of the Ascend backend on the emulation, and recorded steps of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from surefoot.backend.ascend.convolution import causal_conv
from surefoot.backend.ascend.delta import delta_rule, fold_delta
from surefoot.backend.ascend.emulate import RELAXED, EmulatedVendor
from surefoot.backend.ascend.latents import LatentRows
from surefoot.backend.ascend.places import Places
from surefoot.backend.ascend.vendor import Vendor
from surefoot.backend.operands import DeltaCaches, DeltaInputs, Fold, LayoutBounds, RowLayout
from surefoot.backend.reference import ReferenceBackend
from surefoot.backend.reference_rows import ReferenceRows
from surefoot.backend.tape import Tape
from surefoot.step import Row, Step

NARROW = torch.bfloat16
HALF_STEP = 2**-8
"""Most that rounding to bfloat16 changes a number, as a part of it: 8 bits are kept."""

CPU = torch.device("cpu")


class EmulatedRows(LatentRows, ReferenceRows):
    """The operators under test; pages, which are not, come from the reference."""

    def __init__(self, places: Places, layout: RowLayout, vendor: Vendor) -> None:
        LatentRows.__init__(self, places, vendor)
        self.layout = layout

    def causal_conv(self, x: Tensor, ring: Tensor, weight: Tensor) -> Tensor:
        return causal_conv(self, x, ring, weight)

    def delta_rule(self, inputs: DeltaInputs, caches: DeltaCaches) -> Tensor:
        return delta_rule(self, inputs, caches)


class EmulatedBackend(ReferenceBackend):
    """Enough of a backend to compute recurrences and latents."""

    made: type[EmulatedRows] = EmulatedRows

    def __init__(self, vendor: EmulatedVendor | None = None) -> None:
        super().__init__()
        self.vendor = cast("Vendor", vendor or EmulatedVendor(RELAXED))

    def rows(self, layout: RowLayout) -> EmulatedRows:
        return self.made(Places.of(layout, CPU), layout, self.vendor)

    def fold_delta(self, caches: DeltaCaches, folds: Sequence[Fold]) -> None:
        fold_delta(self.vendor, caches, folds)


class Recorded:
    """Work on the rows of a padded step, recorded once for steps of that many rows and tokens."""

    def __init__(
        self,
        rows: int,
        width: int,
        page_tokens: int,
        longest_table: int,
        work: Callable[[EmulatedRows], Sequence[Tensor]],
        bounded: bool = False,
    ) -> None:
        """Record steps of up to `rows` rows of up to `width` tokens, from one of padding alone."""
        self._rows, self.tokens = rows, rows * width + 1
        blank = self.padded(Step.of([], page_tokens)).layout()
        self.places = Places(blank, LayoutBounds(longest_table, bounded), CPU)
        self._tape, vendor = Tape(), EmulatedVendor(RELAXED)
        vendor.tapes.append(self._tape)
        with torch.inference_mode(), self._tape.recording(keep=False):
            self._outputs = work(EmulatedRows(self.places, blank, cast("Vendor", vendor)))

    def padded(self, step: Step) -> Step:
        """A step as long as what is recorded."""
        return step.pad(self._rows + 1, self.tokens)

    def replay(self, step: Step) -> Sequence[Tensor]:
        """What the work gives for another step, padding included."""
        self.places.move(self.padded(step).layout())
        self._tape.replay()
        return self._outputs


def step_of(layout: RowLayout) -> Step:
    """A step with the rows of a layout; the tokens do not matter."""
    rows = [
        Row(
            tokens=[0] * layout.length(row),
            first=first,
            certain=max(0, layout.settles[row] - first),
            table=layout.tables[row],
            slot=layout.slots[row],
            visible_from=layout.visible_from[row],
            wanted=0,
            settled=layout.settled[row],
        )
        for row, first in enumerate(layout.first)
    ]
    return Step.of(rows, layout.page_tokens)
