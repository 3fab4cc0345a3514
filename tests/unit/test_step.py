"""The ragged step: rows, what they become on a device, and padding."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch

from surefoot.backend.operands import RowLayout
from surefoot.backend.protocol import UNCHOSEN
from surefoot.backend.reference import ReferenceBackend
from surefoot.backend.row_operators import RowOperators
from surefoot.ids import SINK_PAGE, SINK_SLOT
from surefoot.step import Row, Step

P = 4


class Recording(ReferenceBackend):
    """Keeps the layouts that it is asked to prepare."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts: list[RowLayout] = []

    def rows(self, layout: RowLayout) -> RowOperators:
        self.layouts.append(layout)
        return super().rows(layout)


def row(tokens: list[int], first: int, wanted: int = 1, page: int = 1) -> Row:
    pages = -(-(first + len(tokens)) // P)
    table = list(range(page, page + pages))
    return Row(tokens, first, 1, table, page, 0, wanted, first)


DECODE = row([7], 9)
VERIFY = row([3, 4, 5], 6, wanted=3, page=5)
PREFILL = row([1, 2, 3, 4, 5], 0, wanted=0, page=8)
MIXED = Step.of([DECODE, VERIFY, PREFILL], P)


def test_tokens_positions_and_wanted_places_follow_the_rows() -> None:
    batch = MIXED.build(ReferenceBackend())
    assert batch.tokens.tolist() == [7, 3, 4, 5, 1, 2, 3, 4, 5]
    assert batch.positions.tolist() == [9, 6, 7, 8, 0, 1, 2, 3, 4]
    assert batch.wanted.tolist() == [0, 1, 2, 3]
    assert {t.dtype for t in (batch.tokens, batch.positions, batch.wanted)} == {torch.int64}


def test_the_layout_has_one_entry_a_row() -> None:
    backend = Recording()
    MIXED.build(backend)
    assert backend.layouts == [
        RowLayout(
            starts=(0, 1, 4, 9),
            first=(9, 6, 0),
            tables=(DECODE.table, VERIFY.table, PREFILL.table),
            slots=(1, 5, 8),
            visible_from=(0, 0, 0),
            settled=(9, 6, 0),
            settles=(10, 7, 1),
            page_tokens=P,
        )
    ]
    assert [backend.layouts[0].length(i) for i in range(3)] == [1, 3, 5]


def test_logits_are_wanted_after_the_last_tokens_of_a_row() -> None:
    step = Step.of([row([1, 2, 3], 0, wanted=2), row([4], 0, wanted=0), row([5, 6], 0)], P)
    assert step.build(ReferenceBackend()).wanted.tolist() == [1, 2, 5]


def test_an_empty_step_builds() -> None:
    batch = Step.of([], P).build(ReferenceBackend())
    assert batch.tokens.shape == batch.positions.shape == batch.wanted.shape == (0,)


def test_padding_rows_own_the_sink() -> None:
    padded = MIXED.pad(5, 9 + 7)
    added = padded.rows[MIXED.live :]
    assert [len(row.tokens) for row in added] == [4, 3]
    for extra in added:
        assert set(extra.table) == {SINK_PAGE}
        assert extra.slot == SINK_SLOT
        assert (extra.first, extra.visible_from, extra.wanted) == (0, 0, 0)
        assert extra.certain == len(extra.tokens)


def test_padding_keeps_the_live_rows() -> None:
    padded = MIXED.pad(5, 16)
    assert padded.rows[:3] == MIXED.rows
    assert padded.live == MIXED.live == 3
    assert (padded.token_count, MIXED.token_count) == (16, 9)


@pytest.mark.parametrize("seed", range(30))
def test_all_lengths_agree_after_padding(seed: int) -> None:
    rng = random.Random(seed)
    rows = [row([1] * rng.randint(1, 9), rng.randint(0, 9)) for _ in range(rng.randint(0, 5))]
    step = Step.of(rows, P)
    more = rng.randint(1, 4)
    padded = step.pad(len(rows) + more, step.token_count + rng.randint(1, 20))
    backend = Recording()
    batch = padded.build(backend)
    (layout,) = backend.layouts
    count = padded.token_count
    assert len(batch.tokens) == len(batch.positions) == layout.starts[-1] == count
    per_row = (layout.first, layout.tables, layout.slots, layout.visible_from)
    assert {len(entries) for entries in per_row} == {len(rows) + more}
    assert [layout.length(i) for i in range(len(padded.rows))] == [
        len(row.tokens) for row in padded.rows
    ]
    assert torch.equal(batch.wanted, step.build(ReferenceBackend()).wanted)
    for at, table in enumerate(layout.tables):
        assert len(table) * P >= layout.first[at] + layout.length(at)


def test_padding_token_j_writes_sink_offset_j_mod_p() -> None:
    backend = ReferenceBackend()
    padded = Step.of([], P).pad(1, 6)
    pool = torch.zeros(3, 1, P, 1)
    padded.build(backend).rows.paged_write(pool, torch.arange(1.0, 7.0).view(6, 1, 1))
    assert pool[0, 0, :, 0].tolist() == [5, 6, 3, 4]
    assert pool[1:].count_nonzero() == 0


def test_padding_to_the_same_size_changes_nothing() -> None:
    assert MIXED.pad(3, 9) == MIXED


@pytest.mark.parametrize(
    ("rows", "tokens"),
    [(2, 9), (3, 8), (3, 10), (4, 9), (2, 20)],
    ids=["too few rows", "too few tokens", "no row for tokens", "no tokens for a row", "fewer"],
)
def test_impossible_padding_is_refused(rows: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"3 rows and 9 tokens to {rows} rows and {tokens} tokens"):
        MIXED.pad(rows, tokens)


@pytest.mark.parametrize("guessed", [(0, 2, 1), (0, 0, 0), (2, 0, 3)])
def test_guesses_lie_behind_what_the_host_knows_of_their_rows(guessed: tuple[int, ...]) -> None:
    known = [[7], [3, 4], [9]]
    rows = [
        Row(tokens, 4, len(tokens), [1, 2, 3], 1, 0, 1, 4, guessed=count)
        for tokens, count in zip(known, guessed, strict=True)
    ]
    drafts = [20 + at for at in range(sum(guessed))]
    step = Step.of(rows, P, torch.tensor(drafts, dtype=torch.long))
    batch, left = step.build(ReferenceBackend()), iter(drafts)
    want = [[*tokens, *islice(left, count)] for tokens, count in zip(known, guessed, strict=True)]
    assert batch.tokens.tolist() == [token for tokens in want for token in tokens]
    assert [batch.tokens[place] for place in batch.tentative] == drafts
    assert batch.padding.dtype == torch.bool
    assert len(batch.padding) == 0


def test_an_unchosen_guess_becomes_a_token() -> None:
    rows = [Row([], 4, 0, [1, 2], 1, 0, 1, 4, guessed=1) for _ in range(2)]
    guesses = torch.tensor([UNCHOSEN, 5])
    assert Step.of(rows, P, guesses).build(ReferenceBackend()).tokens.tolist() == [0, 5]
    mixed = [DECODE, rows[0]]
    batch = Step.of(mixed, P, guesses[:1]).build(ReferenceBackend())
    assert batch.tokens.tolist() == [7, 0]
    assert guesses.tolist() == [UNCHOSEN, 5]
