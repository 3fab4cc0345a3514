"""Recurrent layers: the same bits for every cut, and close to float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from surefoot.backend.blockwise.blocks import DeltaShape
from surefoot.backend.blockwise.recurrent import least_new_width
from surefoot.backend.cpu import CpuBackend
from surefoot.ids import SINK_SLOT, SlotId
from surefoot.step import NO_GUESSES, Row, Step
from tests.unit.backend.conformance import TOLERANCE
from tests.unit.backend.cuts import (
    PADS,
    Piece,
    alone,
    assert_row_invariant,
    rejecting,
    same_bits,
    shuffled,
    together,
)
from tests.unit.backend.recurrences import (
    RecurrentLayer,
    RecurrentMachine,
    Sizes,
    machine,
    played,
    scripts,
    setting_of,
)
from tests.unit.backend.recurrent_steps import delta_case, to_device
from tests.unit.backend.tiled import KERNELS, TILED, TiledBackend, on_both

SIZES = [
    Sizes(2, 4, 64, 64),
    Sizes(2, 4, 8, 12),
    Sizes(1, 3, 16, 16),
    Sizes(2, 2, 20, 8),
    Sizes(1, 2, 128, 128),
    Sizes(1, 2, 16, 24, block=32),
]


@on_both
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outputs_and_states_have_the_same_bits_for_every_cut(
    sizes: Sizes, backend: CpuBackend
) -> None:
    setting = setting_of((75, 16, 1, 40))
    want = played(machine(sizes, setting, backend), alone(setting.lengths))
    assert all(bool(part.isfinite().all()) for part in want)
    cuts = scripts(setting, seed=7).items()
    differing = [
        name
        for place, (name, script) in enumerate(cuts)
        if not same_bits(played(machine(sizes, setting, backend), script, PADS[place % 2]), want)
    ]
    assert differing == []


@pytest.mark.deep
@on_both
@pytest.mark.parametrize("seed", range(60))
def test_random_shapes_have_the_same_bits_for_random_cuts(seed: int, backend: CpuBackend) -> None:
    rng = random.Random(seed)
    heads, size = rng.randint(1, 4), rng.choice((8, 12, 16, 24, 32, 64, 128))
    shape = Sizes(
        heads, heads * rng.randint(1, 3), size, rng.choice((8, 16, 20, 64)), rng.choice((16, 32))
    )
    lengths = [rng.randint(1, 120) for _ in range(rng.randint(1, 5))]
    setting = setting_of(lengths, rng.choice((1, 4, 8, 15)))
    want = played(machine(shape, setting, backend), alone(lengths))
    for name, script in scripts(setting, seed).items():
        assert same_bits(played(machine(shape, setting, backend), script), want), name


@pytest.mark.deep
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bits_of_tiles_do_not_depend_on_the_number_of_threads(sizes: Sizes) -> None:
    setting = setting_of((200, 16, 40))
    want = played(machine(sizes, setting, TILED), alone(setting.lengths))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for name in ("together", "rejecting"):
            script = scripts(setting, seed=7)[name]
            assert same_bits(played(machine(sizes, setting, TILED), script), want), name
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    "backend",
    [KERNELS, TILED, TiledBackend(bitwise=False)],
    ids=["kernels", "tiled", "tiles of any width"],
)
def test_outputs_are_those_of_the_recurrence_in_float64(sizes: Sizes, backend: CpuBackend) -> None:
    setting = setting_of((75, 16, 40))
    layer = RecurrentLayer.of(1, sizes, backend)
    for script in (together(setting.lengths), rejecting(setting.lengths, setting.depth)):
        got = RecurrentMachine(layer, backend, setting).play(script)
        for tokens, out in zip(setting.sequences, got, strict=True):
            want = layer.truth(tokens)
            assert float((out - want).abs().max() / want.abs().max()) < TOLERANCE


@on_both
@pytest.mark.parametrize("boundary", [16, 48])
def test_a_row_goes_on_from_a_copied_checkpoint(boundary: int, backend: CpuBackend) -> None:
    sizes, setting = SIZES[0], setting_of((75,))
    want = machine(sizes, setting, backend).play(alone(setting.lengths))[0]
    resumed = machine(sizes, setting, backend)
    before = resumed.play([[Piece(0, 0, boundary - 3)], [Piece(0, boundary - 3, 3, 2)]])
    resumed.move(0, SlotId(1))
    rest = shuffled([75 - boundary], setting.depth, random.Random(boundary))
    after = resumed.play(
        [[Piece(0, p.first + boundary, p.count, p.wrong) for p in step] for step in rest]
    )
    assert torch.equal(torch.cat((*before, *after)), want)


@on_both
@pytest.mark.parametrize("count", [1, 3, 5, 16])
def test_tokens_drafted_one_a_step_have_the_same_bits(count: int, backend: CpuBackend) -> None:
    sizes, setting = SIZES[0], setting_of((75,), depth=15)
    want = played(machine(sizes, setting, backend), alone(setting.lengths))
    on = machine(sizes, setting, backend)
    out = [on.drafted(0, min(count, 75 - at)) for at in range(0, 75, count)]
    assert same_bits([torch.cat(out), *on.kept()], want)


@on_both
def test_rows_that_complete_no_block_leave_all_checkpoints_alone(backend: CpuBackend) -> None:
    for seed in range(1, 30):
        case = delta_case(seed)
        block, layout = case.caches.block, case.layout
        caches = to_device(case.caches, backend.device)
        backend.rows(layout).delta_rule(case.inputs, caches)
        moved = {
            slot
            for slot, settled, settles in zip(
                layout.slots, layout.settled, layout.settles, strict=True
            )
            if settles // block > settled // block
        }
        for slot in range(len(caches.state)):
            same = torch.equal(
                caches.state[slot].nan_to_num(7), case.caches.state[slot].nan_to_num(7)
            )
            assert same == (slot not in moved), (seed, slot)


@on_both
def test_padding_rows_write_the_sink_only(backend: CpuBackend) -> None:
    setting = setting_of((20,))
    on = machine(SIZES[0], setting, backend)
    on.play([[Piece(0, 0, 20)]])
    before = on.kept()
    row = Row([0] * 40, 0, 40, [0] * 3, SINK_SLOT, 0, 0, 0)
    batch = Step((row, row), 0, 16, NO_GUESSES).build(backend)
    RecurrentLayer.of(1, SIZES[0], backend).compute(batch, on.pools)
    assert same_bits(on.kept(), before)
    assert on.pools.rows("delta", "state")[0, 1].isnan().all()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_new_positions_of_the_least_width_are_measured(sizes: Sizes) -> None:
    shape = DeltaShape(
        sizes.key_heads, sizes.value_heads, sizes.key_size, sizes.value_size, sizes.block, 20
    )
    assert 1 <= least_new_width(shape) <= sizes.block


def test_bits_are_kept_where_every_tile_has_to_be_full() -> None:
    """The widest tiles are right by construction, as every product has one size."""

    class Full(TiledBackend):
        def _new_width(self, shape: DeltaShape) -> int:
            return shape.block

    setting = setting_of((75, 16, 40))
    want = played(machine(SIZES[1], setting, Full()), alone(setting.lengths))
    for name, script in scripts(setting, seed=1).items():
        assert same_bits(played(machine(SIZES[1], setting, Full()), script), want), name


@on_both
@pytest.mark.parametrize("width", [1, 3, 4, 7, 20, 33, 64])
def test_elementwise_operators_have_the_same_bits_for_any_rows(
    width: int, backend: CpuBackend
) -> None:
    draws = torch.Generator().manual_seed(width)
    x = 5 * torch.randn(40, 2 * width, generator=draws)
    by_head = 5 * torch.randn(40, 6, width, generator=draws)
    one = torch.randn(width, generator=draws)

    def norm(part: Tensor) -> Tensor:
        x, gates = part.chunk(2, 1)
        return backend.gated_norm(x, gates, one, 1e-6)

    def gates(part: Tensor) -> Tensor:
        a, b = part.chunk(2, 1)
        return torch.cat(backend.delta_gates(a, b, one, one), 1)

    assert_row_invariant(norm, x)
    assert_row_invariant(norm, by_head)
    assert_row_invariant(gates, x)
    assert_row_invariant(lambda part: backend.gate(*part.chunk(2, 1)), x)
    assert_row_invariant(lambda part: backend.gate(*part.chunk(2, 1)), by_head)
    assert_row_invariant(lambda part: backend.gate(part[:, 1:], part[:, :1]), x)


@pytest.mark.parametrize("shape", [(8, 24, 64), (3, 7, 5)], ids=str)
def test_a_token_has_the_same_bits_beside_any_tokens_of_the_experts(
    shape: tuple[int, int, int],
) -> None:
    count, inner, hidden = shape
    draws = torch.Generator().manual_seed(count)
    packed = KERNELS.pack_experts(
        torch.randn(count, 2 * inner, hidden, generator=draws) / hidden**0.5,
        torch.randn(count, hidden, inner, generator=draws) / inner**0.5,
    )
    chosen = torch.rand(40, count, generator=draws).argsort(-1)[:, :3]
    numbers = torch.rand(40, 3, generator=draws)
    x = torch.randn(40, hidden, generator=draws)

    def run(part: Tensor) -> Tensor:
        choice, weights, rows = part.split((3, 3, hidden), 1)
        return packed(rows, choice.long(), weights)

    assert_row_invariant(run, torch.cat((chosen.float(), numbers, x), 1))
