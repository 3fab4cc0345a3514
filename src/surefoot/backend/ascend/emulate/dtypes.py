"""Dtypes by the numbers that operators know them by."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# The order of torch's scalar types; published with the meta functions of torch_npu 2.13.0.
DTYPE_OF: Mapping[int, torch.dtype] = {
    0: torch.uint8,
    1: torch.int8,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    12: torch.qint8,
    13: torch.quint8,
    15: torch.bfloat16,
    16: torch.quint4x2,
}


def dtype_of(value: int | torch.dtype | None, default: torch.dtype) -> torch.dtype | None:
    """The dtype that is meant; None if the emulation does not know the number.

    Args:
        value: its number or the dtype itself, which pass alike; None for the default.
        default: what is meant by None.
    """
    if value is None:
        return default
    return value if isinstance(value, torch.dtype) else DTYPE_OF.get(value)
