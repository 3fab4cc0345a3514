"""Compiles kernels, and keeps the machine code on disk for the next start."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar, cast

from numba import njit
from numba.core.registry import CPUDispatcher

from surefoot.backend.cpu.kernels.threads import HAS_THREADS

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_CONTRACT = {"contract"}  # a product and a sum may be one instruction
_REORDER = {"contract", "reassoc"}  # and a sum may be made in lanes
_COMPARE = {"nnan", "nsz", "reassoc"}  # comparisons may be made in lanes


def digest(folder: Path) -> str:
    """Changes with any file of a folder: a kernel's code depends on parts from other files."""
    hashed = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


# A kernel that was compiled for the pool of threads cannot be linked where there is none.
_VERSION = digest(Path(__file__).parent) + ("_in_pool" if HAS_THREADS else "")


Listener = Callable[[Callable[..., object], tuple[object, ...]], bool]
"""Is told of a kernel's machine code and its arguments, and says whether they are run."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell `listener` of every kernel that this thread runs inside."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Kernel(Generic[P, R]):
    """A function that is compiled for one signature when it is first wanted.

    One signature means one machine code, which treats equal rows alike. Where nothing can be
    written to disk, every start compiles anew.
    """

    def __init__(self, function: Callable[P, R], signature: str, freedom: set[str]) -> None:
        """Compile `function` later; `freedom` is what its floats may be spared (`fastmath`)."""
        function.__qualname__ = f"{function.__name__}_{_VERSION}"  # the key on disk
        self._function = function
        self._signature = signature
        self._freedom = freedom
        self._compiled: CPUDispatcher | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it."""
        if self._compiled is None:
            self.prepare()
        assert self._compiled is not None, "prepared"
        listener = _listener.get()
        if listener is not None:
            assert not kwargs, "kernels take their arguments by place"
            if not listener(self._compiled, args):
                return cast(R, None)  # as all kernels give
        return cast(R, self._compiled(*args, **kwargs))

    def prepare(self) -> bool:
        """Compile it, or take what an earlier run has compiled; whether it had to be compiled."""
        if self._compiled is not None:
            return False
        try:
            made = self._make(keep=True)
        except Exception as error:  # no folder, no room, or what is kept is damaged: many types
            log.info("%s is compiled without a copy on disk: %r", self._function.__name__, error)
            made = self._make(keep=False)
        self._compiled = made
        return not made.stats.cache_hits

    def _make(self, keep: bool) -> CPUDispatcher:
        made = njit(nogil=True, error_model="numpy", fastmath=self._freedom, cache=keep)
        compiled = made(self._function)
        compiled.compile(self._signature)
        compiled.disable_compile()
        return cast(CPUDispatcher, compiled)


def kernel(signature: str) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """A kernel whose sums are made in the order that is written."""
    return lambda function: Kernel(function, signature, _CONTRACT)


def exact_kernel(signature: str) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """A kernel each of whose operations rounds as IEEE 754 has it, one by one."""
    return lambda function: Kernel(function, signature, set())


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """A part of exact kernels."""
    return cast(Callable[P, R], njit(nogil=True, error_model="numpy")(function))


def part(function: Callable[P, R]) -> Callable[P, R]:
    """A part of kernels: its sums are made in the order that is written."""
    made = njit(nogil=True, error_model="numpy", fastmath=_CONTRACT)(function)
    return cast(Callable[P, R], made)


def lanes(function: Callable[P, R]) -> Callable[P, R]:
    """A part of kernels: a sum over a row may be made in lanes, always the same for its length."""
    made = njit(nogil=True, error_model="numpy", fastmath=_REORDER)(function)
    return cast(Callable[P, R], made)


def extremes(function: Callable[P, R]) -> Callable[P, R]:
    """A part of kernels that compares numbers, in any order."""
    made = njit(nogil=True, error_model="numpy", fastmath=_COMPARE)(function)
    return cast(Callable[P, R], made)
