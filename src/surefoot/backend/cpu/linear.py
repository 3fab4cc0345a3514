"""Linear layers on a CPU: prepacked, and the same bits for a token whatever stands beside it.

oneDNN's packed product gives each row of the input a result that does not depend on how many rows
there are, except that a single row may take another kernel; then one row is sent twice. Nothing
promises this for every shape and library build: `RowInvariant` tests the shape at hand, and where
both forms fail the rows go through fixed tiles of 16 instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.backend.blockwise.linear import PlainLinear
from surefoot.backend.protocol import Linear

TILE = 16
PACKED, DOUBLED, TILED = "packed", "packed, one row as two", "tiles"
Product = Callable[[Tensor], Tensor]
_EXPECTED_ROWS = 32  # decides the blocks of the packed layout; the results are the same for any
_TESTED_ROWS = (1, 2, 3, 5, 9, 15, 16, 17, 33)


@dataclass(frozen=True)
class PackedLinear:
    """oneDNN's packed weight.

    Attributes:
        packed: the weight in the library's own layout.
        bias: [outputs] or None.
        outputs: rows of the weight.
        doubles: a single row is computed as two.
    """

    packed: Tensor
    bias: Tensor | None
    outputs: int
    doubles: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        if x.shape[0] == 0:
            return x.new_empty(0, self.outputs)
        if x.shape[0] == 1 and self.doubles:
            return self._product(torch.cat((x, x)))[:1]
        return self._product(x.contiguous())

    def _product(self, x: Tensor) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise.default
        y: Tensor = product(x, self.packed, self.bias, "none", [], "")
        return y

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear; the sum is made inside the product."""
        if x.shape[0] == 0:
            return stream
        if x.shape[0] == 1 and self.doubles:
            return self._sum(torch.cat((x, x)), torch.cat((stream, stream)))[:1]
        return self._sum(x.contiguous(), stream)

    def _sum(self, x: Tensor, stream: Tensor) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise.binary
        y: Tensor = product(x, stream, self.packed, self.bias, "add")
        return y


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
        packed: for more rows.
    """

    columns: Tensor
    packed: PackedLinear

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        if x.shape[0] != 1:
            return self.packed(x)
        if self.packed.bias is None:
            return torch.mm(x, self.columns)
        return torch.addmm(self.packed.bias, x, self.columns)

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        if x.shape[0] != 1:
            return self.packed.add(x, stream)
        y = torch.addmm(stream, x, self.columns)
        return y if self.packed.bias is None else y.add_(self.packed.bias)


@dataclass(frozen=True)
class FastGated:
    """silu(gate) * up with the library's own silu."""

    both: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        gate, up = self.both(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def _pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
    return PackedLinear(packed, bias, weight.shape[0], doubles=False)


def pack_fast(weight: Tensor, bias: Tensor | None) -> Linear:
    """The quickest linear for this weight [outputs, inputs], without the bitwise promise."""
    if weight.dtype != torch.float32:
        return PlainLinear(weight, bias)
    return FastLinear(weight.t().contiguous(), _pack(weight, bias))


def is_row_invariant(product: Product, inputs: int) -> bool:
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

    def __init__(self, passes: Callable[[Product, int], bool] = is_row_invariant) -> None:
        """Start with no shape tested; `passes` tests a product with that many inputs."""
        self._passes = passes
        self._forms: dict[tuple[int, int], str] = {}

    def pack(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """A linear for weight [outputs, inputs] whose rows do not depend on one another."""
        if weight.dtype != torch.float32:
            return TiledLinear(weight, bias)
        packed = _pack(weight, bias)
        forms = {PACKED: packed, DOUBLED: replace(packed, doubles=True)}
        shape = (weight.shape[0], weight.shape[1])
        if shape not in self._forms:
            passing = (name for name, form in forms.items() if self._passes(form, shape[1]))
            self._forms[shape] = next(passing, TILED)
        return forms.get(self._forms[shape]) or TiledLinear(weight, bias)

    def report(self) -> dict[tuple[int, int], str]:
        """The form that each tested shape (outputs, inputs) takes."""
        return dict(self._forms)
