"""Seeds of requests and of their samples."""

from __future__ import annotations

import secrets

from surefoot.backend.noise import GOLDEN64, mix64

_SAMPLE_SALT = 0x7375726566_6F6F74


def fresh_seed() -> int:
    """An unpredictable 64-bit seed for a request that brought none."""
    return secrets.randbits(64)


def derive_seed(seed: int, sample: int) -> int:
    """The 64-bit seed of one of a request's samples.

    Args:
        seed: what the user gave, 0 to 2**64 - 1.
        sample: index of the sample, from 0.
    """
    return mix64(mix64(seed ^ _SAMPLE_SALT) + (sample + 1) * GOLDEN64)
