"""Parts of a kernel on several threads, those of the framework.

The framework's operators share one pool of threads (OpenMP's, of the GNU library). A pool of our
own beside it would take turns with it on the same cores, both waiting in loops. So parts of kernels
are handed to that pool, in the way in which a compiler does it: GOMP_parallel calls a function on
each thread, with an address that tells it all the rest.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any, cast

import llvmlite.binding
import torch  # brings the pool
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_RUN, _NUMBER, _COUNT = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
_ADDRESS, _INT, _LONG = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)
_PART = ir.FunctionType(ir.VoidType(), [_ADDRESS])
_ASKED = ir.FunctionType(_INT, [])
_NONE, _ONE = (ir.Constant(_INT, value) for value in (0, 1))


def _join_pool() -> bool:
    """Make the pool's functions known to compiled kernels; whether it is there."""
    if sys.platform != "linux" or not torch.backends.openmp.is_available():
        return False
    try:
        pool = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    for name in (_RUN, _NUMBER, _COUNT):
        address = ctypes.cast(getattr(pool, name), ctypes.c_void_p).value
        llvmlite.binding.add_symbol(name, address)
    return True


HAS_THREADS = _join_pool()
"""Whether kernels can use the framework's threads; without them the only part is run at once."""


def _outlined(context: Any, builder: Any, body: Any, given: Any) -> Any:
    """A function of the pool that runs one part of `body`.

    Args:
        context: of the compiler.
        builder: writes the kernel.
        body: what is run, compiled.
        given: where a flag for an error and the arguments lie.
    """
    module = builder.module
    function = ir.Function(module, _PART, module.get_unique_name(f"{builder.function.name}.part"))
    function.linkage = "internal"
    inside = ir.IRBuilder(function.append_basic_block("entry"))
    data = inside.bitcast(function.args[0], given.type)
    arguments = cgutils.unpack_tuple(inside, inside.load(inside.gep(data, [_NONE, _ONE])))
    for name in (_NUMBER, _COUNT):
        asked = cgutils.get_or_insert_function(module, _ASKED, name)
        arguments.append(inside.sext(inside.call(asked, []), _LONG))
    call = context.call_internal_no_propagate
    status, _ = call(inside, body.fndesc, body.signature, arguments)
    with cgutils.if_unlikely(inside, status.is_error):
        inside.store(_ONE, inside.gep(data, [_NONE, _NONE]))
    inside.ret_void()
    return function


def _run_in_pool(context: Any, builder: Any, body: Any, threads: Any, arguments: Any) -> None:
    """Call GOMP_parallel, and raise an error if a part met one."""
    given = cgutils.alloca_once_value(builder, cgutils.pack_struct(builder, [_NONE, arguments]))
    run = ir.FunctionType(ir.VoidType(), [_PART.as_pointer(), _ADDRESS, _INT, _INT])
    part = _outlined(context, builder, body, given)
    builder.call(
        cgutils.get_or_insert_function(builder.module, run, _RUN),
        [part, builder.bitcast(given, _ADDRESS), builder.trunc(threads, _INT), _NONE],
    )
    failed = builder.load(builder.gep(given, [_NONE, _NONE]))
    with cgutils.if_unlikely(builder, builder.icmp_unsigned("!=", failed, _NONE)):
        context.call_conv.return_user_exc(builder, RuntimeError, ("a part of a kernel failed",))


def _run_alone(context: Any, builder: Any, body: Any, arguments: Any) -> None:
    """Run the only part."""
    parts = [ir.Constant(_LONG, value) for value in (0, 1)]
    given = [*cgutils.unpack_tuple(builder, arguments), *parts]
    context.call_internal(builder, body.fndesc, body.signature, given)


def _typed(typing: Any, body: Any, threads: Any, arguments: Any) -> Any:
    kinds = (*arguments.types, types.int64, types.int64)
    body.get_call_type(typing, kinds, {})
    compiled = body.dispatcher.overloads[kinds]

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        context.add_linking_libs([compiled.library])
        if HAS_THREADS:
            _run_in_pool(context, builder, compiled, values[1], values[2])
        else:
            _run_alone(context, builder, compiled, values[2])
        return context.get_dummy_value()

    return types.void(body, threads, arguments), generate


on_threads = cast(Callable[[Callable[..., None], int, tuple[Any, ...]], None], intrinsic(_typed))
"""Run body(*arguments, part, parts) for each of so many parts, each on a thread of its own.

What is computed must not depend on the parts; there may be fewer than asked for.
"""
