"""Faults of padding, and what tests of recurrences share."""

from __future__ import annotations

from dataclasses import replace

from surefoot.backend.operands import DeltaCaches
from surefoot.step import Step
from tests.unit.backend.recurrences import Sizes
from tests.unit.backend.recurrent_steps import tensors

ODD = Sizes(1, 3, 16, 16)
"""Sizes of which nothing divides another."""


def aliased(step: Step) -> Step:
    """Planted: a padding row has the slot of a live row."""
    row = step.pad(len(step.rows) + 1, step.token_count + 2).rows[-1]
    return replace(step, rows=(*step.rows, replace(row, slot=step.rows[0].slot)))


def copied(caches: DeltaCaches) -> DeltaCaches:
    state, k, value, decay, beta = (part.clone() for part in tensors(caches))
    return DeltaCaches(state, k, value, decay, beta, caches.block)
