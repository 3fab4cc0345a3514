"""Steps recorded by their exact size: which are, how many are kept, and what is handed out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from surefoot import capture as capturing
from surefoot import step as stepping
from surefoot.backend.cpu import recording
from surefoot.backend.cpu.recording import StepRecording
from surefoot.capture import Capture, Computed, EagerCall, ExactCall, Pass, RowKind
from surefoot.state.pool import Pools
from surefoot.state.spec import Paged, Part
from surefoot.step import Batch, Row, Step
from tests.unit.twins import LONGEST, Counting, Journey, P, Twins, same_bits

SIZE = 8
CACHES = (Paged("kv", 1, (Part("k", (1, SIZE), "float32"),)),)
OFTEN = 3
Pick = Callable[[Batch, Tensor], Tensor]


def summing(pick: Pick | None = None) -> Callable[[Pools], Pass]:
    """A pass that attends to what it writes; `pick` changes the states that come of it."""

    def make(pools: Pools) -> Pass:
        pool = pools.layers("kv", "k")[0]

        def run(batch: Batch, inputs: Sequence[Tensor]) -> Computed:
            entries = (inputs[0] + batch.tokens[:, None])[:, None]
            batch.rows.paged_write(pool, entries)
            hidden = batch.rows.paged_attention(entries, pool, pool, 0.1)[:, 0]
            hidden = hidden * (batch.positions + 1)[:, None]
            if pick is not None:
                hidden = pick(batch, hidden)
            return Computed(hidden, hidden[batch.wanted])

        return run

    return make


def twins_of(pick: Pick | None = None, most: int = 8) -> Twins:
    return Twins(summing(pick), CACHES, Counting(), most)


def differences(twins: Twins, journey: Journey, lengths: Sequence[int], times: int) -> list[str]:
    """Steps of rows of so many tokens."""
    found = []
    for number in range(times):
        step = journey.step([(length, length, 0) for length in lengths])
        draws = torch.Generator().manual_seed(number)
        found += twins.differences(step, torch.randn(step.token_count, SIZE, generator=draws))
    return found


def test_a_size_is_recorded_once_it_has_come_often() -> None:
    twins, journey, seen = twins_of(), Journey(1), []
    for _ in range(OFTEN + 3):
        assert differences(twins, journey, (2, 1), 1) == []
        seen.append((twins.backend.made, twins.backend.replays))
    assert seen == [(0, 0)] * OFTEN + [(1, 0), (1, 1), (1, 2)]


def test_sizes_are_told_apart_by_all_that_shapes_a_step() -> None:
    """Rows, tokens, wanted logits and drafted tokens; not how rows share the tokens."""
    twins, journey = twins_of(), Journey(1)
    inputs = torch.zeros(4, SIZE)
    kinds = [
        ([(2, 2, 0), (2, 2, 0)], 1),
        ([(3, 3, 0), (1, 1, 0)], 1),
        ([(4, 4, 0)], 1),
        ([(2, 2, 0), (2, 2, 0)], 0),
        ([(2, 1, 0), (2, 2, 0)], 1),
        ([(1, 1, 1), (2, 2, 0)], 1),
    ]
    for _ in range(OFTEN + 2):
        for parts, wanted in kinds:
            assert twins.differences(journey.step(parts, wanted), inputs) == []
    assert twins.backend.made == 4


def test_long_steps_are_not_recorded() -> None:
    twins, journey = twins_of(), Journey(1)
    assert differences(twins, journey, (128,), OFTEN + 2) == []
    assert twins.backend.made == 1
    assert differences(twins, journey, (129,), OFTEN + 2) == []
    assert differences(twins, journey, (65, 64), OFTEN + 2) == []
    assert twins.backend.tried == 1


GRAIN = 8
UNLIKE = [(3, 1), (1, 4), (2, 1), (5, 1, 1), (1, 1, 4), (2, 3, 2), (1, 9), (8, 8, 7)]


def test_steps_of_rows_of_unlike_length_share_a_few_recordings() -> None:
    twins, journey = Twins(summing(), CACHES, Counting(), 8, GRAIN), Journey(1)
    for _ in range(OFTEN + 3):
        for lengths in UNLIKE:
            assert differences(twins, journey, lengths, 1) == []
    sizes = {(size.rows, size.tokens) for size in twins.call._recorded}
    assert sizes == {(3, 8), (4, 8), (3, 16), (4, 24)}
    assert twins.backend.replays > (OFTEN - 1) * len(UNLIKE)


@pytest.mark.parametrize("length", [1, 3])
def test_rows_of_one_length_are_not_padded(length: int) -> None:
    twins, journey = Twins(summing(), CACHES, Counting(), 8, GRAIN), Journey(1)
    assert differences(twins, journey, [length] * 3, OFTEN + 2) == []
    assert [(size.rows, size.tokens) for size in twins.call._recorded] == [(3, 3 * length)]


def test_padding_that_does_not_go_to_the_sink_is_found_out() -> None:
    twins, journey = Twins(summing(), CACHES, Counting(), 8, GRAIN), Journey(1)
    with patch.object(stepping, "SINK_PAGE", 1):
        assert differences(twins, journey, (3, 1), OFTEN + 3) != []


def listed(_: Batch, hidden: Tensor) -> Tensor:
    places = hidden[:, 0].argsort().tolist()
    return torch.stack([hidden[place] for place in places])


def scaled(batch: Batch, hidden: Tensor) -> Tensor:
    return hidden * batch.positions[0].item()


def cut(batch: Batch, hidden: Tensor) -> Tensor:
    return hidden * int(batch.tokens.sum())


def asked(_: Batch, hidden: Tensor) -> Tensor:
    return -hidden if hidden[0, 0] > 0 else hidden


def made_there(batch: Batch, hidden: Tensor) -> Tensor:
    return hidden + torch.tensor([float(len(batch.tokens))] * SIZE)


def masked(_: Batch, hidden: Tensor) -> Tensor:
    hidden[hidden > 0] = 0
    return hidden


def as_array(_: Batch, hidden: Tensor) -> Tensor:
    return torch.from_numpy(hidden.numpy() * 2)


def large(_: Batch, hidden: Tensor) -> Tensor:
    room = torch.zeros(1 + (4 << 20) // 4)
    return hidden + room[0]


@pytest.mark.parametrize("pick", [listed, scaled, cut, asked, made_there, masked, as_array, large])
def test_what_cannot_be_recorded_runs_eagerly_and_is_tried_once(pick: Pick) -> None:
    twins, journey = twins_of(pick), Journey(1)
    assert differences(twins, journey, (2, 1), OFTEN + 4) == []
    assert (twins.backend.tried, twins.backend.made) == (1, 0)


def test_the_recordings_used_last_are_kept() -> None:
    twins, journey = twins_of(most=2), Journey(1)
    for lengths in ((1,), (2,)):
        differences(twins, journey, lengths, OFTEN + 1)
    differences(twins, journey, (1,), 1)
    differences(twins, journey, (3,), OFTEN + 1)  # takes the place of (2,)
    backend = twins.backend
    assert (backend.made, backend.replays) == (3, 1)
    assert differences(twins, journey, (1,), 2) == []
    assert (backend.made, backend.replays) == (3, 3)
    assert differences(twins, journey, (2,), OFTEN + 2) == []
    assert backend.made == 4


def odd_sizes(batch: Batch, hidden: Tensor) -> Tensor:
    return hidden * hidden.sum().item() if len(hidden) % 2 else hidden


def test_sizes_that_cannot_be_recorded_take_no_place_from_others() -> None:
    twins, journey, most = twins_of(odd_sizes, most=2), Journey(1), 2
    for length in (1, 3, 5, 7, 2, 4, 6, 8):
        differences(twins, journey, (length,), OFTEN + 1)
        assert len(twins.call._recorded) <= most
    tried = twins.backend.tried
    for length in (1, 3, 5, 7, 6, 8):
        assert differences(twins, journey, (length,), 1) == []
    assert twins.backend.tried == tried


def test_all_recordings_are_let_go_of_at_the_end() -> None:
    held: list[weakref.ref[StepRecording]] = []
    init = StepRecording.__init__

    def noted(made: StepRecording, *given: object) -> None:
        init(made, *given)  # type: ignore[arg-type]
        held.append(weakref.ref(made))

    capture, backend = Capture(2, 2, LONGEST, 4), Counting()
    pools = Twins(summing(), CACHES, backend)._pools[0]
    call = capture.call(summing()(pools), backend, RowKind(1, 1, bounded=False))
    assert isinstance(call, ExactCall)
    step = Step.of([Row([7], 0, 1, [1], 1, 0, 1, 0)], P)
    with patch.object(StepRecording, "__init__", noted), torch.inference_mode():
        for _ in range(OFTEN + 2):
            call(step, torch.randn(1, SIZE))
    assert [recorded() is not None for recorded in held] == [True]
    capture.close()
    assert [recorded() for recorded in held] == [None]


def test_what_is_handed_out_lasts_until_the_next_call() -> None:
    """Other calls do not touch it."""
    backend, journey = Counting(), Journey(1)
    pools = Twins(summing(), CACHES, backend)._pools
    calls = [ExactCall(summing()(each), backend, 4, LONGEST, bounded=True) for each in pools]
    step, other = (journey.step([(2, 2, 0), (1, 1, 0)]) for _ in range(2))
    inputs = torch.randn(3, SIZE)
    with torch.inference_mode():
        for _ in range(OFTEN + 3):
            mine = calls[0](step, inputs)
            before = [part.clone() for part in mine]
            calls[1](other, inputs + 1)
            assert all(map(same_bits, mine, before))


def test_what_was_handed_out_may_come_back_as_an_input() -> None:
    """As it does in the later passes of a draft."""
    backend, journey = Counting(), Journey(1)
    mine, plain = Twins(summing(), CACHES, backend)._pools
    call = ExactCall(summing()(mine), backend, 4, LONGEST, bounded=True)
    eager = EagerCall(summing()(plain), backend)
    given = wanted = torch.randn(3, SIZE) / 100
    with torch.inference_mode():
        for _ in range(OFTEN + 5):
            step = journey.step([(0, 0, 1), (0, 0, 1), (0, 0, 1)])
            got, want = call(step, given), eager(step, wanted)
            assert same_bits(got.hidden, want.hidden)
            given, wanted = got.hidden, want.hidden / 1
            given /= 1000
            wanted /= 1000
    assert backend.replays == 4


def test_a_page_table_may_grow_to_the_longest() -> None:
    twins = twins_of()
    for pages in (1, 1, 1, 1, LONGEST, 2, LONGEST, 1):
        rows = [
            Row([5], P * pages - 1, 1, list(range(begin, begin + pages)), slot, 0, 1, 0)
            for slot, begin in enumerate((1, 1 + LONGEST), 1)
        ]
        assert twins.differences(Step.of(rows, P), torch.ones(2, SIZE)) == []
    assert twins.backend.replays == 4


# Planted faults.


def test_a_recording_without_the_framework_s_calls_is_found_out() -> None:
    def forgetful(
        _: object, function: Callable[..., object], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> object:
        return function(*args, **kwargs)

    with patch.object(recording._Recorder, "aten_call", forgetful):
        twins = twins_of()
        assert differences(twins, Journey(1), (2, 1), OFTEN + 3) == []
    assert (twins.backend.tried, twins.backend.made) == (1, 0)


def test_inputs_that_are_not_copied_are_found_out() -> None:
    def forgetful(held: capturing._Recorded, step: Step, inputs: Sequence[Tensor]) -> Computed:
        return replayed(replace(held, inputs=[given.clone() for given in inputs]), step, inputs)

    replayed = capturing._replayed
    with patch.object(capturing, "_replayed", forgetful):
        twins = twins_of()
        assert differences(twins, Journey(1), (2, 1), OFTEN + 3) != []
    assert twins.backend.replays
