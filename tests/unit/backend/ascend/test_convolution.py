"""Causal convolution on the device: what the reference computes, the same bits for every cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import SilentError
from surefoot.backend.reference import ReferenceBackend
from surefoot.state.pool import Pools
from surefoot.state.spec import Held, Part, Ring
from surefoot.step import Batch, Step
from tests.unit.backend.ascend.emulated import HALF_STEP, EmulatedBackend, Recorded, step_of
from tests.unit.backend.ascend.planted import aliased
from tests.unit.backend.conformance import TOLERANCE, causal_conv, differing
from tests.unit.backend.cuts import Setting, differing_cuts, sequences_of
from tests.unit.backend.layouts import case_of

TAPS, CHANNELS, VOCAB = 4, 40, 50


@dataclass(frozen=True)
class ConvLayer:
    """One convolution; what goes in depends on the token id alone."""

    table: Tensor
    weight: Tensor

    @staticmethod
    def of(dtype: torch.dtype) -> ConvLayer:
        draws = torch.Generator().manual_seed(4)
        table = torch.randn(VOCAB, CHANNELS, generator=draws)
        return ConvLayer(table.to(dtype), torch.randn(CHANNELS, TAPS, generator=draws).to(dtype))

    @property
    def caches(self) -> Sequence[Ring]:
        dtype = str(self.table.dtype).removeprefix("torch.")
        return (Ring("conv", 1, (Part("x", (CHANNELS,), dtype),), TAPS, Held(TAPS)),)

    def compute(self, batch: Batch, pools: Pools) -> Tensor:
        x, ring = self.table[batch.tokens], pools.rows("conv", "x")[0]
        out = batch.rows.causal_conv(x, ring, self.weight)
        batch.rows.ring_write(ring, x)
        return out


SETTING = Setting(sequences_of(3, VOCAB, (21, 10, 1)), page_tokens=16, garbage=float("nan"))


@pytest.mark.parametrize("seed", range(24))
def test_it_is_that_of_the_reference(seed: int) -> None:
    got = causal_conv(EmulatedBackend(), seed)
    assert differing(got, causal_conv(ReferenceBackend(), seed)) == []


@pytest.mark.parametrize("seed", range(1, 9))
def test_bfloat16_is_rounded_once(seed: int) -> None:
    """Sums are float32, so the output's own rounding is nearly all that is wrong."""
    case = case_of(seed)
    x, ring, weight = (
        torch.randn(*shape, generator=case.draws).bfloat16()
        for shape in ((case.tokens, 24), (case.slots, TAPS + 3, 24), (24, TAPS))
    )
    got = EmulatedBackend().rows(case.layout).causal_conv(x, ring, weight)
    rows = ReferenceBackend().rows(case.layout)
    want = rows.causal_conv(x.float(), ring.float(), weight.float())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=HALF_STEP, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_cut_has_the_same_bits(dtype: torch.dtype) -> None:
    assert differing_cuts(ConvLayer.of(dtype), EmulatedBackend(), SETTING, seed=1) == []


def test_recorded_steps_have_the_bits_of_eager_ones() -> None:
    layer, draws = ConvLayer.of(torch.bfloat16), torch.Generator().manual_seed(5)
    x, ring = torch.zeros(33, CHANNELS).bfloat16(), torch.zeros(13, TAPS + 8, CHANNELS).bfloat16()
    recorded = Recorded(8, 4, 16, 20, lambda rows: [rows.causal_conv(x, ring, layer.weight)])
    replayed = 0
    for seed in range(60):
        case = case_of(seed)
        lengths = [case.layout.length(row) for row in range(len(case.layout.first))]
        if case.layout.page_tokens != 16 or max(lengths, default=0) > 4 or len(lengths) > 8:
            continue
        x.copy_(torch.randn(x.shape, generator=draws))
        ring.copy_(torch.randn(ring.shape, generator=draws))
        got = recorded.replay(step_of(case.layout))[0][: case.tokens]
        rows = EmulatedBackend().rows(case.layout)
        assert torch.equal(got, rows.causal_conv(x[: case.tokens], ring, layer.weight))
        replayed += 1
    assert replayed > 3


class WritesFirst(ConvLayer):
    """Planted: the window takes the row's inputs in before it is read, so it sees them twice."""

    def compute(self, batch: Batch, pools: Pools) -> Tensor:
        x, ring = self.table[batch.tokens], pools.rows("conv", "x")[0]
        batch.rows.ring_write(ring, x)
        earlier = ring.roll(1, dims=1)
        return batch.rows.causal_conv(x, earlier, self.weight)


class RollsBackTwice(ConvLayer):
    """Planted: after drafts the window is moved back although nothing had to move."""

    def compute(self, batch: Batch, pools: Pools) -> Tensor:
        out = super().compute(batch, pools)
        if len(batch.tentative):
            ring = pools.rows("conv", "x")[0]
            ring.copy_(ring.roll(1, dims=1))
        return out


@pytest.mark.parametrize("kind", [WritesFirst, RollsBackTwice])
def test_a_window_that_is_shifted_or_rolled_back_twice_is_caught(kind: type[ConvLayer]) -> None:
    honest = ConvLayer.of(torch.bfloat16)
    faulty = kind(honest.table, honest.weight)
    assert differing_cuts(faulty, EmulatedBackend(), SETTING, seed=1) != []


def test_a_padded_row_that_aliases_a_live_slot_is_caught() -> None:
    """The emulation notices that two rows write one place."""
    with pytest.raises(SilentError, match="repeats in indices"):
        differing_cuts(ConvLayer.of(torch.bfloat16), EmulatedBackend(), SETTING, 1, (aliased,))


def test_a_step_of_no_tokens_gives_nothing() -> None:
    layer = ConvLayer.of(torch.bfloat16)
    rows = EmulatedBackend().rows(Step.of([], 16).layout())
    out = rows.causal_conv(layer.table[:0], torch.zeros(1, 5, CHANNELS).bfloat16(), layer.weight)
    assert out.shape == (0, CHANNELS)
