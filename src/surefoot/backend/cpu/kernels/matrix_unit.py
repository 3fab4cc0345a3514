"""Products of bfloat16 on the matrix unit that some processors have (AMX), summed in float32.

The unit has eight tiles of up to 16 rows of 64 bytes. One instruction (TDPBF16PS) multiplies a tile
of inputs, 16 tokens x 32 numbers, with one of weights, 32 numbers x 16 outputs, and adds the
products to a tile of sums, 16 tokens x 16 outputs, in an order that is the same for each of them.
So the bits of a token's sums do not depend on the tokens beside it, nor on how many there are.

    tiles 0 to 3   sums of the same tokens for four times 16 outputs
    tiles 4 to 6   the three pieces of 32 inputs of these tokens, see `pieces`
    tile  7        weights, two inputs of an output side by side

This is the division with the most products a load. Rows of inputs and weights begin with a cache
line: otherwise a load takes six times as long, and three times as long as a product (measured).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import llvmlite.binding
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from surefoot.backend.cpu.kernels.algebra import Floats
from surefoot.backend.cpu.kernels.compile import exact

Halves = npt.NDArray[np.uint16]

TOKENS = 16
"""Tokens that are taken at once."""

OUTPUTS = 64
"""Outputs that are taken at once."""

INPUTS = 32
"""Inputs that are taken at once."""

PIECES = 3

HAS_MATRIX_UNIT = sys.platform == "linux" and all(
    llvmlite.binding.get_host_cpu_features().get(name, False)
    for name in ("amx-tile", "amx-bf16", "avx512f")
)
"""Whether this processor has the unit; the kernels of `pieces` cannot be compiled without it."""

_PERMISSION = (158, 0x1023, 18)  # arch_prctl, ARCH_REQ_XCOMP_PERM, the state of the tiles

_BYTE, _INT, _LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_ADDRESS = _BYTE.as_pointer()
_PREFETCH = ir.FunctionType(ir.VoidType(), [_ADDRESS, _INT, _INT, _INT]), "llvm.prefetch.p0"
_TO_SECOND_CACHE = [ir.Constant(_INT, value) for value in (0, 2, 1)]  # read, near, data
_LINE = 64  # bytes
_TILE = 16 * _LINE
_GROUP = 4 * _TILE  # weights of 64 outputs and 32 inputs


@cache
def permitted() -> bool:
    """Ask the kernel of the system, once for this process, to let it use the unit's tiles."""
    return HAS_MATRIX_UNIT and ctypes.CDLL(None).syscall(*_PERMISSION) == 0


@exact
def describe_tiles(tokens: int, form: npt.NDArray[np.uint8]) -> None:
    """Write how the tiles are divided for so many tokens (1 to 16) into form [64]."""
    form[:] = 0
    form[0] = 1  # the only palette there is
    for tile in range(8):
        form[16 + 2 * tile] = 64  # bytes of a row
        form[48 + tile] = tokens if tile < 7 else TOKENS


def _call(builder: Any, name: str, *arguments: Any) -> None:
    """One instruction of the unit; tiles are given by number, all else by address or stride."""
    values = [ir.Constant(_BYTE, one) if isinstance(one, int) else one for one in arguments]
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    builder.call(function, values)


def _at(builder: Any, address: Any, offset: Any) -> Any:
    return builder.gep(address, [_long(offset)])


def _long(value: Any) -> Any:
    return ir.Constant(_LONG, value) if isinstance(value, int) else value


def _emit(builder: Any, pieces: list[Any], weight: Any, stride: Any, out: Any, ahead: bool) -> None:
    """Sums of one group of outputs into out [16, 64].

    Args:
        builder: writes the instructions.
        pieces: addresses of the three pieces of the first token.
        weight: address of the group's weights.
        stride: bytes from one token's piece to the next token's.
        out: address.
        ahead: the weights of the next step are called from memory meanwhile.
    """
    for block in range(4):
        _call(builder, "tilezero", block)
    with cgutils.for_range(builder, builder.udiv(stride, _long(2 * INPUTS))) as loop:
        inputs = builder.mul(loop.index, _long(2 * INPUTS))
        for number, piece in enumerate(pieces):
            _call(builder, "tileloadd64", 4 + number, _at(builder, piece, inputs), stride)
        here = _at(builder, weight, builder.mul(loop.index, _long(_GROUP)))
        for block in range(4):
            tile = _at(builder, here, block * _TILE)
            _call(builder, "tileloadd64", 7, tile, _long(_LINE))
            if ahead:
                _fetch(builder, _at(builder, tile, _GROUP))
            for number in range(PIECES):
                _call(builder, "tdpbf16ps", block, 4 + number, 7)
    for block in range(4):
        _call(builder, "tilestored64", block, _at(builder, out, block * _LINE), _long(4 * OUTPUTS))


def _fetch(builder: Any, tile: Any) -> None:
    prefetch = cgutils.get_or_insert_function(builder.module, *_PREFETCH)
    for line in range(0, _TILE, _LINE):
        builder.call(prefetch, [_at(builder, tile, line), *_TO_SECOND_CACHE])


_Multiply = Callable[[Halves, Halves, int, Floats], None]


def _multiply(ahead: bool) -> Any:
    def typed(_: Any, pieces: Any, weight: Any, token: Any, out: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            arrays = [
                context.make_array(kind)(context, builder, value)
                for kind, value in zip(signature.args, values, strict=True)
                if isinstance(kind, types.Array)
            ]
            data = [builder.bitcast(array.data, _ADDRESS) for array in arrays]
            _, tokens, inputs = cgutils.unpack_tuple(builder, arrays[0].shape)
            stride = builder.mul(inputs, _long(2))
            first = builder.mul(values[2], stride)
            plane = builder.mul(tokens, stride)
            planes = [builder.mul(plane, _long(number)) for number in range(PIECES)]
            each = [_at(builder, data[0], builder.add(first, start)) for start in planes]
            _emit(builder, each, data[1], stride, data[2], ahead)
            return context.get_dummy_value()

        return types.void(pieces, weight, token, out), generate

    return intrinsic(typed)


def _simple(name: str, takes_array: bool) -> Any:
    """An intrinsic for an instruction that takes an array's address or nothing."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        arrays = [context.make_array(signature.args[0])(context, builder, one) for one in values]
        _call(builder, name, *(builder.bitcast(array.data, _ADDRESS) for array in arrays))
        return context.get_dummy_value()

    if takes_array:
        return intrinsic(lambda _, form: (types.void(form), emit))
    return intrinsic(lambda _: (types.void(), emit))


first_multiply = cast(_Multiply, _multiply(ahead=True))
"""Sums of products for up to 16 tokens and 64 outputs; calls what follows from memory.

Takes pieces [3, T, inputs], a group's weights [inputs * 64], the first token, and sums [16, 64],
written to. The tiles must have been divided for as many tokens as there are from the first on, or
for 16.
"""

more_multiply = cast(_Multiply, _multiply(ahead=False))
"""The same for weights that have just been used."""

divide_tiles = cast(Callable[[npt.NDArray[np.uint8]], None], _simple("ldtilecfg", True))
"""Divide the tiles as `describe_tiles` has described."""

release_tiles = cast(Callable[[], None], _simple("tilerelease", False))
"""Forget what the tiles hold; a thread that leaves them in use is slower to switch."""
