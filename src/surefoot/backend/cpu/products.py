"""Products with a weight in a library's own packed layout.

Both libraries give each row of the input a result that does not depend on how many rows there are,
except that a single row may take another kernel; `RowInvariant` tests it for the shape at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_EXPECTED_ROWS_MKL = 256  # decides the blocks of the packed layout; the results stay the same
_EXPECTED_ROWS_ONEDNN = 32


class Product(Protocol):
    """A weight in a library's own layout."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs], T > 0, to [T, outputs]."""
        ...

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """The same, added to `stream` [T, outputs], which is left as it is."""
        ...


@dataclass(frozen=True)
class MklProduct:
    """MKL's packed weight: the faster form where the framework has that library.

    Attributes:
        packed: the weight in the library's layout.
        shape: [outputs, inputs] zeros that take no memory; the library reads the shape only.
        bias: [outputs] or None.
    """

    packed: Tensor
    shape: Tensor
    bias: Tensor | None

    @staticmethod
    def pack(weight: Tensor, bias: Tensor | None) -> MklProduct:
        """Pack [outputs, inputs]."""
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _EXPECTED_ROWS_MKL)
        return MklProduct(packed, weight.new_zeros(1, 1).expand_as(weight), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """See Product."""
        y: Tensor = torch.ops.mkl._mkl_linear(x, self.packed, self.shape, self.bias, x.shape[0])
        return y

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Product."""
        return self(x).add_(stream)


@dataclass(frozen=True)
class OneDnnProduct:
    """OneDNN's packed weight.

    Attributes:
        packed: the weight in the library's layout.
        bias: [outputs] or None.
    """

    packed: Tensor
    bias: Tensor | None

    @staticmethod
    def pack(weight: Tensor, bias: Tensor | None) -> OneDnnProduct:
        """Pack [outputs, inputs]."""
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS_ONEDNN)
        return OneDnnProduct(packed, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """See Product."""
        product = torch.ops.mkldnn._linear_pointwise.default
        y: Tensor = product(x, self.packed, self.bias, "none", [], "")
        return y

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Product; the sum is made inside."""
        product = torch.ops.mkldnn._linear_pointwise.binary
        y: Tensor = product(x, stream, self.packed, self.bias, "add")
        return y


LIBRARIES: dict[str, Callable[[Tensor, Tensor | None], Product]] = {
    "mkl": MklProduct.pack,
    "onednn": OneDnnProduct.pack,
}
"""Packed products by name, the fastest first."""


def available_libraries() -> tuple[str, ...]:
    """Those of LIBRARIES that this build of the framework has."""
    there = {
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
    }
    return tuple(name for name in LIBRARIES if there[name])
