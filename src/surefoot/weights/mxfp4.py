"""Weights in 4-bit floats, two in a byte, with a scale for each group along a row."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from surefoot.errors import WeightsError
from surefoot.weights.checkpoint import EncodedCheckpoint
from surefoot.weights.fp8 import SCALE, expand, read_scale

_BYTES = frozenset({"I8", "U8"})
# By code: one sign bit, two of exponent, one of fraction.
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_NUMBERS = torch.cat((_VALUES, -_VALUES))
# By byte: the number in the low half comes first in the row.
_PAIRS = torch.stack((_NUMBERS.repeat(16), _NUMBERS.repeat_interleave(16)), dim=-1)  # [256, 2]


class Fp4Checkpoint:
    """A checkpoint whose weights of packed 4-bit floats read as float32; their scales do not show.

    What is packed is seen from what is stored: bytes of two dimensions or more with a
    `..._scale_inv` beside them. Everything else is left as it is.

    Attributes:
        config: see Checkpoint.
        generation: see Checkpoint.
    """

    def __init__(self, stored: EncodedCheckpoint) -> None:
        """Expand the packed weights of `stored`."""
        self.config: Mapping[str, object] = stored.config
        self.generation: Mapping[str, object] = stored.generation
        self._stored = stored
        everything = frozenset(stored.names())
        scaled = (name for name in everything if name + SCALE in everything)
        self._packed = frozenset(name for name in scaled if _is_packed(stored, name))
        self._names = everything - {name + SCALE for name in self._packed}

    def names(self) -> Collection[str]:
        """All tensors but the scales of packed ones."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor when it is read, without reading it."""
        stored = self._stored.shape(name)
        return (*stored[:-1], 2 * stored[-1]) if name in self._packed else stored

    def read(self, name: str) -> Tensor:
        """One tensor, in float32 if it is packed.

        Raises:
            WeightsError: it cannot be read, or weight and scale do not belong together.
        """
        if name not in self._packed:
            return self._stored.read(name)
        scale = read_scale(self._stored, name)
        group = _group(name, self.shape(name), tuple(scale.shape))
        return expand(unpack(self._stored.read(name)), scale, (1, group))

    def close(self) -> None:
        """Let go of the files."""
        self._stored.close()
        self._names = frozenset()


def unpack(packed: Tensor) -> Tensor:
    """Look up the numbers of packed 4-bit floats.

    Args:
        packed: int8 or uint8 [..., k].

    Returns:
        float32 [..., 2 k].
    """
    # 32 bits are the smallest that can index; 64 would double what a large weight takes here.
    return _PAIRS[packed.view(torch.uint8).int()].flatten(-2)


def _is_packed(stored: EncodedCheckpoint, name: str) -> bool:
    return stored.encoding(name) in _BYTES and len(stored.shape(name)) >= 2


def _group(name: str, weight: tuple[int, ...], scale: tuple[int, ...]) -> int:
    """How many numbers of a row share a scale."""
    fits = len(scale) == len(weight) and scale[:-1] == weight[:-1]
    if not fits or not scale[-1] or weight[-1] % scale[-1]:
        raise WeightsError(
            f"tensor {name + SCALE!r} has shape {list(scale)}, which does not divide the rows of "
            f"a 4-bit weight of shape {list(weight)} into equal groups"
        )
    return weight[-1] // scale[-1]
