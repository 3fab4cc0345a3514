"""The backend's operators, emulated, compute what the reference computes on 16-bit numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.backend import AscendBackend
from surefoot.backend.ascend.emulate import RELAXED, EmulatedVendor
from surefoot.backend.ascend.machine import emulated_backend
from surefoot.backend.reference import ReferenceBackend
from tests.unit.backend.ascend.narrow import exact, narrow
from tests.unit.backend.conformance import OPERATORS

CASES = 10
DEEP_CASES = range(1000, 1240)

TOLERANCE = 2**-6
"""Results are rounded to 8 bits up to three times on the way, half a step each."""

OF_ROUNDED_KEYS = {"attend_pages": 2**-4}
"""Keys and queries are rounded before they meet, and the reference's are not: scores, which the
cases make as large as 30, move by as much as a sixteenth."""

OF_POOLS = ("paged_write", "attend_pages", "ring_write", "compress")
"""They return pools too, whose sink anybody may write to."""

TIED = ("choose_entries",)
"""Equal scores are left open here; see `test_latents`."""

OWN_RINGS = ("delta_rule", "fold_delta")
"""The cases' rings hold errors, this backend's hold values; see `test_delta`."""

ABSENT = ("attend_chosen",)

TESTED = [name for name in OPERATORS if name not in (*TIED, *OWN_RINGS, *ABSENT)]


@cache
def backend() -> AscendBackend:
    return emulated_backend(EmulatedVendor(RELAXED))


@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("operator", TESTED)
def test_operator_conforms_to_the_reference(operator: str, seed: int) -> None:
    assert failures(operator, seed) == []


@pytest.mark.deep
@pytest.mark.parametrize("operator", TESTED)
def test_operator_conforms_to_the_reference_on_many_cases(operator: str) -> None:
    found = {seed: failures(operator, seed) for seed in DEEP_CASES}
    assert {seed: faults for seed, faults in found.items() if faults} == {}


def failures(operator: str, seed: int) -> list[str]:
    """What is wrong, by place in the result."""
    run = OPERATORS[operator]
    want = run(exact(ReferenceBackend()), seed)
    got = run(narrow(backend()), seed)
    # The first result of `attend_pages` has tokens along its first axis, as others have slots.
    first = 1 if operator == "attend_pages" else 0 if operator in OF_POOLS else len(want)
    return [
        f"{place}: {fault}"
        for place, (one, other) in enumerate(zip(got, want, strict=True))
        if (
            fault := differing(one, other, place >= first, OF_ROUNDED_KEYS.get(operator, TOLERANCE))
        )
    ]


def differing(got: Tensor, want: Tensor, sink: bool, tolerance: float = TOLERANCE) -> str:
    """What is wrong with one result."""
    if got.shape != want.shape:
        return f"{list(got.shape)}, not {list(want.shape)}"
    if sink:
        got, want = got[1:], want[1:]
    close = torch.allclose(got.float(), want.float(), tolerance, tolerance, equal_nan=True)
    return "" if close else "values differ"


Spoil = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@pytest.mark.parametrize("operator", TESTED)
def test_a_small_error_would_be_seen(operator: str) -> None:
    """The tolerance has no room for a wrong row: results of another case are not close."""
    run, off = OPERATORS[operator], 0
    for seed in range(1, 9):
        want, other = (run(exact(ReferenceBackend()), each) for each in (seed, seed + 100))
        for one, two in zip(want, other, strict=True):
            rows = min(len(one), len(two))
            same_shape = one[:rows].shape == two[:rows].shape and one[:rows].numel() > 0
            off += bool(not same_shape or differing(one[:rows], two[:rows], sink=False))
    assert off > 4
