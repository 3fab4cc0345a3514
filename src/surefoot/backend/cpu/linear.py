"""Linear layers on a CPU: prepacked, and the same bits for a token whatever stands beside it.

Packed products give each row of the input a result that does not depend on how many rows there
are, except that a single row may take another kernel; then one row is sent twice. Nothing promises
this for every shape and library build: `RowInvariant` tests the shape at hand, and where all forms
fail the rows go through fixed tiles of 16 instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.backend.blockwise.linear import PlainLinear
from surefoot.backend.cpu.products import LIBRARIES, Product, available_libraries
from surefoot.backend.protocol import Linear

TILE = 16
Map = Callable[[Tensor], Tensor]
_TESTED_ROWS = (1, 2, 3, 5, 9, 15, 16, 17, 33)


@dataclass(frozen=True)
class PackedLinear:
    """A packed product for any number of rows.

    Attributes:
        product: computes at least one row.
        outputs: rows of the weight.
        doubles: a single row is computed as two.
    """

    product: Product
    outputs: int
    doubles: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        if x.shape[0] == 0:
            return x.new_empty(0, self.outputs)
        if x.shape[0] == 1 and self.doubles:
            return self.product(torch.cat((x, x)))[:1]
        return self.product(x.contiguous())

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        if x.shape[0] == 0:
            return stream
        if x.shape[0] == 1 and self.doubles:
            return self.product.add(torch.cat((x, x)), torch.cat((stream, stream)))[:1]
        return self.product.add(x.contiguous(), stream)


@dataclass(frozen=True)
class TiledLinear:
    """Products of exactly TILE rows, the last tile filled with zeros: one shape, one kernel."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        rows = x.shape[0]
        tiles = F.pad(x, (0, 0, 0, -rows % TILE)).split(TILE) if rows else ()
        y = x.new_empty(0, self.weight.shape[0])
        y = torch.cat([y, *(F.linear(tile, self.weight) for tile in tiles)])[:rows]
        return y if self.bias is None else y + self.bias

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        return stream + self(x)


@dataclass(frozen=True)
class FastLinear:
    """The quickest form at each row count; the last bits may depend on it.

    Attributes:
        columns: [inputs, outputs], the weight turned so that one row reads it in order.
        bias: [outputs] or None.
        packed: for more rows.
    """

    columns: Tensor
    bias: Tensor | None
    packed: PackedLinear

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        if x.shape[0] != 1:
            return self.packed(x)
        if self.bias is None:
            return torch.mm(x, self.columns)
        return torch.addmm(self.bias, x, self.columns)

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        if x.shape[0] != 1:
            return self.packed.add(x, stream)
        y = torch.addmm(stream, x, self.columns)
        return y if self.bias is None else y.add_(self.bias)


def pack_fast(weight: Tensor, bias: Tensor | None) -> Linear:
    """The quickest linear for this weight [outputs, inputs], without the bitwise promise."""
    libraries = available_libraries()
    if weight.dtype != torch.float32 or not libraries:
        return PlainLinear(weight, bias)
    packed = PackedLinear(LIBRARIES[libraries[0]](weight, bias), weight.shape[0], doubles=False)
    return FastLinear(weight.t().contiguous(), bias, packed)


@dataclass(frozen=True)
class Form:
    """A way to compute a linear.

    Attributes:
        library: key of LIBRARIES, or "" for tiles.
        doubles: a single row is computed as two.
    """

    library: str
    doubles: bool

    def __str__(self) -> str:
        return (self.library or "tiles") + (", one row as two" if self.doubles else "")


TILED = Form("", doubles=False)


def _forms() -> list[Form]:
    """All forms, the fastest first; the last keeps bits by construction."""
    packed = [Form(name, twice) for name in available_libraries() for twice in (False, True)]
    return [*packed, TILED]


def _make(form: Form, weight: Tensor, bias: Tensor | None) -> Linear:
    if form == TILED:
        return TiledLinear(weight, bias)
    return PackedLinear(LIBRARIES[form.library](weight, bias), weight.shape[0], form.doubles)


def is_row_invariant(product: Map, inputs: int) -> bool:
    """Whether slices of a fixed random input give the bits that the whole gives."""
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(2 * max(_TESTED_ROWS), inputs, generator=generator)
    whole = product(x)
    slices = [(rows, 7 * rows % (x.shape[0] - rows)) for rows in _TESTED_ROWS]
    for rows, start in slices + [(1, row) for row in range(TILE)]:
        if not torch.equal(product(x[start : start + rows].clone()), whole[start : start + rows]):
            return False
    return True


class RowInvariant:
    """Packs weights in a form that has been seen to be row-invariant for their shape.

    The verdict is kept by shape, as the layers of a model share a few.
    """

    def __init__(self, passes: Callable[[Map, int], bool] = is_row_invariant) -> None:
        """Start with no shape tested; `passes` tests a product with that many inputs."""
        self._passes = passes
        self._forms: dict[tuple[int, int], Form] = {}

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A linear for weight [outputs, inputs] whose rows do not depend on one another."""
        if weight.dtype != torch.float32:
            return TiledLinear(weight, bias)
        shape = (weight.shape[0], weight.shape[1])
        if shape in self._forms:
            return _make(self._forms[shape], weight, bias)
        for form in _forms():
            linear = _make(form, weight, bias)
            if form == TILED or self._passes(linear, shape[1]):
                break
        self._forms[shape] = form
        return linear

    def report(self) -> dict[tuple[int, int], str]:
        """The form that each tested shape (outputs, inputs) takes."""
        return {shape: str(form) for shape, form in self._forms.items()}
