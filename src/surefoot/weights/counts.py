"""How many numbers of a model W8A8 keeps in int8."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Linears:
    """Numbers that are kept in int8, and what that adds.

    Attributes:
        numbers: how many.
        outputs: of the linears they belong to; each has a scale in float32.
        copied: how many of the numbers are kept in floats as well.
    """

    numbers: int = 0
    outputs: int = 0
    copied: int = 0

    @staticmethod
    def of(inputs: int, *outputs: int) -> Linears:
        """Linears of so many inputs, one for each of `outputs`."""
        return Linears(inputs * sum(outputs), sum(outputs))

    @staticmethod
    def head(vocab_size: int, hidden: int, tied: bool) -> Linears:
        """The output head; if it is tied, the embedding remains in floats."""
        numbers = vocab_size * hidden
        return Linears(numbers, vocab_size, numbers if tied else 0)

    def __add__(self, other: Linears) -> Linears:
        return Linears(
            self.numbers + other.numbers, self.outputs + other.outputs, self.copied + other.copied
        )

    def __mul__(self, count: int) -> Linears:
        return Linears(self.numbers * count, self.outputs * count, self.copied * count)


NO_LINEARS = Linears()
