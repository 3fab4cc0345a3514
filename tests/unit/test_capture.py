"""Buckets, and what becomes of a step that is padded, recorded and replayed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from surefoot.backend.operands import RowLayout
from surefoot.backend.protocol import Recording
from surefoot.backend.reference import ReferenceBackend
from surefoot.backend.tape import TapeError
from surefoot.capture import (
    EAGER,
    Bucket,
    Capture,
    CapturedCall,
    Computed,
    EagerCall,
    Pass,
    RowKind,
    make_buckets,
)
from surefoot.step import Batch, Row, Step
from surefoot.testing.recorded import RecordedReplay, TapedRecording

P = 4
PAGES, SLOTS, SIZE = 40, 12, 3


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 13, 32])
@pytest.mark.parametrize("widest", [1, 2, 4, 9])
@pytest.mark.parametrize("most", [1, 2, 5, 9, 100])
def test_buckets_suffice_and_are_no_more_than_may_be(rows: int, widest: int, most: int) -> None:
    buckets = make_buckets(rows, widest, most)
    assert 0 < len(buckets) <= most
    assert list(buckets) == sorted(set(buckets))
    assert max(bucket.rows for bucket in buckets) == rows
    assert max(bucket.width for bucket in buckets) == widest
    if most >= 2 and widest > 1:
        # Plain decoding is never padded to the width of a draft.
        assert min(bucket.width for bucket in buckets) == 1
    assert make_buckets(rows, widest, 0) == ()


def test_all_powers_of_two_are_there_where_there_is_room() -> None:
    assert {bucket.rows for bucket in make_buckets(12, 4, 64)} == {1, 2, 4, 8, 12}
    assert {bucket.width for bucket in make_buckets(12, 6, 64)} == {1, 2, 4, 6}


class Sums:
    """A pass with a paged cache: each token's entry is the input, its state the sum up to it."""

    def __init__(self) -> None:
        self.pool = torch.full((PAGES, 1, P, SIZE), torch.nan)
        self.ring = torch.full((SLOTS, 2, SIZE), torch.nan)

    def __call__(self, batch: Batch, inputs: Sequence[Tensor]) -> Computed:
        """Attention with equal weights over the entries, times the position; see Pass."""
        entries = inputs[0] + batch.tokens[:, None]
        batch.rows.paged_write(self.pool, entries[:, None])
        batch.rows.ring_write(self.ring, entries)
        zeros = torch.zeros(len(entries), 1, SIZE)
        mean = batch.rows.paged_attention(zeros, self.pool, self.pool, 1.0)[:, 0]
        hidden = mean * (batch.positions + 1)[:, None]
        return Computed(hidden, hidden[batch.wanted])


def call_of(work: Pass, rows: int = 4, width: int = 3) -> tuple[CapturedCall, RecordedReplay]:
    backend = RecordedReplay(ReferenceBackend())
    buckets = make_buckets(rows, width, 64)
    return CapturedCall(work, backend, buckets, 6, RowKind(width, 1, bounded=False)), backend


def steps(count: int) -> list[tuple[Step, Tensor]]:
    """Steps of other sizes at other places each time, whose rows go on where they were."""
    draws, made = torch.Generator().manual_seed(1), []
    cursor = dict.fromkeys(range(4), 0)
    for number in range(count):
        rows = []
        for row in range(1 + number % 4):
            length = 1 + (number + row) % 3
            table = range(1 + 6 * row, 7 + 6 * row)
            first = cursor[row]
            tokens = torch.randint(0, 50, (length,), generator=draws).tolist()
            rows.append(Row(tokens, first, 1, table, row + 1, 0, length, first))
            cursor[row] = (first + 1 + number % length) % 18
        step = Step.of(rows, P)
        made.append((step, torch.randn(step.token_count, SIZE, generator=draws)))
    return made


def compare(run: Callable[[Sums, Step, Tensor], Computed], count: int = 24) -> None:
    """Replayed steps give what eager ones give, and leave the same in live pages and slots."""
    plain, mine = Sums(), Sums()
    eager = EagerCall(plain, ReferenceBackend())
    for step, given in steps(count):
        want, got = eager(step, given), run(mine, step, given)
        torch.testing.assert_close(got.hidden, want.hidden)
        torch.testing.assert_close(got.logits, want.logits)
        torch.testing.assert_close(mine.pool[1:], plain.pool[1:], equal_nan=True)
        torch.testing.assert_close(mine.ring[1:], plain.ring[1:], equal_nan=True)


class Runner:
    """Replays steps of a pass."""

    def __init__(self) -> None:
        self.call: CapturedCall | None = None
        self.backend = RecordedReplay(ReferenceBackend())

    def __call__(self, work: Sums, step: Step, given: Tensor) -> Computed:
        """Run one step."""
        if self.call is None:
            self.call, self.backend = call_of(work)
        with torch.inference_mode():
            return self.call(step, given)


def test_steps_of_any_size_are_replayed_as_they_would_run_eagerly() -> None:
    run = Runner()
    compare(run)
    assert len(run.backend.recordings) > 4
    assert sum(recording.replays for recording in run.backend.recordings) == 24


def test_steps_past_the_largest_bucket_run_eagerly() -> None:
    call, backend = call_of(Sums(), rows=1, width=2)
    for step, given in steps(8):
        with torch.inference_mode():
            call(step, given)
    assert sum(recording.replays for recording in backend.recordings) == 2


def test_a_padding_row_may_be_longer_than_any_request() -> None:
    """One row of a full step is wide, and all padding is in one row."""
    plain, mine = Sums(), Sums()
    backend = RecordedReplay(ReferenceBackend())
    bucket, longest = Bucket(4, 9), 3
    call = CapturedCall(mine, backend, (bucket,), longest, RowKind(9, 1, bounded=False))
    for width in (9, 1):
        counts = (width, 1, 1, 1)
        tables = [range(1 + longest * row, 1 + longest * (row + 1)) for row in range(4)]
        rows = [
            Row([7] * count, 0, count, table, slot, 0, 1, 0)
            for slot, (count, table) in enumerate(zip(counts, tables, strict=True), 1)
        ]
        step = Step.of(rows, P)
        padded = step.pad(bucket.padded_rows, bucket.padded_tokens).rows[-1]
        assert longest * P < padded.count <= bucket.longest_padding
        given = torch.randn(step.token_count, SIZE)
        with torch.inference_mode():
            got = call(step, given)
        torch.testing.assert_close(
            got.logits, EagerCall(plain, ReferenceBackend())(step, given).logits
        )
    assert padded.count == bucket.longest_padding


class Crowded(RecordedReplay):
    """A device that holds two recordings."""

    def record(self, *given: Any) -> Recording | None:  # type: ignore[override]
        """See Backend."""
        return super().record(*given) if len(self.recordings) < 2 else None


def test_sizes_without_room_for_a_recording_run_eagerly_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, backend = Runner(), Crowded(ReferenceBackend())
    buckets = make_buckets(4, 3, 64)

    def crowded(work: Sums, step: Step, given: Tensor) -> Computed:
        kind = RowKind(3, 1, bounded=False)
        run.call = run.call or CapturedCall(work, backend, buckets, 6, kind)
        return run(work, step, given)

    compare(crowded)
    assert len(backend.recordings) == 2
    assert sum(recording.replays for recording in backend.recordings) > 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "as many recorded steps as it can" in caplog.text


def test_what_was_recorded_is_let_go_of_when_its_owner_is_closed() -> None:
    backend, capture = RecordedReplay(ReferenceBackend()), Capture(2, 2, 6, 4)
    call = capture.call(Sums(), backend, RowKind(2, 1, bounded=False))
    with torch.inference_mode():
        call(Step.of([Row([7], 0, 1, [1], 1, 0, 1, 0)], P), torch.randn(1, SIZE))
    held = weakref.ref(backend.recordings.pop())
    assert held() is not None
    capture.close()
    assert held() is None


def test_nothing_is_captured_without_recordings() -> None:
    kind = RowKind(1, 1, bounded=False)
    assert isinstance(EAGER.call(Sums(), ReferenceBackend(), kind), EagerCall)
    some = Capture(2, 2, 6, 4)
    assert isinstance(some.call(Sums(), RecordedReplay(ReferenceBackend()), kind), CapturedCall)


# Planted faults: each is what a public engine has got wrong about captured steps.


def test_a_buffer_that_is_not_filled_anew_is_found_out() -> None:
    fill = Step.fill

    def forgetful(self: Step, batch: Batch) -> None:
        before = batch.positions.clone()
        fill(self, batch)
        batch.positions.copy_(before)

    with patch.object(Step, "fill", forgetful), pytest.raises(AssertionError):
        compare(Runner())


def test_the_tail_of_a_buffer_that_keeps_an_older_step_is_found_out() -> None:
    fill = Step.fill

    def short(self: Step, batch: Batch) -> None:
        before = batch.wanted.clone()
        fill(self, batch)
        batch.wanted[1:] = before[1:]

    with patch.object(Step, "fill", short), pytest.raises((AssertionError, IndexError)):
        compare(Runner())


def test_lengths_of_before_the_padding_are_found_out() -> None:
    replay = TapedRecording.replay

    def unpadded(self: TapedRecording, layout: RowLayout) -> None:
        live = [row for row, slot in enumerate(layout.slots) if slot]
        replay(
            self,
            RowLayout(
                starts=layout.starts[: len(live) + 1],
                first=layout.first[: len(live)],
                tables=layout.tables[: len(live)],
                slots=layout.slots[: len(live)],
                visible_from=layout.visible_from[: len(live)],
                settled=layout.settled[: len(live)],
                settles=layout.settles[: len(live)],
                page_tokens=layout.page_tokens,
            ),
        )

    with patch.object(TapedRecording, "replay", unpadded), pytest.raises(AssertionError):
        compare(Runner())


def test_padding_in_the_place_of_a_live_row_is_found_out() -> None:
    with (
        patch("surefoot.step.SINK_SLOT", 1),
        patch("surefoot.step.SINK_PAGE", 1),
        pytest.raises(AssertionError),
    ):
        compare(Runner())


class FrozenLength(Sums):
    """A number of the host goes into the recording."""

    def __call__(self, batch: Batch, inputs: Sequence[Tensor]) -> Computed:
        """See Pass."""
        computed = super().__call__(batch, inputs)
        places = torch.tensor([0] * len(batch.wanted))
        return computed._replace(logits=computed.hidden[places])


class Asks(Sums):
    """The host asks for a value."""

    def __call__(self, batch: Batch, inputs: Sequence[Tensor]) -> Computed:
        """See Pass."""
        computed = super().__call__(batch, inputs)
        return computed._replace(logits=computed.logits * int(batch.positions[0]))


@pytest.mark.parametrize("work", [FrozenLength, Asks])
def test_values_of_the_host_cannot_be_recorded(work: type[Sums]) -> None:
    call, _ = call_of(work())
    step, given = steps(1)[0]
    with torch.inference_mode(), pytest.raises(TapeError):
        call(step, given)


def test_a_bucket_pads_to_one_row_and_one_token_more() -> None:
    bucket = Bucket(4, 3)
    assert (bucket.padded_rows, bucket.padded_tokens) == (5, 13)
    for step, _ in steps(12):
        padded = step.pad(bucket.padded_rows, bucket.padded_tokens)
        assert all(row.count for row in padded.rows)
        assert padded.rows[-1].slot == 0
