"""Chooses tokens in one walk over each row; see backend/noise.py for what the noise is and why.

Integers wrap around, and every operation on floats rounds by itself as it does there, so the noise
has the same bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from surefoot.backend.cpu.kernels.algebra import Floats, Integers
from surefoot.backend.cpu.kernels.compile import exact, exact_kernel
from surefoot.backend.cpu.kernels.threads import on_threads

Words = npt.NDArray[np.uint32]

_STRIDE = np.uint32(0x9E3779B1)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_SHIFT_15, _SHIFT_16, _SHIFT_23 = np.uint32(15), np.uint32(16), np.int32(23)
_KEEP_31 = np.uint32(0x7FFFFFFF)
_HALF, _ONE, _TWO = np.float32(0.5), np.float32(1), np.float32(2)
_ZERO = np.float32(0)
_FRACTION_SCALE = np.float32((1 - 2**-24) * 2**-31)
_SQRT_HALF_BITS = np.int32(0x3F3504F3)
_MINUS_LN2 = np.float32(-np.log(2.0))
_T9, _T7, _T5, _T3 = np.float32(2 / 9), np.float32(2 / 7), np.float32(2 / 5), np.float32(2 / 3)
_BOUND_SLOPE = np.float32(-np.log(2.0) * 2**-23)
_BOUND_START = np.float32(127 * np.log(2.0) + 1e-3)
_BLOCK = 64
_STRIDES = (np.arange(_BLOCK, dtype=np.uint64) * np.uint64(_STRIDE)).astype(np.uint32)
_LESS = np.float32(1 - 2**-20)


@exact
def _mixed(h: np.uint32, high: np.uint32) -> np.float32:
    """The uniform fraction of a token whose number is in `h` and half of the key with it."""
    h = np.uint32(np.uint32((h ^ (h >> _SHIFT_16)) * _FIRST_FACTOR) + high)
    h = np.uint32((h ^ (h >> _SHIFT_15)) * _SECOND_FACTOR)
    h = np.uint32((h ^ (h >> _SHIFT_16)) & _KEEP_31)
    return np.float32((np.float32(np.int32(h)) + _HALF) * _FRACTION_SCALE)


@exact
def _start(token: int, low: np.uint32) -> np.uint32:
    """What `_mixed` is given for a token."""
    return np.uint32(np.uint32(np.uint32(token) * _STRIDE) + low)


@exact
def _minus_log(value: np.float32, excess: np.float32) -> np.float32:
    bits = np.float32(value).view(np.int32)
    exponent = np.int32(np.int32(bits - _SQRT_HALF_BITS) >> _SHIFT_23)
    rest = np.int32(bits - np.int32(exponent << _SHIFT_23)).view(np.float32)
    rest = np.float32(np.float32(rest - _ONE) - excess)
    ratio = np.float32(rest / np.float32(rest + _TWO))
    square = np.float32(ratio * ratio)
    series = np.float32(square * _T9)
    series = np.float32(np.float32(series + _T7) * square)
    series = np.float32(np.float32(series + _T5) * square)
    series = np.float32(np.float32(series + _T3) * square)
    series = np.float32(np.float32(series + _TWO) * ratio)
    return np.float32(np.float32(np.float32(exponent) * _MINUS_LN2) - series)


@exact
def _gumbel(fraction: np.float32) -> np.float32:
    rest = np.float32(_ONE - fraction)
    excess = np.float32(fraction + np.float32(rest - _ONE))
    return _minus_log(_minus_log(rest, excess), _ZERO)


@exact
def _peak(scores: Floats) -> np.float32:
    """The highest score, or NaN if one is among them; in lanes, as no compiler would dare."""
    peaks, strange = np.empty(_BLOCK, np.float32), np.zeros(_BLOCK, np.int32)
    peaks[:] = -np.inf
    whole = scores.shape[0] // _BLOCK * _BLOCK
    for begin in range(0, whole, _BLOCK):
        for i in range(_BLOCK):
            score = scores[begin + i]
            peaks[i] = score if score > peaks[i] else peaks[i]
            strange[i] |= np.int32(score != score)
    for i in range(whole, scores.shape[0]):
        score = scores[i]
        peaks[0] = score if score > peaks[0] else peaks[0]
        strange[0] |= np.int32(score != score)
    return peaks.max() if not strange.any() else np.float32(np.nan)


@exact
def _first(scores: Floats, peak: np.float32) -> int:
    """The lowest id with this score, which some token has."""
    found = 0
    while scores[found] != peak:
        found += 1
    return found


@exact
def _ceilings(
    scores: Floats,
    peak: np.float32,
    slope: np.float32,
    start: np.uint32,
    high: np.uint32,
    best: np.float32,
    out: Floats,
) -> bool:
    """No total is greater than its ceiling; whether one of them reaches the best total.

    Args:
        scores: of a block of tokens.
        peak: the highest score of all.
        slope: a little less than 1 / temperature; what is below the peak is so made a little less.
        start: of the first token.
        high: half of the key.
        best: total so far.
        out: the ceilings, written to.
    """
    reached = np.int32(0)
    for i in range(scores.shape[0]):
        fraction = _mixed(np.uint32(start + _STRIDES[i]), high)
        chord = np.float32(np.float32(fraction).view(np.int32))
        bound = np.float32(np.float32(chord * _BOUND_SLOPE) + _BOUND_START)
        ceiling = np.float32(bound + np.float32(np.float32(scores[i] - peak) * slope))
        out[i] = ceiling
        reached = np.int32(reached | np.int32(ceiling >= best))
    return bool(reached)


@exact
def _draw(
    scores: Floats, peak: np.float32, temperature: np.float32, low: np.uint32, high: np.uint32
) -> int:
    """Only where a ceiling reaches the best total the noise is computed."""
    best, winner = np.float32(-np.inf), 0
    slope = np.float32(np.float32(_ONE / temperature) * _LESS)
    ceilings = np.empty(_BLOCK, np.float32)
    for begin in range(0, scores.shape[0], _BLOCK):
        block = scores[begin : begin + _BLOCK]
        start = _start(begin, low)
        if not _ceilings(block, peak, slope, start, high, best, ceilings):
            continue
        for i in range(block.shape[0]):
            if ceilings[i] >= best:
                tempered = np.float32(np.float32(block[i] - peak) / temperature)
                noise = _gumbel(_mixed(_start(begin + i, low), high))
                total = np.float32(tempered + noise)
                if total > best:
                    best, winner = total, begin + i
    return winner


@exact
def _choose_some(
    scores: Floats,
    temperatures: Floats,
    keys: Words,
    unchosen: int,
    tokens: Integers,
    number: int,
    parts: int,
) -> None:
    """Some rows, all those of a part."""
    for row in range(number, scores.shape[0], parts):
        peak, temperature = _peak(scores[row]), temperatures[row]
        if not np.isfinite(peak):
            tokens[row] = unchosen
        elif temperature == 0:
            tokens[row] = _first(scores[row], peak)
        else:
            tokens[row] = _draw(scores[row], peak, temperature, keys[row, 0], keys[row, 1])


@exact_kernel("void(f4[:,::1],f4[::1],u4[:,::1],i8,i8[::1],i8)")
def choose(
    scores: Floats,
    temperatures: Floats,
    keys: Words,
    unchosen: int,
    tokens: Integers,
    threads: int,
) -> None:
    """See Backend.choose.

    Args:
        scores: [R, V].
        temperatures: [R].
        keys: [R, 2].
        unchosen: stands for no token.
        tokens: [R], written to.
        threads: how many share the work.
    """
    on_threads(_choose_some, threads, (scores, temperatures, keys, unchosen, tokens))
