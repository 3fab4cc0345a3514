"""Numbers of the host that a recorded step would keep are found before it is replayed."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from surefoot.backend.cpu import recording
from surefoot.backend.cpu.kernels import rowwise
from surefoot.backend.cpu.rehearsal import Memory, emptied, moved
from surefoot.backend.cpu.rows import CompiledRows, check_rows
from surefoot.backend.operands import LayoutBounds, RowLayout
from surefoot.step import Batch
from tests.unit.test_exact_capture import OFTEN, Pick, differences, twins_of
from tests.unit.twins import LONGEST, Journey, P


def layout_of(batch: Batch) -> RowLayout:
    assert isinstance(batch.rows, CompiledRows)
    return batch.rows._layout


def by_first(batch: Batch, hidden: Tensor) -> Tensor:
    return hidden * float(1 + layout_of(batch).first[0])


def by_pages(batch: Batch, hidden: Tensor) -> Tensor:
    return hidden * sum(map(len, layout_of(batch).tables))


def by_settled(batch: Batch, hidden: Tensor) -> Tensor:
    return hidden + layout_of(batch).settled[-1] // P


def by_slot(batch: Batch, hidden: Tensor) -> Tensor:
    return hidden + layout_of(batch).slots[0]


def by_length(batch: Batch, hidden: Tensor) -> Tensor:
    """A view of the first row's tokens."""
    cut = layout_of(batch).starts[1]
    return torch.cat((2 * hidden[:cut], hidden[cut:]))


def by_position_read(batch: Batch, hidden: Tensor) -> Tensor:
    """The host looks into an array that shows a tensor."""
    return hidden * float(1 + batch.positions.numpy().max())


def by_token_read(batch: Batch, hidden: Tensor) -> Tensor:
    return hidden * float(1 + batch.tokens.numpy()[0])


def by_array(batch: Batch, hidden: Tensor) -> Tensor:
    """A kernel is given what the host has made of the layout."""
    places = np.array([slot % len(hidden) for slot in layout_of(batch).slots], dtype=np.int64)
    out = torch.empty(len(places), hidden.shape[1])
    rowwise.pick_rows(hidden.contiguous().numpy(), places, out.numpy())
    return torch.cat((hidden[: -len(places)], out))


FROZEN = (
    by_first,
    by_pages,
    by_settled,
    by_slot,
    by_length,
    by_position_read,
    by_token_read,
    by_array,
)


@pytest.mark.parametrize("lengths", [(2, 1), (1,), (2, 3, 2)])
@pytest.mark.parametrize("pick", FROZEN)
def test_a_step_that_was_given_a_number_of_the_host_is_not_replayed(
    pick: Pick, lengths: tuple[int, ...]
) -> None:
    twins = twins_of(pick)
    assert differences(twins, Journey(1), lengths, 4 * OFTEN) == []
    alone = pick is by_length and len(lengths) == 1  # depends on the size alone
    assert (twins.backend.tried, twins.backend.made) == (1, int(alone))


@pytest.mark.parametrize("pick", FROZEN)
def test_without_a_rehearsal_it_would_be_wrong(pick: Pick) -> None:
    """Each of these is a fault that matters."""
    with patch.object(recording._Recorder, "told", lambda *_: []):
        twins = twins_of(pick)
        assert differences(twins, Journey(1), (2, 1), 4 * OFTEN) != []
    assert twins.backend.made == 1


def by_size(batch: Batch, hidden: Tensor) -> Tensor:
    """What depends on a step's size alone may stay."""
    return hidden * float(len(batch.tokens)) + len(layout_of(batch).first)


def test_numbers_that_belong_to_the_size_may_stay() -> None:
    twins = twins_of(by_size)
    assert differences(twins, Journey(1), (2, 1), OFTEN + 3) == []
    assert (twins.backend.made, twins.backend.replays) == (1, 2)


def test_a_rehearsal_leaves_caches_and_inputs_as_they_are() -> None:
    """Eager and recorded caches are compared after each step, the recorded one among them."""
    twins = twins_of()
    assert differences(twins, Journey(1), (3, 1), OFTEN + 1) == []
    assert (twins.backend.made, twins.backend.replays) == (1, 0)


def writes_before(batch: Batch, hidden: Tensor) -> Tensor:
    batch.padding.fill_(False)
    batch.numbers.add_(1).sub_(1)
    return hidden


def test_an_operator_that_writes_to_what_was_there_is_not_rehearsed() -> None:
    twins = twins_of(writes_before)
    assert differences(twins, Journey(1), (2, 1), OFTEN + 3) == []
    assert twins.backend.made == 0


@pytest.mark.parametrize("bounded", [False, True])
def test_a_moved_step_has_the_same_size_and_lies_elsewhere(bounded: bool) -> None:
    bounds, journey = LayoutBounds(LONGEST, bounded), Journey(5)
    for parts in ([(1, 1, 0)], [(3, 1, 0), (1, 1, 0)], [(0, 0, 1), (2, 1, 2), (5, 5, 0)]) * 20:
        layout = journey.step(parts).layout()
        early, late = moved(layout, bounds)
        assert all(a < b for a, b in zip(early.first, late.first, strict=True))
        for other in (early, late):
            check_rows(other)
            lengths = (sorted(map(each.length, range(len(parts)))) for each in (layout, other))
            assert len(set(map(tuple, lengths))) == 1
            for row, table in enumerate(other.tables):
                assert other.first[row] + other.length(row) <= len(table) * P <= LONGEST * P
                assert other.visible_from[row] <= other.settled[row] <= other.first[row]


def test_memory_is_told_by_the_last_that_was_made_there() -> None:
    array = np.zeros(16, np.float32)
    begin = array.ctypes.data
    memory = Memory([(begin - 64, begin + 8), (begin, begin + 64)])
    assert memory.told(array[2:]) == ("array", (1, 8), "<f4", (14,), (4,))
    assert memory.told(array[:0]) == memory.told(np.zeros(16, np.float32)[:0])
    assert memory.told((1, 2.0)) != memory.told((1, 2))


def test_tensors_get_back_what_they_held() -> None:
    tensor = torch.arange(3)
    with emptied([tensor]):
        assert tensor.tolist() == [0, 0, 0]
    assert tensor.tolist() == [0, 1, 2]
