"""The numbers that kernels make: exponentials, sigmoids, and states that fade to nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from surefoot.backend.cpu.kernels.algebra import exp, sigmoid
from tests.unit.backend.conformance import TOLERANCE
from tests.unit.backend.cuts import alone, rejecting
from tests.unit.backend.recurrences import NAN, RecurrentLayer, RecurrentMachine, Sizes, setting_of
from tests.unit.backend.tiled import KERNELS

TINY = float(np.finfo(np.float32).tiny)
UNIT = float(np.finfo(np.float32).eps) / 2
LEAST, MOST = -87.0, 88.0


def spread(low: float, high: float) -> npt.NDArray[np.float32]:
    """Numbers from all over a range, its ends, zeros, and numbers close to where n changes."""
    rng = np.random.default_rng(1)
    halves = (np.arange(np.ceil(low), high) + 0.5) * np.log(2)
    near = [np.nextafter(np.float32(x), np.float32(way)) for x in halves for way in (-99, 99)]
    small = 10.0 ** np.arange(-44, 0)
    every = np.concatenate([rng.uniform(low, high, 60_000), halves, near, small, -small, [0, -0.0]])
    inside = every[(every >= low) & (every <= high)].astype(np.float32)
    return np.concatenate([inside, np.array([low, high], np.float32)])


def test_exp_is_right_to_the_last_bit_or_so_over_its_whole_range() -> None:
    x = spread(LEAST, MOST)
    got = np.array([exp(value) for value in x])
    assert np.array_equal(got, got.astype(np.float32))
    want = np.exp(x.astype(np.float64))
    assert float(np.abs(got / want - 1).max()) < 1.5 * UNIT
    assert float(got.min()) >= TINY


def test_exp_stays_where_its_range_ends() -> None:
    for beyond in (-87.01, -88.0, -104.0, -1e30, -np.inf):
        assert exp(np.float32(beyond)) == exp(np.float32(LEAST))
    for beyond in (88.01, 89.0, 1e30, np.inf):
        assert exp(np.float32(beyond)) == exp(np.float32(MOST))
    assert exp(np.float32(0)) == 1
    assert np.isnan(exp(np.float32(NAN)))


def test_sigmoid_is_right_everywhere() -> None:
    x = spread(-120.0, 120.0)
    got = np.array([sigmoid(value) for value in x])
    want = 1 / (1 + np.exp(-x.astype(np.float64)))
    inside = x >= LEAST
    assert float(np.abs(got / want - 1)[inside].max()) < 3 * UNIT
    assert float(got[~inside].max()) < 2 * TINY
    assert float(got.max()) == 1
    assert np.isnan(sigmoid(np.float32(NAN)))
    assert sigmoid(np.float32(-np.inf)) < TINY


def test_gates_use_the_same_sigmoid() -> None:
    x = spread(-120.0, 120.0)
    want = torch.tensor([sigmoid(value) for value in x])
    assert torch.equal(KERNELS.gate(torch.ones(len(x), 1), torch.tensor(x)[:, None])[:, 0], want)
    assert torch.equal(KERNELS.gate(torch.ones(1, len(x)), torch.tensor(x)[None])[0], want)


@pytest.mark.parametrize("strength", [0.5, 3.0, 12.0, 50.0])
def test_strong_decay_leaves_no_denormal_numbers(strength: float) -> None:
    """Processors are slow with them; decays up to `strength` a token, by head and token."""
    sizes, setting = Sizes(2, 6, 16, 12), setting_of((700, 330))
    draws = torch.Generator().manual_seed(1)
    layer = RecurrentLayer.of(1, sizes, KERNELS)
    layer = replace(layer, a=strength * torch.rand(layer.a.shape, generator=draws))
    for script in (alone(setting.lengths), rejecting(setting.lengths, setting.depth)):
        on = RecurrentMachine(layer, KERNELS, setting)
        got = on.play(script)
        states = on.pools.rows("delta", "state")[0, on.slots].abs()
        assert float(states[states > 0].min()) >= TINY
        assert bool((states > 0).any())
        for tokens, out in zip(setting.sequences, got, strict=True):
            want = layer.truth(tokens)
            assert float((out - want).abs().max() / want.abs().max()) < TOLERANCE


@pytest.mark.parametrize("part", ["table", "b"])
def test_a_state_that_nothing_is_added_to_fades_to_zero(part: str) -> None:
    """Values or betas vanish from the second block on; e^-92 of the state would be denormal."""
    sizes, setting = Sizes(1, 2, 16, 12), setting_of((16 * 60,))
    layer = RecurrentLayer.of(1, sizes, KERNELS)
    tokens = [token % 40 for token in setting.sequences[0]]
    tokens[16:] = [49] * (len(tokens) - 16)
    layer.a[:] = -2.28
    if part == "table":
        layer.table[49, 2 * sizes.keys :] = 0
    else:
        layer.b[49] = -np.inf
    on = RecurrentMachine(layer, KERNELS, replace(setting, sequences=[tokens]))
    got = on.play(alone([len(tokens)]))[0]
    want = layer.truth(tokens)
    assert float((got - want).abs().max() / want.abs().max()) < TOLERANCE
    assert not on.pools.rows("delta", "state")[0, on.slots].any()
