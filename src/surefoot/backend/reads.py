"""Where the host waits for values that a device holds, found out by watching calls on tensors.

On an accelerator every such place costs a halt of the whole device, and none can be recorded. On
the CPU they cost nothing and go unseen, hence this.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

FRAMES = 3
"""How many frames tell where a read was made."""

_CONVERSIONS = frozenset(
    {
        "__array__",
        "__bool__",
        "__complex__",
        "__contains__",
        "__dlpack__",
        "__float__",
        "__format__",
        "__index__",
        "__int__",
        "__repr__",
        "allclose",
        "cpu",
        "equal",
        "is_nonzero",
        "item",
        "nonzero",
        "numpy",
        "tolist",
        "unique",
        "unique_consecutive",
        "masked_select",
    }
)


class Watcher(Protocol):
    """What is told of each call; it makes the call and returns what came of it."""

    @property
    def paused(self) -> bool:
        """Whether calls are none of its business now."""
        ...

    def python_call(
        self,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """A function of torch or a tensor's method, before torch takes it apart."""
        ...

    def aten_call(
        self, function: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """One of the operators that torch takes it apart into."""
        ...


class _PythonCalls(TorchFunctionMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if self._watcher.paused:
            return func(*args, **(kwargs or {}))
        return self._watcher.python_call(func, args, kwargs or {})


class _AtenCalls(TorchDispatchMode):
    def __init__(self, watcher: Watcher) -> None:
        TorchDispatchMode.__init__(self)
        self._watcher = watcher
        self._whole: set[OpOverload] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To be kept from compilation, torch would import its compiler: two seconds for nothing.
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if self._watcher.paused:
            return func(*args, **kwargs)
        # Under inference_mode composite operators arrive whole, and would hide their parts.
        if func not in self._whole:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self._whole.add(func)
        return self._watcher.aten_call(func, args, kwargs)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of every call on tensors that this thread makes inside."""
    with _AtenCalls(watcher), _PythonCalls(watcher):
        yield


@contextmanager
def unwatched() -> Iterator[None]:
    """Tell nobody of the calls that are made inside: they are those of a device."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def name_of(function: Callable[..., object]) -> str:
    """The name of a function as a reader knows it."""
    return str(function) if isinstance(function, OpOverload) else function.__name__


def read_by_python(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> str | None:
    """The name of a call that needs the values of a tensor on the host, None if it needs none."""
    name = name_of(function)
    if name == "to" and _goes_to_the_host(args[1:], kwargs):
        return "to('cpu')"
    return name if name in _CONVERSIONS else None


def read_by_aten(
    function: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> str | None:
    """The name of an operator whose result or result's shape the host must wait for, or None."""
    name, waits = _nature(function)
    if name.startswith(("aten.index.", "aten.index_put")):
        return f"{name} with a mask" if _has_mask(args[1]) else None
    if name.startswith("aten.repeat_interleave") and kwargs.get("output_size") is not None:
        return None
    return name if waits else None


@cache
def _nature(function: OpOverload) -> tuple[str, bool]:
    """An operator's name, and whether its result or its shape depends on values."""
    tags = function.tags
    waits = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    return str(function), waits


def _goes_to_the_host(args: Iterable[object], kwargs: Mapping[str, object]) -> bool:
    target = kwargs.get("device", next(iter(args), None))
    return isinstance(target, str | torch.device) and torch.device(target).type == "cpu"


def _has_mask(indices: object) -> bool:
    masks = (torch.bool, torch.uint8)
    return isinstance(indices, list | tuple) and any(
        isinstance(index, Tensor) and index.dtype in masks for index in indices
    )


@dataclass(frozen=True)
class Read:
    """One place where the host asked for values.

    Attributes:
        call: what asked.
        where: `file:line function` of the innermost frames outside torch, the innermost first.
    """

    call: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.call} at {' < '.join(self.where)}"


class HostReads:
    """Counts the reads of tensors' values by the host that are made inside a `with`.

    Attributes:
        others: reads that no allowed function made.
        allowed: how many an allowed function made.
    """

    def __init__(
        self, allowed: Iterable[Callable[..., object]] = (), device: Iterable[str] = ()
    ) -> None:
        """See the class.

        Args:
            allowed: functions whose reads, and those of whatever they call, are counted apart.
            device: modules, packages included, that stand for the device itself; their reads, and
                those of whatever they call, are none of the host's.
        """
        self.others: list[Read] = []
        self.allowed = 0
        self.paused = False
        self._allowed = frozenset(_code(function) for function in allowed)
        self._device = tuple(device)
        self._watching = watching(self)

    def __enter__(self) -> Self:
        self._watching.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watching.__exit__(kind, error, trace)

    @property
    def count(self) -> int:
        """Reads that no allowed function made."""
        return len(self.others)

    def python_call(
        self,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """See Watcher."""
        return self._make(read_by_python(function, args, kwargs), function, args, kwargs)

    def aten_call(
        self, function: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """See Watcher."""
        return self._make(read_by_aten(function, args, kwargs), function, args, kwargs)

    def _make(
        self,
        read: str | None,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        if read is None:
            return function(*args, **kwargs)
        self._note(read)
        # What a read is made of is not a read of its own.
        self.paused = True
        try:
            return function(*args, **kwargs)
        finally:
            self.paused = False

    def _note(self, call: str) -> None:
        where: list[str] = []
        for frame, line in traceback.walk_stack(None):
            module = str(frame.f_globals.get("__name__", ""))
            if any(module == name or module.startswith(f"{name}.") for name in self._device):
                return
            if frame.f_code in self._allowed:
                self.allowed += 1
                return
            if module != __name__ and module.split(".")[0] != "torch":
                file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
                where.append(f"{file}:{line} {frame.f_code.co_name}")
        self.others.append(Read(call, tuple(where[:FRAMES])))


def _code(function: Callable[..., object]) -> CodeType:
    plain = inspect.unwrap(function)
    method = plain.__func__ if inspect.ismethod(plain) else plain
    if not inspect.isfunction(method):
        raise TypeError(f"wanted a function written in Python, came {function!r}")
    return method.__code__
