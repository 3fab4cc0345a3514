"""How a model takes its tensors from a checkpoint: by name and shape, with an account of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from surefoot.backend.operands import Int8Weight, Weight
from surefoot.errors import WeightsError
from surefoot.weights.checkpoint import Checkpoint
from surefoot.weights.names import listed, near_names

_FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})

Int8Form = Callable[[str, Callable[[], torch.Tensor]], Int8Weight | None]
"""From a tensor's name, and what reads it in float32, to the tensor in int8; None for floats."""


def no_int8(name: str, read: Callable[[], torch.Tensor]) -> Int8Weight | None:
    """All weights stay floats."""
    return None


class TensorTaker:
    """Hands a model its tensors, and keeps account of what was wanted and what is there.

    Args:
        checkpoint: where the tensors are; the caller closes it, after `finish`.
        dtype: what every taken tensor is converted to.
        progress: called with the name of each tensor just before it is read.
        int8: gives the weights of linears that are int8; by default none is.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        progress: Callable[[str], None],
        int8: Int8Form = no_int8,
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._progress = progress
        self._int8 = int8
        self._unused = set(checkpoint.names())

    @property
    def dtype(self) -> torch.dtype:
        """What every taken tensor is converted to."""
        return self._dtype

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Read one tensor; taking it again is fine.

        Returns:
            A contiguous tensor of `dtype`, by default the taker's, that shares no memory with the
            file.

        Raises:
            WeightsError: it is missing, has another shape, or is not stored as plain numbers;
                for a `dtype` of whole numbers, it is not stored in just that one.
        """
        self._find(name, shape)
        return self._read(name, dtype or self._dtype)

    def weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        """Read the weight of a linear, or of the same linear of all experts.

        Returns:
            An Int8Weight if the checkpoint stores it so, or if it is to be made so; else as `take`.

        Raises:
            WeightsError: as `take`.
        """
        self._find(name, shape)
        made = self._int8(name, lambda: self._read(name, torch.float32))
        return self._read(name, self._dtype) if made is None else made

    def shared(self, name: str, source: str) -> Int8Weight | None:
        """The weight of a linear called `name` whose tensor is stored as `source` only.

        Returns:
            An Int8Weight if it is to be made so, else None: then the tensor itself serves.
        """
        return self._int8(name, lambda: self._read(source, torch.float32))

    def has(self, name: str) -> bool:
        """Whether the checkpoint stores such a tensor, used or not."""
        return name in self._checkpoint.names()

    def has_module(self, module: str) -> bool:
        """Whether the checkpoint stores any tensor of the module of this name, used or not."""
        start = module.removesuffix(".") + "."
        return any(name.startswith(start) for name in self._checkpoint.names())

    def skip(self, prefix_or_name: str) -> None:
        """Leave out on purpose the tensor of this name and all tensors of the module of this name.

        `model.layers.1` covers `model.layers.1.mlp...` but not `model.layers.10`. It is no error
        when there are none.
        """
        module = prefix_or_name.removesuffix(".")
        self._unused = {
            name for name in self._unused if name != module and not name.startswith(module + ".")
        }

    def finish(self) -> None:
        """Check that nothing is left over.

        Raises:
            WeightsError: tensors were neither taken nor skipped; it lists the first of them.
        """
        if self._unused:
            raise WeightsError(
                f"the checkpoint has {len(self._unused)} tensors that this model does not use: "
                f"{listed(self._unused)}; its architecture is probably not the one in config.json"
            )

    def _find(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor can be taken, and note that it was."""
        if not self.has(name):
            raise WeightsError(f"tensor {name!r} is missing from the checkpoint{self._near(name)}")
        came = self._checkpoint.shape(name)
        if came != tuple(shape):
            raise WeightsError(
                f"tensor {name!r} has shape {list(came)} where config.json asks for {list(shape)}; "
                "config and weights do not belong together"
            )
        self._progress(name)
        self._unused.discard(name)

    def _near(self, name: str) -> str:
        near = near_names(name, self._checkpoint.names())
        return f"; names like it: {', '.join(near)}" if near else ""

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._checkpoint.read(name)
        if not dtype.is_floating_point and tensor.dtype != dtype:
            raise WeightsError(
                f"tensor {name!r} is stored as {_dtype_name(tensor.dtype)} where "
                f"{_dtype_name(dtype)} is wanted"
            )
        if dtype.is_floating_point and tensor.dtype not in _FLOATS:
            raise WeightsError(
                f"tensor {name!r} is stored as {_dtype_name(tensor.dtype)}, which is not read "
                "without its scales; use a checkpoint in float32, bfloat16 or float16"
            )
        return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
