"""Rotary position embedding: angles by position, with the scalings that checkpoints ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surefoot.backend.protocol import Backend
from surefoot.errors import ModelError

AnglesAt = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Angles of positions [T], as Backend.rotary takes them."""


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines by position.

    Attributes:
        frequencies: [turning pairs] float64 angle per position.
        factor: multiplies both (attention temperature of some scalings).
        passing: pairs after them that pass through unchanged; D is twice the number of all pairs.
    """

    frequencies: Tensor
    factor: float
    passing: int = 0

    def on(self, backend: Backend) -> AnglesAt:
        """Prepare it for a backend."""
        return backend.pack_angles(self.frequencies, self.factor, self.passing)


def make_rotary(size: int, theta: float, scaling: Mapping[str, object] | None) -> Rotary:
    """Frequencies theta^(-2i/D) with the scaling of a transformers config (`rope_parameters`).

    Supports the types default, linear, llama3 and yarn.

    Raises:
        ModelError: an odd size, another type of scaling, or a missing number; it is named.
    """
    if size % 2:
        raise ModelError(f"rope cannot turn {size} numbers of a head in pairs")
    plain = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    options = dict(scaling or {})
    if _number(options, "partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("rope scaling with a partial_rotary_factor is not supported")
    kind = str(options.get("rope_type", options.get("type", "default")))
    if kind == "default":
        return Rotary(plain, 1.0)
    if kind == "linear":
        return Rotary(plain / _number(options, "factor"), 1.0)
    if kind == "llama3":
        return Rotary(_llama3(plain, options), 1.0)
    if kind == "yarn":
        return _yarn(plain, size, theta, options)
    raise ModelError(
        f"rope scaling {kind!r} is not supported; known are default, linear, llama3, yarn"
    )


def make_partial_rotary(
    size: int, rotated: int, theta: float, scaling: Mapping[str, object]
) -> Rotary:
    """Frequencies for heads of `size` numbers of which only `rotated` turn.

    The pairs that turn come first, so heads must be in the order of `paired_order` or
    `trailing_order`.

    Raises:
        ModelError: the rotated part is not made of pairs, or see `make_rotary`.
    """
    if rotated % 2 or size % 2 or not 0 < rotated <= size:
        raise ModelError(f"rope cannot turn {rotated} of a head's {size} numbers in pairs")
    whole = {name: value for name, value in scaling.items() if name != "partial_rotary_factor"}
    return replace(make_rotary(rotated, theta, whole), passing=(size - rotated) // 2)


def _number(options: Mapping[str, object], name: str, default: float | None = None) -> float:
    value = options.get(name)
    if value is None:
        value = default
    if not isinstance(value, int | float):
        raise ModelError(f"rope scaling needs a number {name!r}, and the config has {value!r}")
    return float(value)


def _llama3(plain: Tensor, options: Mapping[str, object]) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, middle ones interpolated."""
    factor = _number(options, "factor")
    low, high = _number(options, "low_freq_factor"), _number(options, "high_freq_factor")
    original = _number(options, "original_max_position_embeddings")
    turns = original * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / factor * (1 - share) + plain * share


def _yarn(plain: Tensor, size: int, theta: float, options: Mapping[str, object]) -> Rotary:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, scale the attention."""
    factor = _number(options, "factor")
    original = _number(options, "original_max_position_embeddings")
    bounds = [
        size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (_number(options, "beta_fast", 32), _number(options, "beta_slow", 1))
    ]
    low, high = bounds
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    places = torch.arange(size // 2, dtype=torch.float64)
    ramp = ((places - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)
    return Rotary(frequencies, _number(options, "attention_factor", _yarn_factor(factor, options)))


def _yarn_factor(factor: float, options: Mapping[str, object]) -> float:
    """What cosines and sines are multiplied by where the config does not say it outright."""
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    top, bottom = (_number(options, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    if top and bottom:
        return (top * growth + 1) / (bottom * growth + 1)
    return growth + 1
