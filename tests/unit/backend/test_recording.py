"""Steps recorded on a CPU: a replay is the step that would be computed, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from surefoot import capture
from surefoot.backend.cpu import recording
from surefoot.backend.cpu.recording import StepRecording
from surefoot.backend.operands import RowLayout
from surefoot.backend.reference import ReferenceBackend
from surefoot.backend.tape import Call
from surefoot.capture import Computed, Pass
from surefoot.config import W4A8, W8A8
from surefoot.draft.mtp import mtp_caches
from surefoot.engine.models import load_on, silent
from surefoot.model.model import DraftHead, Model
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec
from surefoot.step import Batch, Step
from surefoot.testing.tiny_dsa import TinyDsaSizes, write_tiny_dsa
from surefoot.testing.tiny_hybrids import write_tiny_hybrid
from surefoot.testing.tiny_latents import write_tiny_latents
from surefoot.testing.tiny_models import write_tiny
from tests.unit.model.edits import Tensors, edit_weights
from tests.unit.twins import Counting, Journey, Part, Twins

SHAPES: Sequence[tuple[Sequence[Part], ...]] = (
    # Those of a line are of one size and cut otherwise.
    (((1, 1, 0),),),
    (((5, 5, 0), (1, 1, 0), (2, 2, 0)), ((2, 2, 0), (2, 2, 0), (4, 4, 0))),
    (((0, 0, 1), (0, 0, 1), (0, 0, 1)),),
    (((3, 2, 2), (1, 1, 1)), ((2, 2, 3), (2, 1, 0))),
)
"""Rows of steps."""


def write_gated(folder: Path) -> Path:
    return write_tiny_hybrid(folder, "Qwen3_5ForCausalLM")


def write_sparse(folder: Path) -> Path:
    return write_tiny_hybrid(folder, "Qwen3_5MoeForCausalLM")


def write_even(folder: Path) -> Path:
    """Widths for which no tile and no vector is left part empty."""
    return write_tiny_hybrid(folder, "Qwen3_5ForCausalLM", hidden=128, inner=128, head_dim=32)


def write_one_choice(folder: Path) -> Path:
    return write_tiny_dsa(folder, TinyDsaSizes(one_choice=True))


def write_llama(folder: Path) -> Path:
    return write_tiny(folder, "LlamaForCausalLM")


def write_windowed(folder: Path) -> Path:
    return write_tiny(folder, "MistralForCausalLM", mixed=True)


def write_biased(folder: Path) -> Path:
    return write_tiny(folder, "Qwen2ForCausalLM")


def write_normed(folder: Path) -> Path:
    return write_tiny(folder, "Qwen3ForCausalLM")


def shorten(tensors: Tensors) -> None:
    """Make the weights such that suit the matrix unit."""
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    tensors.update((name, value.bfloat16().float()) for name, value in floats.items())


def load_model(
    write: Callable[[Path], Path],
    folder: Path,
    short: bool,
    dtype: str = "float32",
    quantization: str | None = None,
) -> tuple[Model, Counting]:
    write(folder)
    if short:
        edit_weights(folder, shorten)
    backend = Counting()
    loaded = load_on("tiny", folder, backend, dtype, silent, quantization=quantization)
    return loaded.model, backend


def head_of(model: Model) -> DraftHead:
    assert model.draft_head is not None
    return model.draft_head


def drafting(model: Model) -> Callable[[Pools], Pass]:
    """What MtpDrafter runs over what is new."""

    def make(pools: Pools) -> Pass:
        def run(batch: Batch, inputs: Sequence[Tensor]) -> Computed:
            hidden = head_of(model).forward(batch, inputs[0], pools)
            return Computed(hidden, head_of(model).logits(hidden[batch.wanted]))

        return run

    return make


def catching_up(model: Model) -> Callable[[Pools], Pass]:
    """What MtpDrafter runs to complete pages."""

    def make(pools: Pools) -> Pass:
        def run(batch: Batch, inputs: Sequence[Tensor]) -> Computed:
            head_of(model).catch_up(batch, inputs[0], pools)
            return Computed(inputs[0], inputs[0])

        return run

    return make


def whole(model: Model) -> Callable[[Pools], Pass]:
    """What ModelDrafter runs."""

    def make(pools: Pools) -> Pass:
        def run(batch: Batch, _: Sequence[Tensor]) -> Computed:
            hidden = model.forward(batch, pools)
            return Computed(hidden, model.logits(hidden[batch.wanted]))

        return run

    return make


def states(model: Model, step: Step, number: int) -> Tensor:
    """What a target could have given, one for each token; a drafted one's may be no number."""
    draws = torch.Generator().manual_seed(number)
    made = torch.randn(step.token_count, *model.description.hidden_shape, generator=draws)
    drafted = step.build(ReferenceBackend()).tentative
    made[drafted[: number % 2]] = torch.nan
    return made


def head_caches(model: Model) -> Sequence[CacheSpec]:
    return mtp_caches(model.description, "float32", 16)


def play(twins: Twins, model: Model | None, rounds: int = 12, wanted: int = 1) -> list[str]:
    """Steps of all shapes in turn; what differs from eager ones."""
    journey, found = Journey(3), []
    for number in range(rounds):
        for place, shapes in enumerate(SHAPES):
            step = journey.step(shapes[number % len(shapes)], wanted)
            inputs = () if model is None else (states(model, step, 100 * number + place),)
            found += [f"{place}.{number} {what}" for what in twins.differences(step, *inputs)]
    return found


short_or_not = pytest.mark.parametrize("short", [False, True], ids=["any", "short"])


@short_or_not
@pytest.mark.parametrize("write", [write_gated, write_even])
def test_a_replayed_draft_is_the_one_that_would_be_computed(
    write: Callable[[Path], Path], short: bool, tmp_path: Path
) -> None:
    model, backend = load_model(write, tmp_path, short)
    twins = Twins(drafting(model), head_caches(model), backend)
    assert play(twins, model) == []
    assert backend.made == len(SHAPES)
    assert backend.replays == 8 * len(SHAPES)


@short_or_not
@pytest.mark.parametrize(
    "write", [write_gated, write_sparse, write_tiny_latents, write_tiny_dsa, write_one_choice]
)
def test_a_replay_writes_the_entries_that_would_be_written(
    write: Callable[[Path], Path], short: bool, tmp_path: Path
) -> None:
    model, backend = load_model(write, tmp_path, short)
    twins = Twins(catching_up(model), head_caches(model), backend)
    assert play(twins, model, wanted=0) == []
    assert backend.replays == 8 * len(SHAPES)


@short_or_not
@pytest.mark.parametrize("write", [write_llama, write_windowed, write_biased, write_normed])
def test_a_replayed_draft_model_is_the_one_that_would_run(
    write: Callable[[Path], Path], short: bool, tmp_path: Path
) -> None:
    model, backend = load_model(write, tmp_path, short)
    twins = Twins(whole(model), model.description.caches, backend)
    assert play(twins, None) == []
    assert backend.replays == 8 * len(SHAPES)


@short_or_not
def test_a_replayed_recurrent_draft_model_is_the_one_that_would_run(
    short: bool, tmp_path: Path
) -> None:
    model, backend = load_model(write_gated, tmp_path, short)
    twins = Twins(whole(model), model.description.caches, backend)
    assert play(twins, None) == []
    assert backend.replays == 8 * len(SHAPES)


@pytest.mark.parametrize("quantization", [W8A8, W4A8])
def test_replayed_integers_are_those_that_would_be_computed(
    quantization: str, tmp_path: Path
) -> None:
    """Few rows and many take different forms."""
    model, backend = load_model(write_even, tmp_path, False, quantization=quantization)
    twins = Twins(drafting(model), head_caches(model), backend)
    assert play(twins, model) == []
    journey, many = Journey(4), ((20, 20, 0), (7, 7, 0))
    for number in range(6):
        step = journey.step(many)
        assert twins.differences(step, states(model, step, number)) == []
    assert backend.replays == 8 * len(SHAPES) + 2


@pytest.mark.parametrize("write", [write_llama, write_windowed])
def test_other_types_than_float32_cannot_be_recorded(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    """Their tiles are laid out by the host."""
    model, backend = load_model(write, tmp_path, False, "bfloat16")
    twins = Twins(whole(model), model.description.caches, backend)
    assert play(twins, None, 6) == []
    assert (backend.tried, backend.made) == (len(SHAPES), 0)


@pytest.mark.parametrize("write", [write_sparse, write_tiny_dsa, write_one_choice])
def test_a_head_with_experts_cannot_be_recorded(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    """How many tokens an expert gets is known to the host only."""
    model, backend = load_model(write, tmp_path, False)
    twins = Twins(drafting(model), head_caches(model), backend)
    assert play(twins, model, 8) == []
    assert (backend.tried, backend.made) == (len(SHAPES), 0)


LONG: Part = (12, 12, 0)
"""A row of more tokens than the rings of its request have room for beside their window."""


def test_a_step_that_proves_unrecordable_is_not_run_twice_over_its_window(tmp_path: Path) -> None:
    model, backend = load_model(write_tiny_latents, tmp_path, False)
    twins, journey = Twins(drafting(model), head_caches(model), backend), Journey(3)
    steps = [journey.step([LONG, (2, 2, 0)]) for _ in range(8)]
    found = [twins.differences(step, states(model, step, i)) for i, step in enumerate(steps)]
    assert found == [[]] * 8
    assert (backend.tried, backend.made) == (1, 0)


def test_a_step_that_proves_too_large_does_not_move_a_state_twice(tmp_path: Path) -> None:
    model, backend = load_model(write_gated, tmp_path, False)
    twins, journey = Twins(whole(model), model.description.caches, backend), Journey(3)
    with patch.object(recording, "_MOST_BYTES", 0):
        found = [twins.differences(journey.step([LONG, LONG, LONG])) for _ in range(8)]
    assert found == [[]] * 8
    assert (backend.tried, backend.made) == (1, 0)


def test_a_recurrent_draft_model_with_experts_is_not_run_twice(tmp_path: Path) -> None:
    model, backend = load_model(write_sparse, tmp_path, False)
    twins, journey = Twins(whole(model), model.description.caches, backend), Journey(3)
    found = [twins.differences(journey.step([LONG, LONG, LONG])) for _ in range(8)]
    assert found == [[]] * 8
    assert (backend.tried, backend.made) == (1, 0)


# Planted faults.


def frozen_positions() -> AbstractContextManager[object]:
    fill = Step.fill

    def forgetful(self: Step, batch: Batch) -> None:
        before = batch.positions.clone()
        fill(self, batch)
        batch.positions.copy_(before)

    return patch.object(Step, "fill", forgetful)


def frozen_rows(what: str) -> Callable[[], AbstractContextManager[object]]:
    """Kernels go on reading one array of the step that was recorded."""

    def fault() -> AbstractContextManager[object]:
        move = recording._MovableRows.move

        def forgetful(self: recording._MovableRows, layout: RowLayout) -> None:
            kept = [(array, array.copy(), make) for array, make in self.arrays]
            move(self, layout)
            for array, before, make in kept:
                if make.__name__ == what:
                    array[:] = before

        return patch.object(recording._MovableRows, "move", forgetful)

    return fault


def frozen_inputs() -> AbstractContextManager[object]:
    def forgetful(held: capture._Recorded, step: Step, inputs: Sequence[Tensor]) -> Computed:
        return replayed(replace(held, inputs=[given.clone() for given in inputs]), step, inputs)

    replayed = capture._replayed
    return patch.object(capture, "_replayed", forgetful)


def left_out(name: str) -> Callable[[], AbstractContextManager[object]]:
    """The first entry of this name is lost."""

    def fault() -> AbstractContextManager[object]:
        init = StepRecording.__init__

        def shorter(made: StepRecording, entries: Sequence[recording._Entry], *rest: Any) -> None:
            names = [name_of_entry(entry) for entry in entries]
            kept = [entry for place, entry in enumerate(entries) if place != index(names, name)]
            init(made, kept, *rest)

        return patch.object(StepRecording, "__init__", shorter)

    return fault


def index(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else -1


def name_of_entry(entry: recording._Entry) -> str:
    function = entry[0]
    owner = getattr(function, "__self__", None)
    return str(owner) if isinstance(owner, Call) else str(getattr(function, "__name__", "?"))


@pytest.mark.parametrize(
    "fault",
    [
        frozen_positions,
        frozen_inputs,
        frozen_rows("by_table"),
        frozen_rows("all_pages"),
        left_out("rms_norm"),
        left_out("angles"),
        left_out("attend_pages"),
        left_out("clean"),
        left_out("join_tokens"),
    ],
)
def test_a_fault_is_found_out(
    fault: Callable[[], AbstractContextManager[object]], tmp_path: Path
) -> None:
    model, backend = load_model(write_gated, tmp_path, False)
    twins = Twins(drafting(model), head_caches(model), backend)
    with fault():
        assert play(twins, model, 6) != []
    assert backend.replays
