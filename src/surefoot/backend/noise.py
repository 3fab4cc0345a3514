"""Gumbel noise that is a pure function of (seed, position, token); the same on every backend.

Everything here is built from integer operations and single float32 additions, multiplications
and divisions, each of which IEEE 754 rounds in one way only. So a value has the same bits however
many are asked for at once, wherever it lies in a tensor, with any number of threads. Library
logarithms do not promise that: their vector body and scalar tail may round differently.

Speed: fresh memory costs as much as arithmetic, so operations work in place; and a Python number
is converted anew at each call, so constants are 0-dim tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _integer(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32, device="cpu")


def _real(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


NoiseKey = tuple[int, int]
"""A row's key, as two signed 32-bit numbers."""

_MASK64 = 2**64 - 1
GOLDEN64 = 0x9E3779B97F4A7C15

_TOKEN_STRIDE = _integer(0x9E3779B1 - 2**32)
_FIRST_FACTOR = _integer(0x85EBCA6B - 2**32)
_SECOND_FACTOR = _integer(0xC2B2AE35 - 2**32)
_SHIFT_15, _KEEP_17 = _integer(15), _integer(0x1FFFF)
_SHIFT_16, _KEEP_16 = _integer(16), _integer(0xFFFF)
_KEEP_31 = _integer(0x7FFFFFFF)

_HALF, _ONE, _TWO = _real(0.5), _real(1), _real(2)
# The largest float32 hash, 2**31, must map below 1, else its noise would be infinite.
_FRACTION_SCALE = _real((1 - 2**-24) * 2**-31)
_SQRT_HALF_BITS = _integer(0x3F3504F3)
_EXPONENT_SHIFT = _integer(23)
_MINUS_LN2 = _real(-math.log(2))
_LAST_TERM = _real(2 / 9)
_MIDDLE_TERMS = (_real(2 / 7), _real(2 / 5), _real(2 / 3))

# Rounding in the bound and in the noise itself stays below 3e-5.
_BOUND_MARGIN = 1e-3
_BOUND_SLOPE = _real(-math.log(2) * 2**-23)
_BOUND_START = _real(127 * math.log(2) + _BOUND_MARGIN)


class NoiseField:
    """Noise of all tokens of a vocabulary; holds what every row of a step shares."""

    __slots__ = ("_spread",)

    def __init__(self, vocab: int, device: torch.device | str) -> None:
        """Prepare for token ids below `vocab`, on `device`."""
        ids = torch.arange(vocab, dtype=torch.int32, device=device)
        self._spread = ids.mul_(_TOKEN_STRIDE)

    def gumbel(self, key: NoiseKey) -> Tensor:
        """[V] float32 noise of one row; see the function `gumbel`."""
        return _gumbel(_fractions(self._spread.clone(), *key))

    def bound(self, keys: Sequence[NoiseKey]) -> Tensor:
        """What the noise of each token cannot exceed, at a third of the cost of the noise.

        With v the uniform fraction, noise = -ln(-ln(1 - v)) <= -ln v, and the bits of a float,
        read as an integer, are a chord below its logarithm. The bound is loose by at most 0.07
        where v is small, that is where noise is large and may win.

        Returns:
            [R, V] float32 for R rows; never below the value that `gumbel` returns for the token.
        """
        low, high = _halves(keys, self._spread.device)
        hashes = self._spread.expand(len(keys), -1).clone()
        fractions = _fractions(hashes, low[:, None], high[:, None])
        chord = hashes.view(torch.float32).copy_(fractions.view(torch.int32))
        return chord.mul_(_BOUND_SLOPE).add_(_BOUND_START)


def gumbel(
    seeds: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device | str
) -> Tensor:
    """Noise for every token of the vocabulary.

    Args:
        seeds: noise key of each of R rows, 0 to 2**64 - 1.
        positions: index in its request of the token that each row chooses.
        vocab: number of token ids, V.
        device: where the result is wanted.

    Returns:
        [R, V] float32, all finite, between -2.9 and 22.2.
    """
    field = NoiseField(vocab, device)
    noise = torch.empty((len(seeds), vocab), dtype=torch.float32, device=device)
    for row, seed, position in zip(noise, seeds, positions, strict=True):
        row.copy_(field.gumbel(noise_key(seed, position)))
    return noise


def gumbel_at(keys: Sequence[NoiseKey], owners: Tensor, ids: Tensor) -> Tensor:
    """Noise for some tokens of each row, with the bits that `gumbel` gives for them.

    Args:
        keys: of R rows.
        owners: [n] int64, the row that each token is of.
        ids: [n] int64 token ids.

    Returns:
        [n] float32.
    """
    low, high = _halves(keys, ids.device)
    hashes = ids.to(torch.int32).mul_(_TOKEN_STRIDE)
    return _gumbel(_fractions(hashes, low[owners], high[owners]))


def mix64(value: int) -> int:
    """A bijection of 64-bit numbers in which each input bit flips about half of the output."""
    value &= _MASK64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31


def noise_key(seed: int, position: int) -> NoiseKey:
    """The key of the noise with which the token at `position` is chosen.

    Args:
        seed: 0 to 2**64 - 1.
        position: index of the token in its request.
    """
    # 0 is a fixed point of the mixing, hence the first addition.
    key = mix64(mix64(seed + GOLDEN64) + position * GOLDEN64)
    return _signed32(key), _signed32(key >> 32)


def _halves(keys: Sequence[NoiseKey], device: torch.device) -> tuple[Tensor, Tensor]:
    """Both halves of the rows' keys, each [R] int32."""
    low, high = torch.tensor(keys, dtype=torch.int32, device=device).view(-1, 2).unbind(1)
    return low, high


def _signed32(value: int) -> int:
    return (value & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _fractions(hashes: Tensor, low: int | Tensor, high: int | Tensor) -> Tensor:
    """Uniform float32 fractions, above 0 and below 1; overwrites `hashes`.

    Both halves of the row's key enter, at different depths: with one half alone, two rows whose
    halves are close would see the same noise under permuted tokens.

    Args:
        hashes: token ids times the stride, int32.
        low: first half of the key, one number or one per element.
        high: second half of the key, likewise.
    """
    spare = torch.empty_like(hashes)
    hashes.add_(low)
    _fold_down(hashes, _SHIFT_16, _KEEP_16, spare).mul_(_FIRST_FACTOR).add_(high)
    _fold_down(hashes, _SHIFT_15, _KEEP_17, spare).mul_(_SECOND_FACTOR)
    _fold_down(hashes, _SHIFT_16, _KEEP_16, spare).bitwise_and_(_KEEP_31)
    fractions = spare.view(torch.float32).copy_(hashes)
    return fractions.add_(_HALF).mul_(_FRACTION_SCALE)


def _fold_down(hashes: Tensor, shift: Tensor, keep: Tensor, spare: Tensor) -> Tensor:
    """`hashes ^= hashes >> shift` in place; `keep` drops the copies of the sign bit."""
    torch.bitwise_right_shift(hashes, shift, out=spare).bitwise_and_(keep)
    return hashes.bitwise_xor_(spare)


def _gumbel(fractions: Tensor) -> Tensor:
    """-ln(-ln(1 - v)); precise where v is small, for there the noise is large and decides."""
    rest = _ONE - fractions
    # What rounding added to `rest`: without it the smallest fractions would all look like 0.
    excess = fractions.add_(rest - _ONE)
    return _minus_log(_minus_log(rest, excess))


def _minus_log(values: Tensor, excess: Tensor | None = None) -> Tensor:
    """-ln(values - excess) of positive normal float32 values; overwrites `values`.

    Splits off the power of two, then sums ln((1 + r) / (1 - r)) = 2 (r + r**3 / 3 + ...).

    Args:
        values: any shape, float32, contiguous.
        excess: what rounding added to values near 1; it must be negligible for all others.
    """
    bits = values.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS).bitwise_right_shift_(_EXPONENT_SHIFT)
    shifted = torch.bitwise_left_shift(exponent, _EXPONENT_SHIFT)
    bits.sub_(shifted)
    values.sub_(_ONE)
    if excess is not None:
        values.sub_(excess)
    spare = shifted.view(torch.float32)
    ratio = values.div_(torch.add(values, _TWO, out=spare))
    square = torch.mul(ratio, ratio, out=spare)
    series = square * _LAST_TERM
    for coefficient in _MIDDLE_TERMS:
        series.add_(coefficient).mul_(square)
    series.add_(_TWO).mul_(ratio)
    return spare.copy_(exponent).mul_(_MINUS_LN2).sub_(series)
