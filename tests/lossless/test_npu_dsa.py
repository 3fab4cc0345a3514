"""Chosen positions on the NPU: drafts are the row's own, and faults of padding are noticed.

The faults are those of public engines. The emulation refuses what an operator would not take or the
device would not notice; where nothing is refused, the tokens are not those of a plain run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.backend.ascend import chosen as module
from surefoot.backend.ascend.graph import AscendRecording
from surefoot.backend.ascend.latents import LatentRows
from surefoot.backend.ascend.places import Derived
from surefoot.backend.operands import RowLayout
from surefoot.model.deepseek_v32 import MtpHead
from surefoot.state.pool import Pools
from surefoot.step import Batch
from tests.lossless.harness import CONTEXT, Bench, Case, Run, answer_of
from tests.lossless.scenes import Fault, Scene, Stage
from tests.lossless.test_dsa import Key, differing, logits_of_drafts
from tests.lossless.test_npu import EMULATED


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    bench = Bench(tmp_path_factory.mktemp("small"), EMULATED)
    return Stage(bench, bench)


VERIFIED = Scene("chosen", (8, 6))
PLAIN = replace(VERIFIED, drafter="none")
SHARED = Scene("chosen once", (8, 6))
SCENES = (VERIFIED, PLAIN, SHARED)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: f"{scene.model}-{scene.drafter}")
def test_without_a_fault_all_is_right(scene: Scene, stage: Stage) -> None:
    """Otherwise the faults below would prove nothing."""
    replays: list[RowLayout] = []
    replay = AscendRecording.replay

    def counted(self: AscendRecording, layout: RowLayout) -> None:
        replays.append(layout)
        replay(self, layout)

    with patch.object(AscendRecording, "replay", counted):
        requests = stage.play(scene)
    assert [answer_of(request) for request in requests] == stage.plain(scene)
    assert len(replays) > 2
    accepted = sum(request.speculation.accepted for request in requests)
    assert accepted > 2 or scene.drafter == "none"


# Lengths. What is made of a captured step's padding happens to captured steps alone.

QUERIES, KEYS = "actual_seq_lengths_query", "actual_seq_lengths_kv"
Lengths = Callable[[Derived], Tensor]
RIGHT: dict[str, Lengths] = {
    QUERIES: lambda derived: (derived._places.begin + derived._places.count).int(),
    KEYS: lambda derived: (derived._places.first + derived._places.count).int(),
}


@contextmanager
def lengths_made(**made: Lengths) -> Iterator[None]:
    """Lengths that are made in another way."""
    names = {QUERIES: "ends", KEYS: "lengths"}
    with ExitStack() as stack:
        for name, make in made.items():
            stack.enter_context(patch.object(Derived, names[name], property(make)))
        yield


def before_padding(name: str) -> Lengths:
    """Those of all rows but the last, which is always padding where a step is captured."""

    def lengths(self: Derived) -> Tensor:
        right = RIGHT[name](self)
        return right[:-1].contiguous() if self._places._moves else right

    return lengths


DRAFTS_OR_NONE = pytest.mark.parametrize(
    "scene", [VERIFIED, PLAIN], ids=lambda scene: scene.drafter
)


@DRAFTS_OR_NONE
@pytest.mark.parametrize(
    ("names", "rule"),
    [
        ((QUERIES, KEYS), "rows of block_table"),
        ((QUERIES,), f"length of {KEYS}"),
        ((KEYS,), f"length of {KEYS}"),
    ],
)
def test_lengths_of_before_the_padding_are_refused(
    names: Sequence[str], rule: str, scene: Scene, stage: Stage
) -> None:
    """SGLang #32791: metadata was built before the batch was padded, or a part of it was."""
    errors = stage.found(scene, lengths_made(**{name: before_padding(name) for name in names}))
    assert all(f"{rule}: wanted" in found for found in errors), errors


def missing(self: Derived) -> Any:
    return None


@DRAFTS_OR_NONE
@pytest.mark.parametrize("name", [QUERIES, KEYS])
def test_lengths_that_are_not_there_are_refused(name: str, scene: Scene, stage: Stage) -> None:
    """SGLang #32791: some paths left the field undefined."""
    errors = stage.found(scene, lengths_made(**{name: missing}))
    assert all(f"{name}: wanted" in found for found in errors), errors


def one_each(self: Derived) -> Tensor:
    """As many requests as there are queries."""
    return torch.arange(1, self._places.tokens + 1, dtype=torch.int32)


def even(self: Derived) -> Tensor:
    """Queries in even shares, and what is left for the last row."""
    rows, tokens = self._places.rows, self._places.tokens
    ends = torch.arange(1, rows + 1) * (tokens // rows)
    return torch.cat((ends[:-1], torch.full((1,), tokens))).int()


@DRAFTS_OR_NONE
def test_lengths_from_the_shape_of_the_queries_are_refused(scene: Scene, stage: Stage) -> None:
    """SGLang #32791: what was undefined was made from the queries, as if all steps were decode."""
    errors = stage.found(scene, lengths_made(**{QUERIES: one_each}))
    assert all(f"length of {KEYS}: wanted" in found for found in errors), errors


def test_even_lengths_from_the_shape_of_the_queries_are_noticed(stage: Stage) -> None:
    """The same where as many lengths come out as there are rows: drafts differ in length."""
    assert "" not in stage.found(VERIFIED, lengths_made(**{QUERIES: even}))


def test_lengths_without_what_the_step_writes_are_refused(stage: Stage) -> None:
    """They include it: L + 1 in decode, L + k + 1 in verify; the last position is chosen."""
    fault = lengths_made(**{KEYS: lambda derived: derived._places.first.int()})
    errors = stage.found(VERIFIED, fault)
    assert all("values of sparse_indices" in found for found in errors), errors


def of_the_capture(self: Derived) -> Tensor:
    """From the host's numbers, which the graph keeps as they are."""
    each = [torch.arange(length, length + 1) for length in self._places.lengths]
    return torch.cat(each).int()


def test_lengths_that_are_those_of_the_capture_are_refused(stage: Stage) -> None:
    """TensorRT-LLM #17110: a graph was recorded with numbers that a later step has no use for."""
    fault = lengths_made(**{KEYS: of_the_capture})
    errors = stage.found(VERIFIED, fault)
    assert all("values of sparse_indices" in found for found in errors), errors
    uncaptured = lengths_made(**{KEYS: of_the_capture})
    assert stage.found(replace(VERIFIED, capture=False), uncaptured) == ["", ""]


# Rows of positions.

Change = Callable[[Tensor], Tensor]


def choosing(change: Change, everywhere: bool = False) -> Fault:
    """Captured steps, or all, whose indexers give something else."""
    choose = LatentRows.choose_entries

    def faulty(self: LatentRows, *given: Any) -> Tensor:
        chosen = choose(self, *given)
        return change(chosen) if everywhere or self.places._moves else chosen

    return patch.object(LatentRows, "choose_entries", faulty)


def fewer(chosen: Tensor) -> Tensor:
    """Without the last token, which is always padding where a step is captured."""
    return chosen[:-1]


def more(chosen: Tensor) -> Tensor:
    return F.pad(chosen, (0, 0, 0, 1), value=-1)


OTHER_ROWS = pytest.mark.parametrize("change", [fewer, more])


@OTHER_ROWS
@pytest.mark.parametrize("scene", [VERIFIED, SHARED], ids=lambda scene: scene.model)
def test_rows_of_the_unpadded_batch_are_refused(change: Change, scene: Scene, stage: Stage) -> None:
    """SGLang #32791: what was chosen for the unpadded rows met padded queries, or more of them."""
    errors = stage.found(scene, choosing(change))
    assert all("rows of chosen positions came for" in found for found in errors), errors


@OTHER_ROWS
def test_where_nobody_counts_the_rows_the_operator_does(change: Change, stage: Stage) -> None:
    attend = LatentRows.attend_chosen

    def unchecked(self: LatentRows, *given: Any) -> Tensor:
        padding = F.pad(self.derived.padding, (0, 1), value=True)[: len(given[3])]
        with patch.object(self.derived, "padding", padding):
            return attend(self, *given)

    with (
        patch.object(module, "check_chosen", lambda *_: None),
        patch.object(LatentRows, "attend_chosen", unchecked),
    ):
        errors = stage.found(VERIFIED, choosing(change))
    assert all("shape of sparse_indices" in found for found in errors), errors


def wrapped(chosen: Tensor) -> Tensor:
    """-1 is the place before the first, and so the last of the table, as everywhere in Python."""
    return chosen.where(chosen >= 0, CONTEXT - 1)


def last_first(chosen: Tensor) -> Tensor:
    return chosen.flip(1)


def test_no_position_that_is_an_address_is_refused(stage: Stage) -> None:
    errors = stage.found(VERIFIED, choosing(wrapped, everywhere=True))
    assert all("values of sparse_indices" in found for found in errors), errors


def test_positions_behind_none_are_refused(stage: Stage) -> None:
    """The kernel looks at as many of the first ones as there are keys."""
    errors = stage.found(VERIFIED, choosing(last_first, everywhere=True))
    assert all("order in sparse_indices" in found for found in errors), errors


# Drafts, which change no token.

DRAFTED = Case("chosen once", "mtp", 3, batch=1, cache=False)
SIDE_BY_SIDE = replace(DRAFTED, batch=5)
"""One of the prompts is shorter than a choice."""


@pytest.fixture(scope="module")
def drafts(stage: Stage) -> Mapping[Key, Tensor]:
    return logits_of_drafts(stage.small, SIDE_BY_SIDE)


def test_a_draft_of_padded_steps_is_the_rows_own(
    stage: Stage, drafts: Mapping[Key, Tensor]
) -> None:
    """SGLang #32791: later passes look where the first has, though rows end and are padded."""
    assert differing(logits_of_drafts(stage.small, DRAFTED), drafts, DRAFTED.depth) == []


def deepening(change: Change) -> Fault:
    """Later passes that get another choice."""
    once = MtpHead._pass

    def faulty(
        self: MtpHead, batch: Batch, hidden: Tensor, pools: Pools, chosen: Tensor | None
    ) -> Tensor:
        return once(self, batch, hidden, pools, None if chosen is None else change(chosen))

    return patch.object(MtpHead, "_pass", faulty)


def as_position_0(chosen: Tensor) -> Tensor:
    """tokenspeed #700: -1 is made 0, which is a legal place."""
    return chosen.clamp(min=0)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (fewer, "rows of chosen positions came for"),
        (more, "rows of chosen positions came for"),
        (as_position_0, "repeats in sparse_indices"),
        (wrapped, "values of sparse_indices"),
    ],
)
def test_a_choice_that_does_not_fit_fails_the_draft(
    change: Change, error: str, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang #32791: what the first pass chose was kept as it lay in a batch before padding."""
    caplog.set_level("WARNING", "surefoot.draft.guard")
    run = Run(stage.small, SIDE_BY_SIDE)
    with deepening(change), pytest.raises(AssertionError, match="the drafter failed"):
        run.finish()
    assert error in caplog.text
