"""Counts what is made on the way."""

from __future__ import annotations

import tracemalloc
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Made(TorchDispatchMode):
    """Notes the tensors that operations make, views among them.

    Attributes:
        largest: bytes of the largest one.
        total: bytes of all of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = self.total = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = operation(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                size = tensor.numel() * tensor.element_size()
                self.largest, self.total = max(self.largest, size), self.total + size
        return made


class Traced:
    """Most bytes that Python and numpy take at once within, above what they had before."""

    def __enter__(self) -> Traced:
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
