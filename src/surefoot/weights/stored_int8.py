"""What stands beside the weights of linears that a checkpoint stores in int8."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from surefoot.backend.operands import Int8Weight
from surefoot.errors import WeightsError
from surefoot.weights.checkpoint import Checkpoint
from surefoot.weights.counts import Linears

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
WEIGHT = ".weight"


@runtime_checkable
class Int8Checkpoint(Checkpoint, Protocol):
    """A checkpoint some of whose linears are stored in int8.

    Attributes:
        form: in what form, in a word.
    """

    form: str

    @property
    def linears(self) -> Linears:
        """How much is in int8."""

    def int8(self, name: str, read: Callable[[], Tensor]) -> Int8Weight | None:
        """The weight of this name if it is stored in int8; see taker.Int8Form."""


def beside(weight: str, part: str) -> str:
    """The name of what stands beside a weight."""
    return f"{weight.removesuffix(WEIGHT)}.{part}"


def read_codes(stored: Checkpoint, name: str) -> Tensor:
    """The stored weight, in memory of its own."""
    return stored.read(name).clone(memory_format=torch.contiguous_format)


def read_vector(
    stored: Checkpoint,
    name: str,
    part: str,
    outputs: int,
    dtypes: Collection[torch.dtype] = FLOATS,
) -> Tensor:
    """One number for each output of the weight `name`; in memory of its own.

    Raises:
        WeightsError: it has another shape or dtype.
    """
    own = beside(name, part)
    tensor = stored.read(own)
    if tuple(tensor.shape) not in ((outputs,), (outputs, 1)) or tensor.dtype not in dtypes:
        wanted = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise WeightsError(
            f"tensor {own!r} has shape {list(tensor.shape)} in {tensor.dtype}, and {outputs} "
            f"outputs need one number each in {wanted}"
        )
    return tensor.flatten().clone()


def read_number(stored: Checkpoint, name: str, part: str) -> float:
    """The one number of a part of the weight `name`.

    Raises:
        WeightsError: there are more.
    """
    tensor = stored.read(beside(name, part))
    if tensor.numel() != 1:
        raise WeightsError(f"tensor {beside(name, part)!r} must be a single number")
    return float(tensor)


def require_zeros(name: str, part: str, tensor: Tensor) -> None:
    """Check that a part of the weight `name`, an offset of codes, is of no use.

    Raises:
        WeightsError: it is not zero.
    """
    if tensor.any():
        raise WeightsError(f"tensor {beside(name, part)!r} must be zero throughout")
