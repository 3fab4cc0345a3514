"""How many numbers of a model W8A8 and W4A8 keep in int8."""

from __future__ import annotations

from dataclasses import dataclass, replace

_GROUPS = (128, 64, 32)


def group_size(inputs: int) -> int:
    """How many inputs share a scale in W4A8: the most of _GROUPS that divides them, or all."""
    return next((size for size in _GROUPS if inputs % size == 0), inputs)


@dataclass(frozen=True)
class Linears:
    """Numbers that are kept in int8, and what that adds.

    Attributes:
        numbers: how many.
        outputs: of the linears they belong to; each has a scale in float32.
        groups: as many scales in float32 has W4A8 instead.
        copied: how many of the numbers are kept in floats as well.
    """

    numbers: int = 0
    outputs: int = 0
    groups: int = 0
    copied: int = 0

    @staticmethod
    def of(inputs: int, *outputs: int) -> Linears:
        """Linears of so many inputs, one for each of `outputs`; W4A8 keeps them in 8 bits too."""
        return Linears(inputs * sum(outputs), sum(outputs), sum(outputs))

    @staticmethod
    def feed(hidden: int, inner: int) -> Linears:
        """Gate, up and down of a feed-forward or an expert; W4A8 keeps them in 4 bits."""
        inward, outward = hidden // group_size(hidden), inner // group_size(inner)
        return Linears(
            3 * hidden * inner, 2 * inner + hidden, 2 * inner * inward + hidden * outward
        )

    @staticmethod
    def head(vocab_size: int, hidden: int, tied: bool) -> Linears:
        """The output head; if it is tied, the embedding remains in floats."""
        numbers = vocab_size * hidden
        return Linears(numbers, vocab_size, vocab_size, numbers if tied else 0)

    def in_four(self) -> Linears:
        """The same with the scales that W4A8 has."""
        return replace(self, outputs=self.groups)

    def __add__(self, other: Linears) -> Linears:
        return Linears(
            self.numbers + other.numbers,
            self.outputs + other.outputs,
            self.groups + other.groups,
            self.copied + other.copied,
        )

    def __mul__(self, count: int) -> Linears:
        return Linears(
            self.numbers * count, self.outputs * count, self.groups * count, self.copied * count
        )


NO_LINEARS = Linears()
