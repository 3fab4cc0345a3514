"""Checkpoints in 8-bit floats with a scale for each block of a weight, expanded when read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from surefoot.errors import WeightsError
from surefoot.weights.checkpoint import Checkpoint

SCALE = "_scale_inv"
_METHOD = "fp8"
_ADVICE = "use an unquantised, a block-scaled fp8, an int8 or a GGUF checkpoint"


class BlockScaledCheckpoint:
    """A checkpoint whose scaled weights read as float32; their scales do not show.

    What is scaled is seen from what is stored: `x.weight` with a `x.weight_scale_inv` beside it,
    which holds for each block the factor that gives the weight back. Everything else is read as it
    is, and a scale that belongs to nothing is shown, so that it is reported as unused.

    Attributes:
        config: see Checkpoint.
        generation: see Checkpoint.
    """

    def __init__(
        self, stored: Checkpoint, block: tuple[int, int], *, other_squares: bool = False
    ) -> None:
        """Expand the scaled weights of `stored`.

        Args:
            stored: weights and scales.
            block: rows and columns of a block.
            other_squares: where `block` does not fit a weight and its scales, take the square
                block that divides the weight into just these scales.
        """
        self.config: Mapping[str, object] = stored.config
        self.generation: Mapping[str, object] = stored.generation
        self._stored, self._block, self._other_squares = stored, block, other_squares
        everything = frozenset(stored.names())
        self._scaled = frozenset(name for name in everything if name + SCALE in everything)
        self._names = everything - {name + SCALE for name in self._scaled}

    def names(self) -> Collection[str]:
        """All tensors but the scales of those that have one."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        return self._stored.shape(name)

    def read(self, name: str) -> Tensor:
        """One tensor, in float32 if it is scaled.

        Raises:
            WeightsError: it cannot be read, or weight and scale do not belong together.
        """
        tensor = self._stored.read(name)
        if name not in self._scaled:
            return tensor
        if tensor.dtype != torch.float8_e4m3fn:
            raise WeightsError(
                f"tensor {name!r} has scales, so it must be stored as float8_e4m3fn, and it is "
                f"{str(tensor.dtype).removeprefix('torch.')}"
            )
        scale = read_scale(self._stored, name)
        return expand(tensor, scale, self._block_of(name, tensor, scale))

    def close(self) -> None:
        """Let go of the files."""
        self._stored.close()
        self._names = frozenset()

    def _block_of(self, name: str, weight: Tensor, scale: Tensor) -> tuple[int, int]:
        """The block that fits a weight and its scales."""
        wanted = _scale_shape(tuple(weight.shape), self._block)
        if tuple(scale.shape) == wanted:
            return self._block
        side = _square_side(tuple(weight.shape), tuple(scale.shape)) if self._other_squares else 0
        if not side:
            raise WeightsError(
                f"tensor {name + SCALE!r} has shape {list(scale.shape)} where {list(wanted)} "
                f"belongs to a weight of shape {list(weight.shape)}"
            )
        return side, side


def read_scale(stored: Checkpoint, name: str) -> Tensor:
    """The scales of the weight `name`, in their stored dtype.

    Raises:
        WeightsError: they are whole numbers, which would have to be exponents or codes.
    """
    scale = stored.read(name + SCALE)
    if not scale.is_floating_point():
        raise WeightsError(
            f"tensor {name + SCALE!r} holds scales, so it must be stored in floating point, and "
            f"it is {str(scale.dtype).removeprefix('torch.')}"
        )
    return scale


def expand(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply each block by its scale; blocks at the edges may be cut off.

    Args:
        weight: [..., n, k].
        scale: [..., ceil(n / block rows), ceil(k / block columns)].
        block: rows and columns of a block.

    Returns:
        [..., n, k] float32.
    """
    rows, columns = weight.shape[-2:]
    factors = scale.float().repeat_interleave(block[0], -2)[..., :rows, :]
    factors = factors.repeat_interleave(block[1], -1)[..., :columns]
    return weight.float() * factors


def _scale_shape(weight: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    if len(weight) < 2:
        return ()
    return (*weight[:-2], -(-weight[-2] // block[0]), -(-weight[-1] // block[1]))


def _square_side(weight: tuple[int, ...], scale: tuple[int, ...]) -> int:
    """Side of the square blocks that divide the weight into these scales; 0 if there are none."""
    if len(weight) < 2 or len(scale) != len(weight) or not scale[-1]:
        return 0
    side = weight[-1] // scale[-1]
    divided = (*scale[:-2], scale[-2] * side, scale[-1] * side)
    return side if divided == weight else 0


def scaled_block(config: Mapping[str, object], folder: Path) -> tuple[int, int] | None:
    """The block of a block-scaled checkpoint, or None for one that is not quantised.

    Raises:
        WeightsError: it is quantised in another way; the message names it.
    """
    for key in ("quantization_config", "compression_config"):
        if details := config.get(key):
            return _block_of(details, f"{key} in config.json", folder)
    return None


def _block_of(details: object, where: str, folder: Path) -> tuple[int, int]:
    entries = details if isinstance(details, Mapping) else {}
    method, block = entries.get("quant_method"), entries.get("weight_block_size")
    if method != _METHOD:
        raise WeightsError(
            f"{folder} is quantised with {method or 'an unnamed method'} ({where}), "
            f"which is not supported; {_ADVICE}"
        )
    match block:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise WeightsError(
        f"{folder} is quantised with {method} ({where}), of which only the block-scaled form is "
        f"supported, and its weight_block_size is {block!r}; {_ADVICE}"
    )
