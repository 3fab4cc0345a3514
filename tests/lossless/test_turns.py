"""What one request leaves in the prefix cache serves the next turn of its conversation."""

import pytest

from tests.lossless.harness import Bench, Case, next_turns


@pytest.mark.parametrize("model", ["llama", "sliding"])
@pytest.mark.parametrize("drafter", ["none", "random", "draft-model"])
def test_the_next_turn_is_answered_as_without_a_cache(
    model: str, drafter: str, bench: Bench
) -> None:
    depth = 0 if drafter == "none" else 5
    assert next_turns(bench, Case(model, drafter, depth, page=4)) == []
