"""How a model keeps the weights of its linears: in floats, made int8 here, or int8 as stored."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.backend.protocol import Backend
from surefoot.config import W4A8
from surefoot.errors import SettingError
from surefoot.model.model import Description
from surefoot.model.registry import Family
from surefoot.weights.counts import NO_LINEARS, Linears
from surefoot.weights.int8 import made_int4, made_int8
from surefoot.weights.load import Checkpoint
from surefoot.weights.stored_int8 import Int8Checkpoint
from surefoot.weights.taker import Int8Form, no_int8

FLOATS = "floats"

_SCALE_BYTES = 4


@dataclass(frozen=True)
class WeightForm:
    """One of the ways.

    Attributes:
        name: FLOATS, what the checkpoint calls itself, or what was asked for.
        linears: how much is in int8.
        int8: makes it or reads it.
    """

    name: str
    linears: Linears
    int8: Int8Form

    def bytes(self, description: Description, itemsize: int) -> int:
        """What the parameters take where floats have `itemsize` bytes."""
        linears = self.linears
        floats = description.parameters - linears.numbers + linears.copied
        return floats * itemsize + linears.numbers + linears.outputs * _SCALE_BYTES


def told(form: str, dtype: str) -> str:
    """A form in words: "int8 (w8a8) and float32"."""
    if form == W4A8:
        return f"int8 (w4a8, whose 4 bits are kept in 8) and {dtype}"
    return dtype if form == FLOATS else f"int8 ({form}) and {dtype}"


def weight_form(
    checkpoint: Checkpoint | None,
    family: Family,
    description: Description,
    quantization: str | None,
    backend: Backend,
) -> WeightForm:
    """How weights will be kept. A checkpoint that is int8 already stays as it is.

    Args:
        checkpoint: opened, or None if only the config is there.
        family: what the model belongs to.
        description: what its config tells.
        quantization: what was asked for.
        backend: where it will run.

    Raises:
        SettingError: backend or family do not offer it.
    """
    if isinstance(checkpoint, Int8Checkpoint):
        form = WeightForm(checkpoint.form, checkpoint.linears, checkpoint.int8)
    elif quantization is None:
        return WeightForm(FLOATS, NO_LINEARS, no_int8)
    elif family.int8_linears is None:
        raise SettingError(
            "quantization", f"{quantization!r} is not offered for {description.architecture}"
        )
    elif quantization == W4A8:
        linears, made = description.linears.in_four(), made_int4(family.int8_linears)
        form = WeightForm(quantization, linears, made)
    else:
        form = WeightForm(quantization, description.linears, made_int8(family.int8_linears))
    if not backend.capabilities.int8:
        raise SettingError(
            "quantization",
            f"weights in int8 are not offered by the backend {backend.capabilities.name!r}; "
            "use --device cpu or weights in floats",
        )
    return form
