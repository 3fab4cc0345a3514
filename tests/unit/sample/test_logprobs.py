from __future__ import annotations

import math

import pytest
import torch

from surefoot.sample.logprobs import top_logprobs


def logits(rows: int = 6, vocab: int = 1001) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))


def test_values_are_those_of_the_raw_distribution() -> None:
    given = logits()
    exact = torch.log_softmax(given.to(torch.float64), -1)
    for row, entry in enumerate(top_logprobs(given, [7] * 6, 5)):
        best = exact[row].argsort(descending=True)[:5].tolist()
        assert list(entry)[:5] == best
        for token, value in entry.items():
            assert value == pytest.approx(float(exact[row, token]), abs=1e-5)


def test_the_chosen_token_is_always_there_and_not_twice() -> None:
    given = logits(1)
    order = given[0].argsort(descending=True).tolist()
    assert list(top_logprobs(given, [order[1]], 3)[0]) == order[:3]
    assert list(top_logprobs(given, [order[900]], 3)[0]) == [*order[:3], order[900]]
    assert list(top_logprobs(given, [order[900]], 0)[0]) == [order[900]]


def test_ties_go_to_the_lowest_id() -> None:
    given = torch.zeros(1, 200)
    given[0, 150] = 1
    assert list(top_logprobs(given, [199], 4)[0]) == [150, 0, 1, 2, 199]


def test_tokens_that_the_model_rules_out_are_not_among_the_best() -> None:
    given = torch.tensor([[0.0, -math.inf, 0.0]])
    entry = top_logprobs(given, [1], 3)[0]
    assert list(entry) == [0, 2, 1]
    assert entry[0] == pytest.approx(math.log(0.5))
    assert entry[1] == -math.inf


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    given = logits(9, 4099)
    together = top_logprobs(given, list(range(9)), 6)
    alone = [top_logprobs(given[row : row + 1], [row], 6)[0] for row in range(9)]
    assert together == alone


def test_no_rows_give_nothing() -> None:
    assert top_logprobs(torch.empty(0, 5), [], 2) == []
