"""The gated delta rule on the device: close to the reference, the same bits for every cut."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import STRICT, EmulatedVendor, RefusedError
from surefoot.backend.ascend.places import Places
from surefoot.backend.operands import DeltaCaches, DeltaInputs
from surefoot.backend.reference import ReferenceBackend
from surefoot.ids import SINK_SLOT, SlotId
from surefoot.step import NO_GUESSES, Row, Step
from tests.unit.backend.ascend.emulated import (
    CPU,
    HALF_STEP,
    NARROW,
    EmulatedBackend,
    Recorded,
    step_of,
)
from tests.unit.backend.ascend.planted import ODD, copied
from tests.unit.backend.conformance import TOLERANCE
from tests.unit.backend.cuts import PADS, Piece, alone, same_bits, shuffled
from tests.unit.backend.recurrences import (
    RecurrentLayer,
    Sizes,
    machine,
    played,
    scripts,
    setting_of,
)
from tests.unit.backend.recurrent_steps import DeltaCase, delta_case, random_inputs, tensors

WIDE = Sizes(2, 4, 8, 12, block=32)


def narrow(x: Tensor) -> Tensor:
    """The same dtype, with numbers that have 16 bits."""
    return x.to(NARROW).to(x.dtype)


def narrowed(case: DeltaCase) -> DeltaCase:
    """The case with numbers that the operator takes as they are."""
    inputs, caches = case.inputs, case.caches
    return replace(
        case,
        inputs=DeltaInputs(
            narrow(inputs.q), narrow(inputs.k), narrow(inputs.v), inputs.decay, narrow(inputs.beta)
        ),
        caches=DeltaCaches(
            narrow(caches.state),
            narrow(caches.k),
            narrow(caches.value),
            caches.decay,
            narrow(caches.beta),
            caches.block,
        ),
    )


def plain(case: DeltaCase) -> tuple[Tensor, Tensor]:
    """Outputs and states by the reference, for which the ring's inputs are tokens of the step.

    It keeps another thing in the ring than v, so its rows begin at the checkpoint.
    """
    layout, inputs, caches = case.layout, case.inputs, copied(case.caches)
    block, capacity = caches.block, caches.k.shape[1]
    rings = caches.k, caches.value, caches.decay, caches.beta
    parts: list[list[Tensor]] = [[] for _ in range(5)]
    lengths: list[int] = []
    own: list[int] = []
    bases = [settled // block * block for settled in layout.settled]
    for row, base in enumerate(bases):
        before = range(base, layout.first[row]) if layout.length(row) else range(0)
        columns = [position % capacity for position in before]
        k, v, decay, beta = (ring[layout.slots[row], columns] for ring in rings)
        tokens = slice(layout.starts[row], layout.starts[row + 1])
        start = sum(lengths) + len(before)
        own.extend(range(start, start + layout.length(row)))
        lengths.append(len(before) + layout.length(row))
        for part, old, new in zip(
            parts,
            (torch.zeros_like(k), k, v, decay, beta),
            (inputs.q, inputs.k, inputs.v, inputs.decay, inputs.beta),
            strict=True,
        ):
            part.append(torch.cat((old, new[tokens])))
    longer = replace(layout, starts=tuple(accumulate(lengths, initial=0)), first=tuple(bases))
    if not parts[0]:
        return inputs.v, caches.state
    q, k, v, decay, beta = (torch.cat(part) for part in parts)
    out = ReferenceBackend().rows(longer).delta_rule(DeltaInputs(q, k, v, decay, beta), caches)
    return out[own], caches.state


def differs(case: DeltaCase, got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> str:
    """What is further off than rounding can bring about; "" if nothing is.

    A state is rounded once a block, each number by HALF_STEP of itself, so each of its columns by
    as much of its length. No input makes an error longer: decay shrinks it, and the rule takes
    away a part of what lies along k. An output is q times a column, rounded once more, and q has
    the length dk^-0.5.
    """
    layout, block = case.layout, case.caches.block
    blocks = max(
        (first + layout.length(row)) // block - layout.settled[row] // block
        for row, first in enumerate(layout.first)
    )
    (out, state), (right, states) = got, want
    before, after = (part[1:].nan_to_num().norm(dim=-2) for part in (case.caches.state, states))
    column = blocks * HALF_STEP * float(torch.maximum(before, after).max())
    value = column * case.inputs.q.shape[2] ** -0.5 + HALF_STEP * float(right.abs().max())
    faults = []
    if float((out - right).abs().max()) > value + TOLERANCE:
        faults.append("outputs")
    if float((state - states)[1:].nan_to_num().norm(dim=-2).max()) > column + TOLERANCE:
        faults.append("states")
    if not torch.equal(state[1:].isnan(), states[1:].isnan()):
        faults.append("slots")
    return ", ".join(faults)


def computed(case: DeltaCase) -> tuple[Tensor, Tensor]:
    caches = copied(case.caches)
    return EmulatedBackend().rows(case.layout).delta_rule(case.inputs, caches), caches.state


@pytest.mark.parametrize("seed", range(1, 25))
def test_it_is_close_to_the_reference(seed: int) -> None:
    case = narrowed(delta_case(seed))
    got = computed(case)
    assert got[0].dtype == torch.float32
    assert differs(case, got, plain(case)) == ""


def test_what_is_close_has_no_room_for_faults() -> None:
    """Decay taken for a tenth more, and beta for a tenth less, are told from rounding."""
    noticed = []
    for seed in range(1, 7):
        case = narrowed(delta_case(seed))
        more = replace(case, inputs=replace(case.inputs, decay=1.1 * case.inputs.decay))
        less = replace(case, inputs=replace(case.inputs, beta=0.9 * case.inputs.beta))
        noticed += [differs(case, computed(wrong), plain(case)) != "" for wrong in (more, less)]
    assert sum(noticed) > len(noticed) * 0.8


@pytest.mark.parametrize("seed", range(1, 7))
def test_rings_get_the_inputs_of_the_last_tokens(seed: int) -> None:
    case = narrowed(delta_case(seed))
    layout, caches = case.layout, copied(case.caches)
    EmulatedBackend().rows(layout).delta_rule(case.inputs, caches)
    want, capacity = copied(case.caches), caches.k.shape[1]
    given = case.inputs.k, case.inputs.v, case.inputs.decay, case.inputs.beta
    for row, first in enumerate(layout.first):
        for i in range(layout.length(row))[-capacity:]:
            at = layout.slots[row], (first + i) % capacity
            for ring, entries in zip(tensors(want)[1:], given, strict=True):
                ring[at] = entries[layout.starts[row] + i]
    for got, ring in zip(tensors(caches)[1:], tensors(want)[1:], strict=True):
        torch.testing.assert_close(got[1:], ring[1:], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    # The cuts of `test_delta_faults` are of the other sizes.
    "sizes",
    [pytest.param(ODD, marks=pytest.mark.deep), WIDE],
    ids=str,
)
def test_every_cut_has_the_same_bits(sizes: Sizes) -> None:
    setting, backend = setting_of((sizes.block + 6, 16, 1), depth=5), EmulatedBackend()
    setting = replace(setting, garbage=float("nan"))
    want = played(machine(sizes, setting, backend), alone(setting.lengths))
    assert all(bool(part.isfinite().all()) for part in want)
    differing = [
        name
        for place, (name, script) in enumerate(scripts(setting, seed=7).items())
        if not same_bits(played(machine(sizes, setting, backend), script, PADS[place % 2]), want)
    ]
    assert differing == []


def test_the_sizes_that_the_vendor_publishes_are_served() -> None:
    sizes, setting = Sizes(1, 2, 128, 128), setting_of((34, 5))
    backend = EmulatedBackend(EmulatedVendor(STRICT))
    want = played(machine(sizes, setting, backend), alone(setting.lengths))
    for script in (scripts(setting, seed=7)[name] for name in ("accepting", "shuffled 0")):
        assert same_bits(played(machine(sizes, setting, backend), script, PADS[1]), want)
    with pytest.raises(RefusedError, match="head sizes"):
        played(machine(ODD, setting, backend), alone(setting.lengths))


@pytest.mark.parametrize("boundary", [16, 32])
def test_a_row_goes_on_from_a_copied_checkpoint(boundary: int) -> None:
    setting, backend = setting_of((45,)), EmulatedBackend()
    want = machine(ODD, setting, backend).play(alone(setting.lengths))[0]
    resumed = machine(ODD, setting, backend)
    before = resumed.play([[Piece(0, 0, boundary - 3)], [Piece(0, boundary - 3, 3, 2)]])
    resumed.move(0, SlotId(1))
    rest = shuffled([45 - boundary], setting.depth, random.Random(boundary))
    after = resumed.play(
        [[Piece(0, p.first + boundary, p.count, p.wrong) for p in step] for step in rest]
    )
    assert torch.equal(torch.cat((*before, *after)), want)


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.deep), 5, 16])
def test_tokens_drafted_one_a_step_have_the_same_bits(count: int) -> None:
    setting, backend = setting_of((45,), depth=15), EmulatedBackend()
    want = played(machine(ODD, setting, backend), alone(setting.lengths))
    on = machine(ODD, setting, backend)
    out = [on.drafted(0, min(count, 45 - at)) for at in range(0, 45, count)]
    assert same_bits([torch.cat(out), *on.kept()], want)


def test_rows_that_complete_no_block_leave_all_checkpoints_alone() -> None:
    for seed in range(1, 20):
        case = narrowed(delta_case(seed))
        layout, caches, block = case.layout, copied(case.caches), case.caches.block
        EmulatedBackend().rows(layout).delta_rule(case.inputs, caches)
        ends = zip(layout.slots, layout.settled, layout.settles, strict=True)
        moved = {slot for slot, before, after in ends if after // block > before // block}
        for slot in range(1, len(caches.state)):
            same = torch.equal(
                caches.state[slot].nan_to_num(7), case.caches.state[slot].nan_to_num(7)
            )
            assert same == (slot not in moved), (seed, slot)


def test_padding_rows_write_the_sink_only_and_are_finite() -> None:
    on = machine(ODD, setting_of((20,)), EmulatedBackend())
    on.play([[Piece(0, 0, 20)]])
    before = on.kept()
    row = Row([0] * 40, 0, 40, [0] * 3, SINK_SLOT, 0, 0, 0)
    batch = Step((row, row), 0, 16, NO_GUESSES).build(EmulatedBackend())
    out = RecurrentLayer.of(1, ODD, EmulatedBackend()).compute(batch, on.pools)
    assert same_bits(on.kept(), before)
    assert bool(out.isfinite().all())


def recorded(case: DeltaCase, rows: int, width: int) -> tuple[Recorded, DeltaInputs, DeltaCaches]:
    """A recorded step on the caches of a case, and the inputs that it reads."""
    tokens, like = rows * width + 1, case.inputs
    q, k, v, decay, beta = (
        torch.zeros(tokens, *part.shape[1:])
        for part in (like.q, like.k, like.v, like.decay, like.beta)
    )
    inputs, caches = DeltaInputs(q, k, v, decay, beta), copied(case.caches)
    made = Recorded(rows, width, 16, 80, lambda on: [on.delta_rule(inputs, caches)])
    return made, inputs, caches


@pytest.mark.parametrize("width", [1, 5, 16])
def test_recorded_steps_have_the_bits_of_eager_ones(width: int) -> None:
    """Rows of a case are cut to the width; the same recording takes several steps in a row."""
    case = narrowed(delta_case(11))
    made, inputs, caches = recorded(case, len(case.layout.first), width)
    key, value = case.inputs.k.shape, case.inputs.v.shape
    shape = Sizes(key[1], value[1], key[2], value[2], case.caches.block)
    want = copied(case.caches)
    first, settled = list(case.layout.first), list(case.layout.settled)
    for turn in range(4):
        lengths = [min(width, 1 + (row + 2 * turn) % 6) for row in range(len(first))]
        stops = [at + length for at, length in zip(first, lengths, strict=True)]
        layout = replace(
            case.layout,
            starts=tuple(accumulate(lengths, initial=0)),
            first=tuple(first),
            settled=tuple(settled),
            settles=tuple(stops),
        )
        given = random_inputs(made.tokens, shape, case.draws)
        for held, part in zip(
            (inputs.q, inputs.k, inputs.v, inputs.decay, inputs.beta),
            (given.q, given.k, given.v, given.decay, given.beta),
            strict=True,
        ):
            held.copy_(part)
        tokens = sum(lengths)
        some = DeltaInputs(
            *(part[:tokens] for part in (given.q, given.k, given.v, given.decay, given.beta))
        )
        got = made.replay(step_of(layout))[0]
        expected = EmulatedBackend().rows(layout).delta_rule(some, want)
        assert torch.equal(got[:tokens], expected), turn
        assert bool(got.isfinite().all())
        for one, other in zip(tensors(caches), tensors(want), strict=True):
            assert torch.equal(one[1:].nan_to_num(7), other[1:].nan_to_num(7)), turn
        first, settled = stops, stops


def test_padding_may_be_longer_than_what_is_computed_of_it() -> None:
    """All the padding of a step is in one row where all others are in use."""
    seed = next(n for n in range(1, 99) if _has_four_rows_of_blocks_of_16(delta_case(n)))
    case = narrowed(delta_case(seed))
    made, inputs, caches = recorded(case, 4, 12)
    want, draws = copied(caches), case.draws
    for part in (inputs.q, inputs.k, inputs.v, inputs.beta):
        part.copy_(torch.rand(part.shape, generator=draws) / part.shape[-1])
    rows = [Row([0], 0, 1, [1], SlotId(slot), 0, 0, 0) for slot in range(1, 5)]
    padded = made.padded(Step.of(rows, 16)).layout()
    assert padded.length(4) == 45
    got = made.replay(Step.of(rows, 16))[0]
    out = EmulatedBackend().rows(padded).delta_rule(inputs, want)
    assert torch.equal(got[:36], out[:36])
    assert bool(out[36:].all())
    assert not bool(got[36:].any())
    assert all(
        torch.equal(one[1:].nan_to_num(7), other[1:].nan_to_num(7))
        for one, other in zip(tensors(caches), tensors(want), strict=True)
    )


def _has_four_rows_of_blocks_of_16(case: DeltaCase) -> bool:
    return len(case.layout.first) >= 4 and case.caches.block == 16


def test_a_row_is_in_no_call_behind_its_last_block() -> None:
    layout = delta_case(1).layout
    layout = replace(
        layout,
        starts=(0, 1, 2, 37),
        first=(16, 3, 30),
        settled=(14, 3, 30),
        settles=(14, 4, 65),
        slots=(1, 2, 3),
        tables=([1] * 5,) * 3,
        visible_from=(0,) * 3,
    )
    assert Places.of(layout, CPU).walk(16) == [[0, 1, 2], [0, 2], [2], [2]]


def test_a_recorded_draft_may_lie_in_the_block_behind() -> None:
    """Tokens drafted one a step start behind what is settled, so one token can touch two blocks."""
    case = narrowed(delta_case(1))
    made, inputs, caches = recorded(case, 1, 1)
    for part in tensors(caches):
        part.copy_(torch.rand(part.shape, generator=case.draws).to(NARROW))
    caches.k.mul_(caches.k.shape[3] ** -1)
    caches.decay.neg_()
    want = copied(caches)
    step = Step.of([Row([0], 17, 0, [1] * 2, SlotId(1), 0, 0, 14)], 16)
    got = made.replay(step)[0][:1]
    some = DeltaInputs(
        *(part[:1] for part in (inputs.q, inputs.k, inputs.v, inputs.decay, inputs.beta))
    )
    assert torch.equal(got, EmulatedBackend().rows(step.layout()).delta_rule(some, want))


def test_a_row_that_touches_more_blocks_than_were_recorded_is_refused() -> None:
    case = narrowed(delta_case(1))
    assert case.caches.block == 16
    row = Row([0] * 35, 15, 35, [1] * 4, SlotId(1), 0, 0, 15)
    made, _, _ = recorded(case, 1, 35)
    made.places.move(made.padded(Step.of([row], 16)).layout())
    made, _, _ = recorded(case, 4, 10)
    with pytest.raises(ValueError, match="touches 4 blocks of 16 tokens, and recorded were 2"):
        made.places.move(made.padded(Step.of([row], 16)).layout())


def test_no_folds_and_no_tokens_do_nothing() -> None:
    case = narrowed(delta_case(0))
    caches = copied(case.caches)
    backend = EmulatedBackend()
    assert backend.rows(case.layout).delta_rule(case.inputs, caches).shape == case.inputs.v.shape
    backend.fold_delta(caches, [])
