"""Weights that become int8 while they are loaded."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import Tensor

from surefoot.backend.operands import Int8Weight
from surefoot.backend.plain_int8 import quantise, quantise_groups
from surefoot.weights.counts import group_size
from surefoot.weights.taker import Int8Form

FOUR_BITS = re.compile(r".*\.mlp\..*")
"""Which weights among those in int8 W4A8 keeps in 4 bits: feed-forwards and experts. Attention,
recurrent layers and heads lose more by it than they save; docs/quantization.md has the figures."""


def made_int8(names: re.Pattern[str]) -> Int8Form:
    """Make the weights of these names int8, each by itself, so that no other copy stays."""

    def made(name: str, read: Callable[[], Tensor]) -> Int8Weight | None:
        return quantise(read()) if names.fullmatch(name) else None

    return made


def made_int4(names: re.Pattern[str]) -> Int8Form:
    """As `made_int8`, with weights of feed-forwards in 4 bits."""

    def made(name: str, read: Callable[[], Tensor]) -> Int8Weight | None:
        if not names.fullmatch(name):
            return None
        weight = read()
        if not FOUR_BITS.fullmatch(name):
            return quantise(weight)
        return quantise_groups(weight, group_size(weight.shape[-1]))

    return made
