"""How many threads kernels get: never more than have something to do."""

from collections.abc import Iterator

import pytest
import torch

from surefoot.backend.cpu.threads import threads_for


@pytest.fixture(autouse=True)
def eight_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("parts", "work", "threads"),
    [
        (100, 1 << 30, 8),
        (3, 1 << 30, 3),
        (100, 1 << 18, 4),
        (100, 1, 1),
        (0, 0, 1),
        (1, 1 << 30, 1),
    ],
)
def test_a_thread_has_a_part_and_enough_to_do(parts: int, work: int, threads: int) -> None:
    assert threads_for(parts, work) == threads
