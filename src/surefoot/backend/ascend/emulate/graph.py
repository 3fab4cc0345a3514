"""Captured graphs, and what else the vendor's module offers about the device itself.

A capture computes nothing that stays, as on the device: what was written is put back afterwards,
and new tensors hold NaN until the first replay. So a graph that reads another's results can only
be captured once the other has been replayed. A replay here is over when it returns; lengths must
be updated before it, where the device would wait for them.

Reading a tensor on the host during a capture raises `surefoot.backend.tape.TapeError`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeAlias

import psutil

from surefoot.backend.ascend.emulate.contract import (
    STRICT,
    Operators,
    Profile,
    RefusedError,
    SilentError,
    describe,
)
from surefoot.backend.tape import Call, Tape, tensors_in

UPDATABLE: Mapping[str, tuple[str, ...]] = {
    "npu_fused_infer_attention_score": ("actual_seq_lengths", "actual_seq_lengths_kv"),
    "npu_fused_infer_attention_score_v2": ("actual_seq_qlen", "actual_seq_kvlen"),
}
"""Host lists that a captured call lets go of; everything else on the host is frozen."""

Form: TypeAlias = tuple[object, ...]


class Graphs(Operators):
    """`npu`, the part of the vendor's module that is about the device.

    Attributes:
        npu: see Device.
    """

    def __init__(self, profile: Profile = STRICT) -> None:
        super().__init__(profile)
        self.npu = Device(self)
        self.tapes.append(self.npu.warmed)


class Device:
    """One device: its captures, its memory, and how often the host waited for all of it.

    Attributes:
        synchronizations: calls of `synchronize`, those that captures make included.
        warmed: calls that were made outside of captures.
    """

    def __init__(self, vendor: Operators) -> None:
        self.synchronizations = 0
        self.warmed = WarmUp()
        self._vendor = vendor
        self._capturing = False
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()

    def NPUGraph(self) -> Graph:
        """A graph to be captured."""
        return Graph(self)

    def graph(
        self,
        npu_graph: Graph,
        pool: object | None = None,
        stream: object | None = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> Capture:
        """Capture calls on tensors inside a `with`.

        Args:
            npu_graph: a graph that holds no capture.
            pool: memory to be shared; not looked at.
            stream: not looked at.
            auto_dispatch_capture: whether lengths can be updated.
            capture_error_mode: not looked at.
        """
        return Capture(self, self._vendor, npu_graph, auto_dispatch_capture)

    def graph_pool_handle(self) -> object:
        """A name for memory that captures may share."""
        return object()

    def is_current_stream_capturing(self) -> bool:
        """Whether a capture is under way."""
        return self._capturing

    def synchronize(self, device: object | None = None) -> None:
        """Wait for all work."""
        self.refuse_in_capture("synchronize")
        self.synchronizations += 1

    def mem_get_info(self, device: object | None = None) -> tuple[int, int]:
        """Free and total bytes."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def refuse_in_capture(self, what: str) -> None:
        """Raise if a capture is under way."""
        if self._capturing:
            raise _refused(what, "in a capture", f"{what} while a stream is capturing")

    def begin(self, graph: Graph) -> None:
        """A capture starts, and needs room for one more graph."""
        self.refuse_in_capture("capture_begin")
        most = self._vendor.profile.most_graphs
        if len(self._graphs) >= most:
            gc.collect()
        held = len(self._graphs)
        if held >= most:
            raise _refused(
                "NPUGraph",
                "device resources",
                f"no stream left for another graph: wanted at most {most}, {held} are held",
            )
        self.synchronize()
        self._graphs.add(graph)
        self._capturing = True

    def end(self) -> None:
        """The capture is over."""
        self._capturing = False

    def drop(self, graph: Graph) -> None:
        """A graph holds nothing any more."""
        self._graphs.discard(graph)


class WarmUp:
    """Notes which calls have been made, and makes them.

    Operators set themselves up at their first call with given shapes, which no capture can hold.
    """

    def __init__(self) -> None:
        self._forms: set[Form] = set()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See Recorder."""
        result = function(*args, **kwargs)
        self._forms.add(_form(function, args, kwargs))
        return result

    def check(
        self, function: Callable[..., Any], args: object, kwargs: Mapping[str, object]
    ) -> None:
        """Raise unless the same call has been made, with tensors of the same shapes."""
        if _form(function, args, kwargs) not in self._forms:
            name = function.__name__
            raise _refused(
                name,
                "warm-up",
                f"{name} is captured with shapes it has never been called with: "
                f"{', '.join(describe(x) for x in tensors_in((args, kwargs)))}; wanted a call "
                "outside of captures first",
            )


class Capture:
    """A `with` block whose calls go into a graph."""

    def __init__(
        self, device: Device, vendor: Operators, graph: Graph, auto_dispatch_capture: bool
    ) -> None:
        self._device = device
        self._vendor = vendor
        self._graph = graph
        self._auto = auto_dispatch_capture
        self._tape = Tape()
        self._open = ExitStack()

    def __enter__(self) -> None:
        self._graph.refuse_captured()
        self._device.begin(self._graph)
        self._open.callback(self._device.end)
        self._open.enter_context(self._tape.recording(keep=False))
        self._vendor.tapes.append(self)
        self._open.callback(self._vendor.tapes.remove, self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, trace)
        if error is None:
            self._graph.captured(self._tape, self._auto)
        else:
            self._graph.reset()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See Recorder."""
        self._device.warmed.check(function, args, kwargs)
        return self._tape.call(function, *args, **kwargs)


class Graph:
    """A captured graph, `NPUGraph` in the vendor's module."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tape: Tape | None = None
        self._records: list[Call] = []
        self._auto = False
        self._fresh = False

    def captured(self, tape: Tape, auto_dispatch_capture: bool) -> None:
        """Take a finished capture."""
        self._tape = tape
        self._auto = auto_dispatch_capture
        self._fresh = False
        self._records = [call for call in tape.calls if _lists_of(call)]

    def refuse_captured(self) -> None:
        """Raise if there is a capture already."""
        if self._tape is not None:
            message = "this graph holds a capture already; reset it or make another"
            raise _refused("NPUGraph", "captured twice", message)

    def update(self, cpu_update_input: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Give the captured calls other lengths, once for each replay.

        Args:
            cpu_update_input: for each captured call that has such lists all of them, by argument;
                or one mapping for all calls.
        """
        if self._tape is None or not self._auto:
            raise _refused(
                "NPUGraph.update",
                "auto_dispatch_capture",
                "wanted a graph captured with auto_dispatch_capture=True, which this is not",
            )
        inputs = list(cpu_update_input)
        if len(inputs) == 1:
            inputs *= len(self._records)
        if len(inputs) != len(self._records) or not inputs:
            raise _refused(
                "NPUGraph.update",
                "number of mappings",
                f"there are {len(self._records)} operators to be updated, and "
                f"{len(cpu_update_input)} elements in cpu_update_input",
            )
        for record, given in zip(self._records, inputs, strict=True):
            _check_update(record, given)
        for record, given in zip(self._records, inputs, strict=True):
            record.kwargs = {**record.kwargs, **{key: list(given[key]) for key in given}}
        self._fresh = True

    def replay(self) -> None:
        """Run what was captured, on the tensors it was captured with."""
        self._device.refuse_in_capture("replay")
        if self._tape is None:
            raise _refused("NPUGraph.replay", "no capture", "wanted a captured graph, came none")
        if self._records and not self._fresh:
            record = self._records[0]
            raise SilentError(
                "NPUGraph.replay",
                "stale lengths",
                f"wanted an update of {', '.join(_lists_of(record))} of {record} for this replay, "
                "came none; the device would wait for ever or use the last lengths",
            )
        self._fresh = False
        self._tape.replay()

    def reset(self) -> None:
        """Let go of the capture."""
        self._tape = None
        self._records = []
        self._device.drop(self)

    def pool(self) -> object:
        """A name for this graph's memory."""
        return self


def _lists_of(call: Call) -> tuple[str, ...]:
    """Host lists of a captured call that must be updated."""
    names = UPDATABLE.get(str(call), ())
    return tuple(name for name in names if call.kwargs.get(name) is not None)


def _check_update(record: Call, given: Mapping[str, Sequence[int]]) -> None:
    wanted = _lists_of(record)
    unknown = [key for key in given if key not in wanted]
    missing = [key for key in wanted if key not in given]
    for rule, keys in (("unknown key", unknown), ("missing key", missing)):
        if keys:
            raise SilentError(
                "NPUGraph.update",
                rule,
                f"{record} has been captured with {', '.join(wanted)}, came {', '.join(given)}: "
                f"{', '.join(keys)} is {rule.split()[0]}; the device would use stale lengths",
            )
    for key in wanted:
        _check_lengths(key, given[key], record.kwargs[key])


def _check_lengths(key: str, value: Sequence[int], captured: Any) -> None:
    is_list = isinstance(value, list | tuple) and all(type(each) is int for each in value)
    if not is_list:
        message = f"{key}: wanted a list of ints, came {describe(value)}"
        raise _refused("NPUGraph.update", "host list", message)
    if len(value) != len(captured):
        message = f"{key}: wanted {len(captured)} lengths as captured, came {value!r}"
        raise _refused("NPUGraph.update", "number of lengths", message)


def _form(function: Callable[..., Any], args: object, kwargs: Mapping[str, object]) -> Form:
    shapes = tuple((tuple(x.shape), x.dtype) for x in tensors_in(args))
    named = tuple(
        (name, *((tuple(x.shape), x.dtype) for x in tensors_in(kwargs[name])))
        for name in sorted(kwargs)
    )
    return (function.__name__, shapes, named)


def _refused(operator: str, rule: str, message: str) -> RefusedError:
    return RefusedError(operator, rule, f"{message}\n[ERROR] ERR00001 PTA invalid parameter")
