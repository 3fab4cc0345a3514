"""Operators in int8, each on the random case of a given number.

Inputs have rows of zeros, of numbers huge or hardly above zero, and rows with NaN or an
infinity in one place, which must spoil themselves and nothing else.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from surefoot.backend.operands import FixedInput, Int8Weight, Weight
from surefoot.backend.protocol import Backend

ROWS = (0, 1, 2, 16, 17, 40)


def int8_linear(backend: Backend, seed: int) -> Sequence[Tensor]:
    rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    outputs, inputs = rng.randint(1, 300), rng.choice((1, 64, 128, rng.randint(2, 300)))
    weight = drawn_weight(rng, draws, (outputs, inputs)).to(backend.device)
    bias = torch.randn(outputs, generator=draws).to(backend.device)
    rows = ROWS[seed % len(ROWS)]
    x = drawn_inputs(rng, draws, rows, inputs).to(backend.device)
    stream = torch.randn(rows, outputs, generator=draws).to(backend.device)
    plain, biased = (backend.pack_linear(weight, added) for added in (None, bias))
    return plain(x), biased(x), plain.add(x, stream), biased.add(x, stream)


def int8_gated(backend: Backend, seed: int) -> Sequence[Tensor]:
    """Results of one size; an infinite one would not say what it was made of."""
    rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    outputs, inputs = rng.randint(1, 200), rng.randint(1, 200)
    weight = drawn_weight(rng, draws, (2 * outputs, inputs), fixed=False).to(backend.device)
    bias = torch.randn(2 * outputs, generator=draws).to(backend.device)
    x = torch.randn(ROWS[seed % len(ROWS)], inputs, generator=draws).to(backend.device)
    x[1:2] = 0
    packed = [backend.pack_gated(weight, None), backend.pack_gated(weight, bias, limit=0.5)]
    return [gated(x) for gated in packed]


def int8_experts(backend: Backend, seed: int) -> Sequence[Tensor]:
    """Gates are above 20, where silu(gate) is the gate to the last bit.

    So what the second product takes has the same bits on every backend, and no code of it is
    another one because a tie was rounded the other way.
    """
    first = as_it_is if seed % 3 == 0 else coded
    second = as_it_is if seed % 3 == 1 else coded
    return experts_case(backend, seed, first, second)


def as_it_is(weight: Tensor) -> Tensor:
    return weight


def experts_case(
    backend: Backend,
    seed: int,
    first: Callable[[Tensor], Weight],
    second: Callable[[Tensor], Weight],
    unit: int = 1,
) -> Sequence[Tensor]:
    """Experts whose weights are made by `first` and `second`, of so many `unit`s of inputs."""
    rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    count, inner, hidden = rng.randint(1, 9), rng.randint(1, 30), rng.randint(1, 30)
    inner, hidden = inner * unit, hidden * unit
    gate_up = 0.5 + torch.rand(count, 2 * inner, hidden, generator=draws)
    gate_up[:, :inner] *= 100 / hidden
    gate_up[:, inner:] -= 1
    down = torch.randn(count, hidden, inner, generator=draws)
    moved = [weight.to(backend.device) for weight in (first(gate_up), second(down))]
    packed = backend.pack_experts(moved[0], moved[1], rng.choice((math.inf, 64.0)))
    chosen, tokens = rng.randint(1, count), ROWS[seed % len(ROWS)]
    order = torch.rand(tokens, count, generator=draws).argsort(-1)[:, :chosen]
    choice = order.masked_fill(torch.rand(order.shape, generator=draws) < 0.2, -1)
    weights = torch.rand(order.shape, generator=draws).masked_fill(choice < 0, float("nan"))
    x = 0.7 + 0.3 * torch.rand(tokens, hidden, generator=draws)
    device = backend.device
    return (packed(x.to(device), choice.to(device), weights.to(device)) / 50,)


def coded(weight: Tensor) -> Int8Weight:
    """A weight in int8, written down anew: the greatest magnitude of a row is 127."""
    scales = weight.abs().amax(-1) / 127
    return Int8Weight((weight / scales[..., None]).round().to(torch.int8), scales)


def drawn_weight(
    rng: random.Random, draws: torch.Generator, shape: tuple[int, int], fixed: bool = True
) -> Int8Weight:
    """Any codes, -128 too, and scales of all sizes; with `fixed` inputs every other time."""
    values = torch.randint(-128, 128, shape, generator=draws).to(torch.int8)
    values[rng.randrange(shape[0])] = 0
    scales = torch.rand(shape[0], generator=draws) / 128 / shape[1] ** 0.5
    scales[rng.randrange(shape[0])] = 1e-30
    if not fixed or rng.random() < 0.5:
        return Int8Weight(values, scales)
    added = torch.randint(-(10**6), 10**6, (shape[0],), generator=draws).to(torch.int32)
    return Int8Weight(values, scales, FixedInput(rng.uniform(0.01, 0.1), rng.randint(-9, 9), added))


def drawn_inputs(rng: random.Random, draws: torch.Generator, rows: int, inputs: int) -> Tensor:
    """Rows of each kind in turn, and in between what is usual."""
    x = torch.randn(rows, inputs, generator=draws)
    kinds = (1.0, 0.0, 1e30, 1.0, 1e-39, 1e-30, 1.0)
    for row in range(rows):
        x[row] *= kinds[row % len(kinds)]
    for row in range(3, rows, 7):
        x[row, rng.randrange(inputs)] = rng.choice((math.nan, math.inf, -math.inf))
    return x
