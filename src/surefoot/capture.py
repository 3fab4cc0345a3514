"""Steps that are recorded once and replayed: what is captured, for which sizes, and how it is fed.

step of n rows, each at most w tokens
-> the smallest bucket (rows >= n, width >= w), or eager if there is none
-> padded to rows + 1 rows and rows * width + 1 tokens, so that the last token is padding
-> its numbers go into the tensors that the recording reads; replay; results are cut to n rows

Where nothing has to be padded (`Capabilities.padded_recordings`), a size is recorded while a step
of it is computed, once it has come often. Steps whose rows differ in length come in too many sizes:
they are padded to the next of a few.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from surefoot.backend.operands import LayoutBounds
from surefoot.backend.protocol import Backend, Recording
from surefoot.backend.row_operators import RowOperators
from surefoot.step import Batch, Step, StepSize

log = logging.getLogger(__name__)

_MOST_TOKENS = 128  # a longer step is not held up by its calls
_OFTEN = 3  # steps of a size before it is recorded, which takes as long as ten of them
_GRAIN = 8  # so few tokens more cost less than what is gained by having met the size before


class Computed(NamedTuple):
    """What a pass over a step gave.

    Attributes:
        hidden: [T, ...] states of all tokens.
        logits: [R, V] at the wanted tokens.
    """

    hidden: Tensor
    logits: Tensor


Pass = Callable[[Batch, Sequence[Tensor]], Computed]
"""What may be captured: reads the batch, tensors [T, ...] and caches, and nothing else."""


class StepCall(Protocol):
    """Runs one pass over steps, eagerly or by replaying it."""

    def __call__(self, step: Step, *inputs: Tensor) -> Computed:
        """Run it; `inputs` are [T, ...] each.

        Results stay valid until the next call.
        """
        ...


@dataclass(frozen=True)
class EagerCall:
    """Runs operators one by one."""

    work: Pass
    backend: Backend

    def __call__(self, step: Step, *inputs: Tensor) -> Computed:
        """See StepCall."""
        return self.work(step.build(self.backend), inputs)


@dataclass(frozen=True)
class RowKind:
    """What all rows of a call have in common.

    Attributes:
        wanted: most logits of a row.
        known: tokens of a row that are known to stay, at least.
        bounded: whether a row may see less than all of its pages.
    """

    wanted: int
    known: int
    bounded: bool


@dataclass(frozen=True, order=True)
class Bucket:
    """A size for which steps are recorded: up to `rows` rows of up to `width` tokens each."""

    rows: int
    width: int

    @property
    def padded_rows(self) -> int:
        """Rows of a padded step; at least one owns the sink."""
        return self.rows + 1

    @property
    def padded_tokens(self) -> int:
        """Tokens of a padded step; at least one is padding."""
        return self.rows * self.width + 1

    @property
    def longest_padding(self) -> int:
        """Tokens of a padding row, at most: when it is the only one and others have one each."""
        return self.padded_tokens - self.rows

    def fits(self, step: Step) -> bool:
        """Whether the step can be padded to this size."""
        return len(step.rows) <= self.rows and all(row.count <= self.width for row in step.rows)


def make_buckets(most_rows: int, widest: int, most: int) -> tuple[Bucket, ...]:
    """Sizes for up to `most_rows` rows of up to `widest` tokens: powers of two, and the largest.

    Args:
        most_rows: of a step.
        widest: tokens of a row, e.g. the longest draft + 1.
        most: how many recordings there may be. Where they do not suffice, narrow steps and then
            small ones are padded more.

    Returns:
        The smallest first; none if `most` is 0.
    """
    rows, widths = _powers(most_rows), _powers(widest)
    while len(rows) * len(widths) > most and len(widths) > 2:
        widths.pop(1)
    while len(rows) * len(widths) > most and len(rows) > 1:
        rows.pop(0)
    while len(rows) * len(widths) > most and widths:
        widths.pop(0)
    return tuple(sorted(Bucket(count, width) for count in rows for width in widths))


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return [*(1 << bit for bit in range((most - 1).bit_length())), most]


@dataclass
class _Recorded:
    """One recording and the tensors that it reads."""

    batch: Batch
    inputs: Sequence[Tensor]
    recording: Recording


class CapturedCall:
    """Replays a pass where a bucket fits, and runs it eagerly where none does."""

    def __init__(
        self,
        work: Pass,
        backend: Backend,
        buckets: Sequence[Bucket],
        longest_table: int,
        kind: RowKind,
    ) -> None:
        """Capture `work` when a bucket is first used; see Capture."""
        self._eager = EagerCall(work, backend)
        self._buckets = buckets
        self._longest_table, self._kind = longest_table, kind
        self._recorded: dict[Bucket, _Recorded | None] = {}

    def close(self) -> None:
        """Let go of all recordings, which gives their room on the device back."""
        self._recorded.clear()

    def __call__(self, step: Step, *inputs: Tensor) -> Computed:
        """See StepCall."""
        bucket = next((bucket for bucket in self._buckets if bucket.fits(step)), None)
        if bucket is None or any(row.wanted > self._kind.wanted for row in step.rows):
            return self._eager(step, *inputs)
        if bucket not in self._recorded:
            self._recorded[bucket] = self._record(bucket, step.page_tokens, inputs)
        held = self._recorded[bucket]
        if held is None:
            return self._eager(step, *inputs)
        padded = step.pad(bucket.padded_rows, bucket.padded_tokens)
        padded.fill(held.batch)
        for mine, given in zip(held.inputs, inputs, strict=True):
            mine[: len(given)].copy_(given)
        held.recording.replay(padded.layout())
        wanted = sum(row.wanted for row in step.rows)
        hidden, logits = held.recording.outputs
        return Computed(hidden[: step.token_count], logits[:wanted])

    def _record(
        self, bucket: Bucket, page_tokens: int, inputs: Sequence[Tensor]
    ) -> _Recorded | None:
        """Record a step of padding alone, which touches nothing but the sink; None without room."""
        work, backend = self._eager.work, self._eager.backend
        log.info("recording steps of %d rows of %d tokens", bucket.rows, bucket.width)
        blank = Step.of([], page_tokens).pad(bucket.padded_rows, bucket.padded_tokens)
        batch = _blank_batch(blank, bucket, self._kind, backend)
        mine = [given.new_zeros(bucket.padded_tokens, *given.shape[1:]) for given in inputs]

        def run(rows: RowOperators) -> Sequence[Tensor]:
            return work(replace(batch, rows=rows), mine)

        inputs = (*batch.filled, *mine)
        of_padding = -(-bucket.longest_padding // page_tokens)
        bounds = LayoutBounds(max(self._longest_table, of_padding), self._kind.bounded)
        recording = backend.record(blank.layout(), bounds, inputs, run)
        if recording is not None:
            return _Recorded(batch, mine, recording)
        if None not in self._recorded.values():
            log.warning(
                "the device holds as many recorded steps as it can; steps of further sizes are "
                "computed operator by operator"
            )
        return None


class ExactCall:
    """Replays a pass over steps of sizes that come often, and runs others eagerly.

    Attributes:
        grain: steps whose rows differ in length are padded to a multiple of it; 1 for none.
    """

    def __init__(
        self, work: Pass, backend: Backend, most: int, longest_table: int, bounded: bool
    ) -> None:
        """Keep `most` recordings of `work`, the last ones used; see Capture."""
        self.grain = 1
        self._eager = EagerCall(work, backend)
        self._most = most
        self._bounds = LayoutBounds(longest_table, bounded)
        self._met: Counter[StepSize] = Counter()
        self._recorded: OrderedDict[StepSize, _Recorded] = OrderedDict()
        self._unfit: set[StepSize] = set()  # cannot be recorded

    def close(self) -> None:
        """Let go of all recordings."""
        self._recorded.clear()

    def __call__(self, step: Step, *inputs: Tensor) -> Computed:
        """See StepCall."""
        whole = self._padded(step)
        size = whole.size
        if size.tokens > _MOST_TOKENS or size in self._unfit:
            return self._eager(step, *inputs)
        if size in self._recorded:
            self._recorded.move_to_end(size)
            return _without_padding(_replayed(self._recorded[size], whole, inputs), step)
        if self._met[size] < _OFTEN:
            self._met[size] += 1
            return self._eager(step, *inputs)
        return _without_padding(self._record(size, whole, inputs), step)

    def _padded(self, step: Step) -> Step:
        rows, tokens = len(step.rows), step.token_count
        if self.grain == 1 or len({row.count for row in step.rows}) == 1:
            return step
        return step.pad(rows + 1, tokens + self.grain - tokens % self.grain)

    def _record(self, size: StepSize, step: Step, inputs: Sequence[Tensor]) -> Computed:
        """Compute a step and record it, if that can be done."""
        work, backend = self._eager.work, self._eager.backend
        batch = step.build(backend)
        mine = [given.new_zeros(size.tokens, *given.shape[1:]) for given in inputs]
        for held, given in zip(mine, inputs, strict=True):
            held[: len(given)].copy_(given)
        computed: list[Computed] = []

        def run(rows: RowOperators) -> Sequence[Tensor]:
            computed.append(work(replace(batch, rows=rows), mine))
            return computed[-1]

        recording = backend.record(step.layout(), self._bounds, (*batch.filled, *mine), run)
        if recording is None:
            self._unfit.add(size)
        else:
            self._recorded[size] = _Recorded(batch, mine, recording)
        if len(self._recorded) > self._most:
            dropped, _ = self._recorded.popitem(last=False)
            self._met[dropped] = 0
        return computed[0]  # what came after it was a rehearsal


def _replayed(held: _Recorded, step: Step, inputs: Sequence[Tensor]) -> Computed:
    """A step of the very size that was recorded."""
    step.fill(held.batch)
    for mine, given in zip(held.inputs, inputs, strict=True):
        mine[: len(given)].copy_(given)
    held.recording.replay(step.layout())
    return Computed(*held.recording.outputs)


def _without_padding(computed: Computed, step: Step) -> Computed:
    """What was computed for a step, without that of the padding behind it."""
    return Computed(computed.hidden[: step.token_count], computed.logits)


def _blank_batch(blank: Step, bucket: Bucket, kind: RowKind, backend: Backend) -> Batch:
    """Tensors for any step of this size, filled with padding."""
    wanted = bucket.rows * min(bucket.width, kind.wanted)
    return blank.build(backend, (wanted, bucket.rows * (bucket.width - kind.known)))


@dataclass(frozen=True)
class Capture:
    """What may be captured of an engine, which owns all that is recorded for it.

    Attributes:
        most_rows: of a step.
        widest: tokens of a decoding row: the longest draft + 1.
        longest_table: pages of a row.
        most: how many steps may be recorded by each call; 0 for none.
    """

    most_rows: int
    widest: int
    longest_table: int
    most: int
    _calls: list[CapturedCall | ExactCall] = field(default_factory=list, init=False, compare=False)

    def call(self, work: Pass, backend: Backend, kind: RowKind, widest: int = 0) -> StepCall:
        """A call of `work` on rows of a kind.

        They have up to `widest` tokens, if that is more than those of decoding rows.
        """
        if self.most and not backend.capabilities.padded_recordings:
            exact = ExactCall(work, backend, self.most, self.longest_table, kind.bounded)
            exact.grain = _GRAIN
            self._calls.append(exact)
            return exact
        buckets = make_buckets(self.most_rows, max(widest, self.widest), self.most)
        if not buckets:
            return EagerCall(work, backend)
        call = CapturedCall(work, backend, buckets, self.longest_table, kind)
        self._calls.append(call)
        return call

    def close(self) -> None:
        """Let go of what the engine's calls have recorded; they are not used any more."""
        for call in self._calls:
            call.close()


EAGER = Capture(1, 1, 1, 0)
"""Nothing is captured."""
