"""The choice among thousands of entries, in whatever order their scores come."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from surefoot.backend.operands import RowLayout
from tests.unit.backend.tiled import KERNELS

PAGE, SHARE, ENTRIES = 64, 16, 3_000
ORDERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "any": lambda x: x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))],
    "ascending": lambda x: x,
    "descending": lambda x: x.flip(0),
    "equal": lambda x: torch.full_like(x, 5),
    "a few different": lambda x: x[torch.arange(len(x)) * 7 % len(x)] % 3,
    "mostly zero": lambda x: torch.where(x < len(x) - 20, 0, ORDERS["any"](x)),
}
counts = pytest.mark.parametrize("count", [1, 2, 31, 512, 2_999, 3_000])


def chosen(scores: Tensor, count: int, tokens: int = 6) -> Tensor:
    """For tokens of which the last sees all entries, whose keys are their scores."""
    pages = -(-len(scores) // SHARE)
    pool = torch.full((pages + 1, SHARE, 1), torch.nan)
    pool[1:].view(-1)[: len(scores)] = scores
    stop = 4 * len(scores)
    layout = RowLayout(
        starts=(0, tokens),
        first=(stop - tokens,),
        tables=(range(1, pages + 1),),
        slots=(1,),
        visible_from=(0,),
        settled=(stop - tokens,),
        settles=(stop,),
        page_tokens=PAGE,
    )
    one = torch.ones(tokens, 1)
    return KERNELS.rows(layout).choose_entries(one[..., None], one, pool, 4, count)


@counts
@pytest.mark.parametrize("order", ORDERS)
def test_the_best_are_chosen_and_the_lowest_among_equals(order: str, count: int) -> None:
    scores = ORDERS[order](torch.arange(1.0, ENTRIES + 1))
    got = chosen(scores, count)
    for token, place in ((5, ENTRIES), (4, ENTRIES - 1), (0, ENTRIES - 2)):
        best = torch.sort(scores[:place], descending=True, stable=True).indices[:count]
        want = best.sort().values.tolist()
        assert got[token].tolist() == want + [-1] * (count - len(want))


@counts
def test_scores_that_are_not_numbers_lead_to_no_entry_that_is_not_seen(count: int) -> None:
    scores = torch.arange(1.0, ENTRIES + 1)
    for damaged in (slice(None, None, 3), slice(50), slice(None), slice(-900, None)):
        scores[damaged] = torch.nan
        got = chosen(scores, count)
        assert int(got.min()) >= -1
        assert int(got.max()) < ENTRIES
