"""Calls on tensors, recorded in order, to be made again: what a device's graph is, on any device.

What is recorded is calls, not their reasons: a number that the host took from somewhere is a
constant afterwards. So whatever could bring values to the host is refused while recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from surefoot.backend.reads import name_of, read_by_aten, read_by_python, watching

P = ParamSpec("P")
R = TypeVar("R")

_FROM_HOST = frozenset({"tensor", "as_tensor", "asarray", "from_numpy"})


class TapeError(RuntimeError):
    """A call cannot be recorded, or cannot be made again; a bug of the code that made it."""


@dataclass
class Call:
    """One recorded call.

    Attributes:
        function: what was called.
        args: with what; lists and dicts are copies.
        kwargs: likewise.
        fresh: tensors of the result that were new then, each with its place among the result's
            tensors. They get their values anew each time, so that whoever holds one sees them.
    """

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    fresh: list[tuple[int, Tensor]]

    def repeat(self) -> None:
        """Make the call again, on the same tensors."""
        results = list(tensors_in(self.function(*self.args, **self.kwargs)))
        for place, recorded in self.fresh:
            if place >= len(results):
                raise TapeError(f"{self} gave {len(results)} tensors, recorded were more")
            _renew(self, recorded, results[place])

    def __str__(self) -> str:
        return name_of(self.function)


class Tape:
    """A sequence of calls on tensors. It is recorded once and replayed any number of times.

    Attributes:
        calls: what has been recorded so far, in order.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._recorder: _Recorder | None = None
        self._complete = False

    @property
    def recording_now(self) -> bool:
        """Whether calls are being recorded."""
        return self._recorder is not None

    @contextmanager
    def recording(self, keep: bool = True) -> Iterator[None]:
        """Record the calls on tensors that this thread makes inside, while they are made.

        Calls that only make a view are left out: a view shows what it is a view of.

        Args:
            keep: whether what the calls did stands afterwards. Otherwise tensors that were there
                before get back what they held, and new ones are filled with NaN or the lowest
                integer until a replay, as if nothing had been computed.

        Raises:
            TapeError: the tape has been recorded already; or, from the call in question: it reads
                a tensor's values on the host, or turns values of the host into a tensor.
        """
        if self._complete or self._recorder is not None:
            raise TapeError("wanted an empty tape, came one that is recorded; make another")
        recorder = _Recorder(self.calls, keep)
        self._recorder = recorder
        try:
            with watching(recorder):
                yield
        except BaseException:
            self.calls.clear()
            raise
        finally:
            self._recorder = None
            recorder.undo()
        self._complete = True

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function; if recording, the call is recorded as a whole, not what it does inside.

        Tensors are found in tuples, lists, dicts and dataclasses too.

        Raises:
            TapeError: recording, and the result is not made of tensors alone.
        """
        if self._recorder is None or self._recorder.paused:
            return function(*args, **kwargs)
        return self._recorder.whole_call(function, args, kwargs)

    def replay(self) -> None:
        """Make the recorded calls again, in order and on the same tensors.

        Raises:
            TapeError: nothing has been recorded, or a result has another shape than then.
        """
        if not self._complete:
            raise TapeError("wanted a tape that is recorded, came an empty or unfinished one")
        with torch.inference_mode():
            for call in self.calls:
                call.repeat()


class _Recorder:
    """Writes calls down while they are made; see Watcher."""

    def __init__(self, calls: list[Call], keep: bool) -> None:
        self.paused = False
        self._calls = calls
        self._keep = keep
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._new: set[int] = set()

    def python_call(
        self,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """See Watcher."""
        refuse_call(function, args, kwargs)
        return function(*args, **kwargs)

    def aten_call(
        self, function: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """See Watcher."""
        refuse_operator(function, args, kwargs)
        mutable = function._schema.is_mutable
        self._remember(_written(function, args, kwargs) if mutable else ())
        result = function(*args, **kwargs)
        self._write_down(Call(function, args, dict(kwargs), []), result, always=mutable)
        return result

    def whole_call(
        self, function: Callable[..., R], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> R:
        """See Tape.call."""
        self.paused = True
        try:
            # What it writes is not known, so it may be any of its tensors.
            self._remember(tensors_in((args, kwargs)))
            result = function(*args, **kwargs)
            held = {name: _copied(value) for name, value in kwargs.items()}
            call = Call(function, tuple(_copied(value) for value in args), held, [])
            _check_result(call, result)
            self._write_down(call, result, always=True)
        finally:
            self.paused = False
        return result

    def undo(self) -> None:
        """Put back what was there before, unless it is to be kept."""
        for storage, before in self._before.values():
            storage.copy_(before)
        if not self._keep:
            with torch.inference_mode():
                for call in self._calls:
                    for _, tensor in call.fresh:
                        poison(tensor)

    def _write_down(self, call: Call, result: object, always: bool) -> None:
        known = {memory_of(tensor) for tensor in tensors_in((call.args, call.kwargs))}
        results = enumerate(tensors_in(result))
        call.fresh = [(place, x) for place, x in results if memory_of(x) not in known]
        if always or call.fresh:
            self._calls.append(call)
        self._new |= {memory_of(tensor) for _, tensor in call.fresh}

    def _remember(self, tensors: Iterator[Tensor] | tuple[Tensor, ...]) -> None:
        if self._keep:
            return
        for tensor in tensors:
            place, storage = memory_of(tensor), tensor.untyped_storage()
            if place not in self._before and place not in self._new:
                self._before[place] = (storage, storage.clone())


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in a value made of tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in fields(value)])


def poison(tensor: Tensor) -> None:
    """Fill a tensor with what no computation survives: NaN, or integers far out of any range."""
    own = _apart(tensor)
    if tensor.is_floating_point() or tensor.is_complex():
        own.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        limits = torch.iinfo(tensor.dtype)
        own.fill_(limits.min or limits.max)


def refuse_call(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Refuse a function of torch that brings values to the host, or takes some from there.

    Raises:
        TapeError: it does.
    """
    _refuse_read(read_by_python(function, args, kwargs))
    if name_of(function) in _FROM_HOST and not isinstance(next(iter(args), None), Tensor):
        raise _frozen_values(name_of(function))


def refuse_operator(
    function: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Refuse an operator that cannot be made again.

    Raises:
        TapeError: it needs values on the host, takes some from there, or reshapes in place.
    """
    _refuse_read(read_by_aten(function, args, kwargs))
    if function is torch.ops.aten.lift_fresh.default:
        _refuse_list(args[0])
    if torch.Tag.inplace_view in function.tags:
        raise TapeError(f"{function} changes the shape of a tensor in place; make a view")


def _refuse_read(read: str | None) -> None:
    if read is not None:
        raise TapeError(f"{read} needs the values of a tensor on the host; no recording can do so")


def _refuse_list(made: object) -> None:
    # A number assigned to elements arrives like this too; it is a constant.
    if isinstance(made, Tensor) and made.dim() > 0:
        raise _frozen_values("a list or an array")


def _frozen_values(name: str) -> TapeError:
    return TapeError(
        f"{name} makes a tensor of the host's values, which would stay the same in every replay; "
        "fill a tensor before the recording"
    )


def _check_result(call: Call, result: object) -> None:
    if result is None or isinstance(result, Tensor):
        return
    if isinstance(result, tuple | list):
        for part in result:
            _check_result(call, part)
    elif not is_dataclass(result):
        raise TapeError(f"{call} gives {type(result).__name__} to the host; wanted tensors alone")


def _renew(call: Call, recorded: Tensor, result: Tensor) -> None:
    if recorded.shape != result.shape or recorded.dtype != result.dtype:
        raise TapeError(
            f"{call} gave {tuple(result.shape)} {result.dtype}, "
            f"recorded was {tuple(recorded.shape)} {recorded.dtype}"
        )
    _apart(recorded).copy_(_apart(result))


def _apart(tensor: Tensor) -> Tensor:
    """The tensor without the elements that an expansion repeats, which cannot be written."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _written(
    function: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[Tensor]:
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)


def memory_of(tensor: Tensor) -> int:
    """Where the memory begins that a tensor shows, or shows a part of.

    A weight that a library has packed shows nothing; it stands for itself.
    """
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _copied(value: object) -> object:
    """The value, with lists and dicts that no one else can change."""
    if isinstance(value, list):
        return [_copied(part) for part in value]
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    return tuple(_copied(part) for part in value) if type(value) is tuple else value
