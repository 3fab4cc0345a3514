"""Recorded steps on a CPU: the machine code that a step runs, in order, with its arguments.

A small model spends more time between its kernels than in them: a call of the framework from Python
runs through much code, which has to come back from memory each time. Recorded, a step is a list of
machine code and arrays. A call of the framework that computes something is recorded too; one that
only makes a view, or room, is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from surefoot.backend.blockwise.attention import Widths
from surefoot.backend.cpu.kernels.compile import listening
from surefoot.backend.cpu.rehearsal import Memory, Span, emptied, moved, span_of
from surefoot.backend.cpu.rows import CompiledRows, Integers, check_rows
from surefoot.backend.operands import LayoutBounds, RowLayout
from surefoot.backend.reads import name_of, watching
from surefoot.backend.row_operators import RowOperators
from surefoot.backend.tape import (
    Call,
    TapeError,
    memory_of,
    refuse_call,
    refuse_operator,
    tensors_in,
)

log = logging.getLogger(__name__)

_MOST_BYTES = 4 << 20  # what computes more than this at once is not held up by its calls
_ROOM = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})
_Entry = tuple[Callable[..., object], tuple[object, ...]]


class _Recorder:
    """Writes down what is run while it is run; see Watcher.

    What cannot be recorded is run on to its end all the same, as it has written to caches: a second
    run would find them changed.

    Attributes:
        paused: it has given up.
        entries: what was run.
        made: memory that was made, in order.
    """

    def __init__(self, rehearsing: bool = False) -> None:
        """Record; in a rehearsal no kernel runs, and what cannot be recorded is an error."""
        self.paused = False
        self.entries: list[_Entry] = []
        self.made: list[Span] = []
        self._given: list[tuple[object, ...]] = []
        self._rehearsing = rehearsing
        self._bytes = 0

    def kernel_call(self, function: Callable[..., object], args: tuple[object, ...]) -> bool:
        """A kernel is about to run; whether it may."""
        if not self.paused:
            self.entries.append((function, args))
            self._given.append((function, args))
        return not self._rehearsing

    def python_call(
        self,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """See Watcher: kernels take arrays, so a tensor may be turned into one."""
        if name_of(function) != "numpy":
            try:
                refuse_call(function, args, kwargs)
            except TapeError as error:
                self._give_up(error)
        return function(*args, **kwargs)

    def aten_call(
        self, function: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """See Watcher."""
        try:
            refuse_operator(function, args, kwargs)
        except TapeError as error:
            self._give_up(error)
            return function(*args, **kwargs)
        known = {memory_of(tensor) for tensor in tensors_in((args, dict(kwargs)))}
        mutable = function._schema.is_mutable
        if mutable and self._rehearsing and not known <= {begin for begin, _ in self.made}:
            raise TapeError(f"{function} writes to what was there before")
        result = function(*args, **kwargs)
        places = enumerate(tensors_in(result))
        fresh = [(place, made) for place, made in places if memory_of(made) not in known]
        self.made += [span_of(made) for _, made in fresh]
        self._bytes += sum(made.nbytes for _, made in fresh)
        if mutable or (fresh and function._schema.name not in _ROOM):
            self.entries.append((Call(function, args, dict(kwargs), fresh).repeat, ()))
            self._given.append((function, args, kwargs))
        if self._bytes > _MOST_BYTES:
            self._give_up("it computes too much to gain by it")
        return result

    def told(self, rows: _MovableRows) -> list[object]:
        """What was run, such that it is equal for steps that differ in nothing but their rows."""
        memory = Memory([*(span_of(array) for array, _ in rows.arrays), *self.made])
        return [memory.told(given) for given in self._given]

    def _give_up(self, reason: object) -> None:
        if self._rehearsing:
            raise TapeError(str(reason))
        log.info("a step is not recorded: %s", reason)
        self.paused = True
        self.entries.clear()
        self._given.clear()


class _MovableRows(CompiledRows):
    """Row operators whose kernels read arrays that can be written anew.

    Attributes:
        arrays: those arrays, each with what makes its numbers of a layout.
    """

    def __init__(self, layout: RowLayout, widths: Widths, longest_table: int) -> None:
        super().__init__(layout, widths)
        self._most_pages = longest_table * len(layout.tables)
        self.arrays: list[tuple[Integers, Callable[[RowLayout], Integers]]] = []

    def _laid_out(self, make: Callable[[RowLayout], Integers]) -> Integers:
        array = make(self._layout)
        if array.ndim == 1:
            array = np.pad(array, (0, self._most_pages - len(array)))
        self.arrays.append((array, make))
        return array

    def move(self, layout: RowLayout) -> None:
        """Let the kernels that were given these arrays see another layout."""
        check_rows(layout)
        for array, make in self.arrays:
            values = make(layout)
            array[: len(values)] = values


class StepRecording:
    """A step that was run once and can be run again for rows that lie elsewhere.

    Attributes:
        outputs: what its work returned.
    """

    def __init__(
        self, entries: Sequence[_Entry], rows: _MovableRows, outputs: Sequence[Tensor]
    ) -> None:
        """Run `entries`, whose kernels read `rows`."""
        self._entries, self._rows = entries, rows
        self.outputs = outputs

    @torch.inference_mode()
    def replay(self, layout: RowLayout) -> None:
        """See Recording."""
        self._rows.move(layout)
        for function, args in self._entries:
            function(*args)


def record_step(
    layout: RowLayout,
    bounds: LayoutBounds,
    widths: Widths,
    inputs: Sequence[Tensor],
    work: Callable[[RowOperators], Sequence[Tensor]],
) -> StepRecording | None:
    """Run a step, once, and record it; see Backend.record.

    None if that cannot be done, if the step is too large to gain by it, or if it was given numbers
    of the host that belong to this step alone.
    """
    rows, recorder = _MovableRows(layout, widths, bounds.longest_table), _Recorder()
    with listening(recorder.kernel_call), watching(recorder):
        outputs = work(rows)
    if recorder.paused:
        return None
    told = recorder.told(rows)
    for other in moved(layout, bounds):
        elsewhere = _MovableRows(other, widths, bounds.longest_table)
        rehearsal = _Recorder(rehearsing=True)
        try:
            with emptied(inputs), listening(rehearsal.kernel_call), watching(rehearsal):
                work(elsewhere)
        except TapeError as error:
            log.info("a step is not recorded: %s", error)
            return None
        if rehearsal.told(elsewhere) != told:
            log.warning("a step is not recorded: it was given numbers that belong to it alone")
            return None
    return StepRecording(recorder.entries, rows, outputs)
