"""Drafted tokens that were chosen on the device, and that the host need not know yet.

How many there are is known at once. Which they are is read together with the step's results, or
when somebody asks: a penalty that counts tokens does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import torch
from torch import Tensor

from surefoot.backend.protocol import Backend


class Guesses:
    """The tokens of one call of a drafter, numbered in the order in which they were chosen."""

    def __init__(self, backend: Backend) -> None:
        """Start with none; `backend` reads them."""
        self._backend = backend
        self._parts: list[Tensor] = []
        self._count = 0
        self._known: list[int] = []

    def add(self, chosen: Tensor) -> range:
        """Take in tokens [n] int64; returns their numbers."""
        begin = self._count
        self._parts.append(chosen)
        self._count += len(chosen)
        return range(begin, self._count)

    def at(self, places: Sequence[int]) -> Tensor:
        """Tokens by number, [n] int64 on the device; UNCHOSEN where none was chosen."""
        wanted = list(places)
        # Mostly these are asked for: a pass reads what the pass before it chose.
        newest = self._parts[-1] if self._parts else self._joined()
        if wanted == list(range(self._count - len(newest), self._count)):
            return newest
        every = self._joined()
        if wanted == list(range(self._count)):
            return every
        return every.index_select(0, torch.tensor(wanted, dtype=torch.long, device=every.device))

    @property
    def unread(self) -> Tensor:
        """[n] int64, what the host does not know."""
        every = self._joined()
        return every[len(self._known) :] if self._known else every

    def settle(self, values: Iterable[int]) -> None:
        """Take the values of `unread`, which somebody has read."""
        self._known.extend(values)

    def read(self) -> list[int]:
        """All tokens; waits for the device if the host does not know some."""
        if len(self._known) < self._count:
            self.settle(self._backend.read(self.unread))
        return self._known

    def _joined(self) -> Tensor:
        if not self._parts:
            return torch.empty(0, dtype=torch.long, device=self._backend.device)
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts)]
        return self._parts[0]


class Guessed(Sequence[int]):
    """One row's draft among guesses."""

    def __init__(self, guesses: Guesses, places: list[int]) -> None:
        """The tokens with these numbers."""
        self.guesses = guesses
        self.places = places

    def __len__(self) -> int:
        """How many; that needs no reading."""
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Guessed: ...

    def __getitem__(self, index: int | slice) -> int | Guessed:
        """A token, which may have to be read; or a part, which needs no reading."""
        if isinstance(index, slice):
            return Guessed(self.guesses, self.places[index])
        return self.guesses.read()[self.places[index]]
