"""Weights that become int8 while they are loaded."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import Tensor

from surefoot.backend.operands import Int8Weight
from surefoot.backend.plain_int8 import quantise
from surefoot.weights.taker import Int8Form


def made_int8(names: re.Pattern[str]) -> Int8Form:
    """Make the weights of these names int8, each by itself, so that no other copy stays."""

    def made(name: str, read: Callable[[], Tensor]) -> Int8Weight | None:
        return quantise(read()) if names.fullmatch(name) else None

    return made
