"""Weights of linears that ModelSlim stores in 4 bits (`W4A8_DYNAMIC`).

    weight               int8 [n, k], or [n / 2, k] in packed checkpoints: each byte has the codes
                         of two outputs, that of the even one in its lower half
    weight_scale         [n, 1]
    weight_offset        [n, 1] of zeros
    weight_scale_second  [n, G], scales for G groups of inputs, to be multiplied with weight_scale
    weight_offset_second [n, G] of zeros; both are missing where an output has one scale
    scale_bias           [n, 1] or [n, 16], what the vendor's kernel adds as it takes codes for
                         numbers from 0 on. It follows from the rest and is not used here

A product of two scales is rounded to float16 and back, as other readers do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.operands import Int8Weight
from surefoot.errors import WeightsError
from surefoot.weights.checkpoint import Checkpoint
from surefoot.weights.stored_int8 import (
    FLOATS,
    beside,
    read_codes,
    read_vector,
    require_zeros,
)

PARTS = ("weight_scale", "weight_offset")
GROUPS = ("weight_scale_second", "weight_offset_second")
ADDED = "scale_bias"
_ADDED_COLUMNS = (1, 16)
_LOWEST, _HIGHEST = -8, 7


def unpacked(codes: Tensor) -> Tensor:
    """Codes [n, k] of bytes [n / 2, k] that hold two each."""
    low = (codes << 4) >> 4  # the sign comes along when it is shifted back
    return torch.stack((low, codes >> 4), 1).flatten(0, 1)


def packed(codes: Tensor) -> Tensor:
    """Bytes [n / 2, k] of codes [n, k] from -8 to 7; n is even."""
    even, odd = codes[0::2], codes[1::2]
    return (even & 0x0F) | (odd << 4)


def read_four_bits(stored: Checkpoint, name: str, is_packed: bool, group_size: int) -> Int8Weight:
    """The weight `name`.

    Args:
        stored: has it and what belongs to it.
        name: of the weight.
        is_packed: whether two codes share a byte.
        group_size: of inputs, as the checkpoint says for all weights; 0 if it does not. Inputs
            that it does not divide may have smaller groups.

    Raises:
        WeightsError: what belongs to it has another shape, or is of no use; the message names it.
    """
    codes = read_codes(stored, name)
    codes = unpacked(codes) if is_packed else codes
    outputs, inputs = codes.shape
    if codes.numel() and not _LOWEST <= int(codes.min()) <= int(codes.max()) <= _HIGHEST:
        raise WeightsError(
            f"tensor {name!r} must hold numbers of 4 bits, from {_LOWEST} to {_HIGHEST}; those "
            "that are packed in pairs need a description with version 1.0.0"
        )
    scales = read_vector(stored, name, "weight_scale", outputs).float()
    zeros = read_vector(stored, name, "weight_offset", outputs)
    require_zeros(name, "weight_offset", zeros)
    _check_added(stored, name, outputs)
    if beside(name, GROUPS[0]) in stored.names():
        second, offsets = (_groups(stored, name, part, outputs) for part in GROUPS)
        _check_groups(name, inputs, second, offsets, group_size)
        scales = (scales[:, None] * second.float()).half().float()
        scales = scales[:, 0].clone() if scales.shape[1] == 1 else scales
    if not scales.isfinite().all():
        raise WeightsError(
            f"tensor {beside(name, 'weight_scale')!r} and what it is multiplied with give scales "
            "that are not finite numbers"
        )
    return Int8Weight(codes, scales)


def _groups(stored: Checkpoint, name: str, part: str, outputs: int) -> Tensor:
    tensor = stored.read(beside(name, part))
    if tensor.dim() != 2 or len(tensor) != outputs or tensor.dtype not in FLOATS:
        raise WeightsError(
            f"tensor {beside(name, part)!r} has shape {list(tensor.shape)} in {tensor.dtype}, and "
            f"{outputs} outputs need a row of floats each"
        )
    return tensor


def _check_groups(name: str, inputs: int, second: Tensor, offsets: Tensor, group_size: int) -> None:
    own, count = beside(name, GROUPS[0]), second.shape[1]
    if not count or inputs % count:
        raise WeightsError(f"tensor {own!r} has {count} groups, which cannot share {inputs} inputs")
    if group_size and inputs % group_size == 0 and inputs // count != group_size:
        raise WeightsError(
            f"tensor {own!r} has groups of {inputs // count} inputs, and the description says "
            f"{group_size}"
        )
    if offsets.shape != second.shape:
        raise WeightsError(
            f"tensor {beside(name, GROUPS[1])!r} has shape {list(offsets.shape)} where "
            f"{list(second.shape)} belongs to its scales"
        )
    require_zeros(name, GROUPS[1], offsets)


def _check_added(stored: Checkpoint, name: str, outputs: int) -> None:
    """What is not used must at least belong there."""
    own = beside(name, ADDED)
    if own not in stored.names():
        return
    tensor = stored.read(own)
    shapes = ((outputs,), *((outputs, columns) for columns in _ADDED_COLUMNS))
    if tuple(tensor.shape) not in shapes or tensor.dtype not in FLOATS:
        raise WeightsError(
            f"tensor {own!r} has shape {list(tensor.shape)} in {tensor.dtype}, and {outputs} "
            f"outputs have 1 or 16 floats each there"
        )
    if not tensor.isfinite().all():
        raise WeightsError(f"tensor {own!r} must hold finite numbers")
