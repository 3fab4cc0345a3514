"""What could go wrong with chosen positions, planted: every fault is noticed.

Beside each fault is the same run without it, since what finds faults everywhere finds nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from surefoot.backend.cpu import CpuBackend
from surefoot.backend.operands import LatentPages, RowLayout
from surefoot.backend.plain_latents import tokens_of
from surefoot.backend.reference_rows import ReferenceRows
from surefoot.engine.models import load_on, silent
from surefoot.model.deepseek_v32 import ChosenModel, Layer, MtpHead, choice_within
from surefoot.model.layers.attention import Angles
from surefoot.model.layers.chosen import ChosenAttention, Indexer, StepAngles
from surefoot.state.pool import Pools
from surefoot.step import Batch
from surefoot.testing.tiny_dsa import GLM, TinyDsaSizes, write_tiny_dsa
from tests.lossless.harness import Bench
from tests.lossless.test_dsa import DRAFTED, Key, differing, logits_of_drafts
from tests.unit.backend.cuts import (
    Piece,
    Script,
    Setting,
    alone,
    one_by_one,
    rejecting,
    same_bits,
    sequences_of,
)
from tests.unit.model.settling import SettlingMachine

VOCAB, DEPTH = 64, 3
# Two index heads: a quarter of all scores are exactly 0, so that many choices end among equals.
SIZE = TinyDsaSizes(architecture=GLM, every=2, index_heads=2, index_chosen=16)
# Nothing is spoiled between steps: what is stale looks like the truth.
SETTING = Setting(sequences_of(2, VOCAB, (44, 39)), page_tokens=16, depth=DEPTH, dirty=False)
LENGTHS = SETTING.lengths


def accepting(lengths: Sequence[int]) -> Script:
    """Drafts of which all are right; they are no more certain than others when computed."""
    return [
        [Piece(index, at, min(DEPTH + 1, length - at)) for index, length in enumerate(lengths)]
        for at in range(0, min(lengths) - DEPTH, DEPTH + 1)
    ] + [
        [Piece(index, at, 1)]
        for index, length in enumerate(lengths)
        for at in range(min(lengths) // (DEPTH + 1) * (DEPTH + 1), length)
    ]


CUTS: Mapping[str, Script] = {
    "whole": alone(LENGTHS),
    "one by one": one_by_one(LENGTHS),
    "rejecting": rejecting(LENGTHS, DEPTH),
    "accepting": accepting(LENGTHS),
}
Rows = Callable[[RowLayout], ReferenceRows]


class Misled(CpuBackend):
    """The plain row operators, or faulty ones."""

    made: Rows = ReferenceRows

    def rows(self, layout: RowLayout) -> ReferenceRows:
        """See Backend."""
        return self.made(layout)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ChosenModel:
    folder = write_tiny_dsa(tmp_path_factory.mktemp("faults"), SIZE, dial=0.5)
    loaded = load_on("tiny", folder, CpuBackend(), "float32", silent).model
    assert isinstance(loaded, ChosenModel)
    return loaded


def played(model: ChosenModel, script: Script, rows: Rows = ReferenceRows) -> list[Tensor]:
    backend = Misled()
    backend.made = rows
    return SettlingMachine(model, backend, SETTING).play(script)


@pytest.fixture(scope="module")
def truth(model: ChosenModel) -> list[Tensor]:
    """Logits with plain row operators, of each sequence alone and whole."""
    return played(model, CUTS["whole"])


# Faults of the operators.


class Unmasked(ReferenceRows):
    """What is not chosen is position 0, looked at once more each time."""

    def attend_chosen(
        self, q: Tensor, turned: Tensor, keys: LatentPages, chosen: Tensor | None, scale: float
    ) -> Tensor:
        """See RowOperators."""
        assert chosen is not None
        return super().attend_chosen(q, turned, keys, chosen.clamp(min=0), scale)


class Negative(ReferenceRows):
    """-1 is an address: the last place of the last page."""

    def attend_chosen(
        self, q: Tensor, turned: Tensor, keys: LatentPages, chosen: Tensor | None, scale: float
    ) -> Tensor:
        """See RowOperators."""
        assert chosen is not None
        chosen = chosen.clone()
        for row, place, _ in tokens_of(self.layout):
            last = len(self.layout.tables[row]) * self.layout.page_tokens - 1
            chosen[place, chosen[place] < 0] = last
        return super().attend_chosen(q, turned, keys, chosen, scale)


class Early(ReferenceRows):
    """A token sees the position behind its own."""

    def choose_entries(
        self, q: Tensor, weights: Tensor, pool: Tensor, ratio: int, count: int
    ) -> Tensor:
        """See RowOperators."""
        first = tuple(
            min(first + 1, len(table) * self.layout.page_tokens - self.layout.length(row))
            for row, (first, table) in enumerate(
                zip(self.layout.first, self.layout.tables, strict=True)
            )
        )
        later = ReferenceRows(replace(self.layout, first=first))
        return later.choose_entries(q, weights, pool, ratio, count)


class Others(ReferenceRows):
    """Every token looks where that of the row before looks, if there are several rows."""

    def attend_chosen(
        self, q: Tensor, turned: Tensor, keys: LatentPages, chosen: Tensor | None, scale: float
    ) -> Tensor:
        """See RowOperators."""
        assert chosen is not None
        other = chosen.roll(self.layout.length(0), 0) if len(self.layout.first) > 1 else chosen
        own = torch.tensor([position for _, _, position in tokens_of(self.layout)])[:, None]
        other = other.masked_fill(other > own, -1)
        return super().attend_chosen(q, turned, keys, other, scale)


class HighestOfEqual(ReferenceRows):
    """In rows of one token the highest of equal scores wins."""

    def choose_entries(
        self, q: Tensor, weights: Tensor, pool: Tensor, ratio: int, count: int
    ) -> Tensor:
        """See RowOperators."""
        chosen = super().choose_entries(q, weights, pool, ratio, count)
        for row, place, position in tokens_of(self.layout):
            if self.layout.length(row) > 1:
                continue
            scores = torch.cat(
                [
                    ((q[place] @ keys.t()).relu() * weights[place][:, None]).sum(0)
                    for keys in self._pages_of(pool, row)
                ]
            )[: position + 1]
            order = len(scores) - 1 - scores.flip(0).sort(descending=True, stable=True).indices
            best = order[:count].sort().values
            chosen[place, : len(best)] = best
        return chosen

    def _pages_of(self, pool: Tensor, row: int) -> list[Tensor]:
        return [pool[page] for page in self.layout.tables[row]]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (ReferenceRows, []),
        (Unmasked, list(CUTS)),
        (Negative, list(CUTS)),
        (Early, list(CUTS)),
        # Alone there is no other row.
        (Others, ["one by one", "rejecting", "accepting"]),
        (HighestOfEqual, ["one by one", "accepting"]),
    ],
)
def test_a_fault_of_the_operators_is_caught(
    rows: Rows, found: list[str], model: ChosenModel, truth: list[Tensor]
) -> None:
    wrong = [
        name for name, script in CUTS.items() if not same_bits(played(model, script, rows), truth)
    ]
    assert wrong == found


@pytest.mark.parametrize("rows", [2, 4])
def test_a_choice_of_more_or_fewer_rows_is_an_error(rows: int) -> None:
    layout = RowLayout((0, 3), (5,), ([1],), (1,), (0,), (5,), (8,), 16)
    q, turned = torch.randn(3, 2, 8), torch.randn(3, 2, 4)
    keys = LatentPages(torch.randn(2, 16, 8), torch.randn(2, 16, 4))
    chosen = torch.zeros(rows, 4, dtype=torch.long)
    for made in (CpuBackend().rows(layout), ReferenceRows(layout)):
        with pytest.raises(ValueError, match=f"{rows} rows of chosen positions came for 3"):
            made.attend_chosen(q, turned, keys, chosen, 1.0)


# Faults of the model.


@dataclass(frozen=True)
class Forgetful(Indexer):
    """Writes no keys of drafted tokens, which may well stay."""

    def write(self, x: Tensor, angles: Angles, batch: Batch, pool: Tensor) -> None:
        """See Indexer."""
        kept = pool.clone()
        super().write(x, angles, batch, pool)
        for row, place, position in tokens_of(_layout_of(batch)):
            if place in batch.tentative.tolist():
                page, offset = divmod(position, pool.shape[1])
                page = _layout_of(batch).tables[row][page]
                pool[page, offset] = kept[page, offset]


def _layout_of(batch: Batch) -> RowLayout:
    assert isinstance(batch.rows, ReferenceRows)
    return batch.rows.layout


@dataclass(frozen=True)
class StaleChoice(ChosenAttention):
    """A layer without an indexer takes what the step before has chosen, if that fits."""

    seen: dict[str, Tensor]

    def __call__(
        self, stream: Tensor, angles: StepAngles, batch: Batch, pools: Pools, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See ChosenAttention."""
        assert chosen is not None
        before = self.seen.get("chosen", chosen)
        self.seen["chosen"] = chosen
        stale = before if before.shape == chosen.shape else chosen
        stale = stale.masked_fill(stale > batch.positions[:, None], -1)
        return super().__call__(stream, angles, batch, pools, stale)[0], chosen


def forgetful(attention: ChosenAttention) -> ChosenAttention:
    if attention.indexer is None:
        return attention
    return replace(attention, indexer=Forgetful(**vars(attention.indexer)))


def stale(attention: ChosenAttention) -> ChosenAttention:
    if attention.indexer is not None:
        return attention
    return StaleChoice(**vars(attention), seen={})


def unchanged(attention: ChosenAttention) -> ChosenAttention:
    return replace(attention)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (unchanged, []),
        # What is rejected is computed again, and nothing else is a draft there.
        (forgetful, ["accepting"]),
        (stale, ["one by one", "rejecting", "accepting"]),
    ],
)
def test_a_fault_of_the_model_is_caught(
    change: Callable[[ChosenAttention], ChosenAttention],
    found: list[str],
    model: ChosenModel,
    truth: list[Tensor],
) -> None:
    faulty = copy.copy(model)
    faulty._layers = [
        Layer(change(layer.attention), layer.norm, layer.feed) for layer in model._layers
    ]
    wrong = [name for name, script in CUTS.items() if not same_bits(played(faulty, script), truth)]
    assert wrong == found


# Faults of drafts, which change no token: they are seen in what the head says.


def other_rows_choice(
    self: MtpHead, batch: Batch, hidden: Tensor, pools: Pools, deepen: Callable[..., Tensor]
) -> Tensor:
    """The choice of the row before, as it lies in a batch that has changed."""
    size = self._hidden
    mixed = torch.cat((hidden[:, :size], hidden[:, size:].roll(1, 0)), dim=1)
    return deepen(self, batch, mixed, pools)


def unmasked_choice(
    self: MtpHead, batch: Batch, hidden: Tensor, pools: Pools, deepen: Callable[..., Tensor]
) -> Tensor:
    """-1 is taken for position 1, which every draft sees."""
    size = self._hidden
    there = torch.cat((hidden[:, :size], hidden[:, size:].clamp(min=1)), dim=1)
    return deepen(self, batch, there, pools)


def right_choice(
    self: MtpHead, batch: Batch, hidden: Tensor, pools: Pools, deepen: Callable[..., Tensor]
) -> Tensor:
    return deepen(self, batch, hidden, pools)


SIDE_BY_SIDE = replace(DRAFTED, batch=5)
"""One of the prompts is shorter than a choice."""


def drafts_with(fault: Callable[..., Tensor], bench: Bench) -> dict[Key, Tensor]:
    deepen = MtpHead.deepen

    def faulty(self: MtpHead, batch: Batch, hidden: Tensor, pools: Pools) -> Tensor:
        return fault(self, batch, hidden, pools, deepen)

    with patch.object(MtpHead, "deepen", faulty):
        return logits_of_drafts(bench, SIDE_BY_SIDE)


@pytest.fixture(scope="module")
def drafts(bench: Bench) -> dict[Key, Tensor]:
    return logits_of_drafts(bench, SIDE_BY_SIDE)


@pytest.mark.parametrize(
    ("fault", "caught"),
    [(right_choice, False), (other_rows_choice, True), (unmasked_choice, True)],
)
def test_a_draft_that_looks_elsewhere_is_caught(
    fault: Callable[..., Tensor], caught: bool, bench: Bench, drafts: dict[Key, Tensor]
) -> None:
    wrong = differing(drafts_with(fault, bench), drafts)
    assert bool(wrong) is caught
    # The first pass chooses for itself.
    assert all(depth for _, _, depth in wrong)


def test_padding_brings_choices_that_are_not_its_own() -> None:
    """What stands in the place of padding is left from another step: positions far behind."""
    positions = torch.tensor([40, 0])
    left = torch.tensor([[3.0, 39.0, -1.0], [3.0, 39.0, float("nan")]])
    chosen = choice_within(left, positions)
    assert chosen.tolist() == [[3, 39, -1], [-1, -1, -1]]


def test_index_keys_that_are_not_caught_up_are_seen(
    bench: Bench, drafts: dict[Key, Tensor]
) -> None:
    """Only a page that fills without a draft is caught up: the prompt's, in chunks."""

    def keys_only(
        self: ChosenAttention, stream: Tensor, angles: StepAngles, batch: Batch, pools: Pools
    ) -> None:
        x = self.backend.rms_norm(stream, self.norm, self.eps)
        self._write(x, angles, batch, pools)

    chunked = replace(SIDE_BY_SIDE, chunk=16)
    assert differing(logits_of_drafts(bench, chunked), drafts) == []
    with patch.object(ChosenAttention, "write", keys_only):
        wrong = differing(logits_of_drafts(bench, chunked), drafts)
    assert {depth for _, _, depth in wrong} == {0, 1, 2, 3}
