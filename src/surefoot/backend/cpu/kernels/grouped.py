"""Products in int8 whose weights have scales by groups of inputs; see Int8Weight."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from surefoot.backend.cpu.kernels.algebra import Floats
from surefoot.backend.cpu.kernels.compile import exact, exact_kernel
from surefoot.backend.cpu.kernels.int8 import Sums, quantise

GroupedBytes = npt.NDArray[np.int8]
"""[G, rows, width]."""


@exact
def quantise_groups(x: Floats, codes: GroupedBytes, scales: Floats) -> None:
    """Codes and scales of each row of the input, whose groups lie apart.

    Args:
        x: [T, inputs].
        codes: [G, T, at least inputs / G], written to; 0 behind a group's inputs.
        scales: [T], written to.
    """
    groups = codes.shape[0]
    size = x.shape[1] // groups
    joint = np.empty((x.shape[0], x.shape[1]), np.int8)
    quantise(x, np.empty(0, np.float32), joint, scales)
    for g in range(groups):
        codes[g, :, :size] = joint[:, g * size : (g + 1) * size]
        codes[g, :, size:] = 0


@exact
def add_worth(sums: Sums, scales: Floats, first: bool, totals: Floats) -> None:
    """Add what the sums of one group are worth; the first group's is put there.

    Args:
        sums: [n].
        scales: [n].
        first: whether it is the first group.
        totals: [n], written to.
    """
    if first:
        for n in range(totals.shape[0]):
            totals[n] = np.float32(sums[n]) * scales[n]
    else:
        for n in range(totals.shape[0]):
            totals[n] = totals[n] + np.float32(sums[n]) * scales[n]


@exact
def finish(totals: Floats, row_scales: Floats, bias: Floats, stream: Floats, out: Floats) -> None:
    """Results of what all groups are worth.

    Args:
        totals: [T, at least outputs].
        row_scales: [T].
        bias: [outputs], or [0] for none.
        stream: [T, outputs] that the results are added to, or [0, 0] for none.
        out: [T, outputs], written to.
    """
    for t in range(out.shape[0]):
        row, target, scale = totals[t], out[t], row_scales[t]
        for n in range(target.shape[0]):
            target[n] = row[n] * scale
        if bias.shape[0] > 0:
            for n in range(target.shape[0]):
                target[n] = target[n] + bias[n]
        if stream.shape[0] > 0:
            for n in range(target.shape[0]):
                target[n] = stream[t, n] + target[n]


@exact_kernel("void(f4[:,::1],i1[:,:,::1],f4[::1])")
def quantise_group_rows(x: Floats, codes: GroupedBytes, scales: Floats) -> None:
    """See quantise_groups."""
    quantise_groups(x, codes, scales)


@exact_kernel("void(i4[:,::1],f4[::1],b1,f4[:,::1])")
def add_worth_rows(sums: Sums, scales: Floats, first: bool, totals: Floats) -> None:
    """See add_worth; for all rows of the input."""
    for t in range(totals.shape[0]):
        add_worth(sums[t], scales, first, totals[t])


@exact_kernel("void(f4[:,::1],f4[::1],f4[::1],f4[:,::1],f4[:,::1])")
def finish_rows(
    totals: Floats, row_scales: Floats, bias: Floats, stream: Floats, out: Floats
) -> None:
    """See finish."""
    finish(totals, row_scales, bias, stream, out)
