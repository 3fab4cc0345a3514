"""Operators in int8 with scales by groups of inputs, each on the random case of a given number."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.backend.operands import Int8Weight
from surefoot.backend.protocol import Backend
from tests.unit.backend.conformance_int8 import ROWS, coded, drawn_inputs, experts_case

SIZES = (1, 32, 64, 128, 7)
"""Of groups."""


def grouped_linear(backend: Backend, seed: int) -> Sequence[Tensor]:
    rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    weight = drawn_groups(rng, draws, rng.randint(1, 150))
    outputs, inputs = weight.shape
    bias = torch.randn(outputs, generator=draws).to(backend.device)
    rows = ROWS[seed % len(ROWS)]
    x = drawn_inputs(rng, draws, rows, inputs).to(backend.device)
    stream = torch.randn(rows, outputs, generator=draws).to(backend.device)
    moved = weight.to(backend.device)
    plain, biased = (backend.pack_linear(moved, added) for added in (None, bias))
    return plain(x), biased(x), plain.add(x, stream), biased.add(x, stream)


def grouped_gated(backend: Backend, seed: int) -> Sequence[Tensor]:
    rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    weight = drawn_groups(rng, draws, 2 * rng.randint(1, 90)).to(backend.device)
    bias = torch.randn(weight.shape[0], generator=draws).to(backend.device)
    x = torch.randn(ROWS[seed % len(ROWS)], weight.shape[1], generator=draws).to(backend.device)
    x[1:2] = 0
    packed = [backend.pack_gated(weight, None), backend.pack_gated(weight, bias, limit=0.5)]
    return [gated(x) for gated in packed]


def grouped_experts(backend: Backend, seed: int) -> Sequence[Tensor]:
    """Groups in one of the two products or in both; the other has one scale an output."""
    first = coded if seed % 3 == 0 else coded_groups
    second = coded if seed % 3 == 1 else coded_groups
    return experts_case(backend, seed, first, second, unit=2)


def drawn_groups(rng: random.Random, draws: torch.Generator, outputs: int) -> Int8Weight:
    """Any codes, and scales of all sizes; some groups count for nothing."""
    count, size = rng.randint(1, 5), rng.choice(SIZES)
    values = torch.randint(-128, 128, (outputs, count * size), generator=draws).to(torch.int8)
    scales = torch.rand(outputs, count, generator=draws) / 128 / (count * size) ** 0.5
    scales *= 4.0 ** torch.randint(-3, 1, scales.shape, generator=draws)
    scales[rng.randrange(outputs)], scales[rng.randrange(outputs), 0] = 1e-30, 0
    return Int8Weight(values, scales)


def coded_groups(weight: Tensor) -> Int8Weight:
    """A weight in 4 bits with scales for two or three groups, written down anew."""
    count = 3 if weight.shape[-1] % 3 == 0 else 2
    parts = weight.unflatten(-1, (count, -1))
    scales = parts.abs().amax(-1) / 7
    codes = (parts / scales[..., None]).round().to(torch.int8)
    return Int8Weight(codes.flatten(-2), scales)
