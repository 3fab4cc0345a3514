"""Random steps of a recurrent layer, and inputs for them."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch
from torch import Tensor

from surefoot.backend.operands import DeltaCaches, DeltaInputs, RowLayout
from surefoot.backend.protocol import Backend
from tests.unit.backend.recurrences import NAN, Sizes, unit


@dataclass(frozen=True)
class DeltaCase:
    """A random step of a recurrent layer, with NaN wherever nobody may look."""

    layout: RowLayout
    inputs: DeltaInputs
    caches: DeltaCaches
    draws: torch.Generator


def delta_case(seed: int) -> DeltaCase:
    """The case with this number; case 0 is the empty step."""
    rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, sizes = rng.randint(1, 3), rng.choice(((8, 12), (16, 16), (20, 8), (64, 32)))
    shape = Sizes(heads, heads * rng.choice((1, 2, 3)), *sizes, rng.choice((16, 16, 32)))
    depth = rng.choice((1, 4, 8, 15))
    count = rng.randint(1, 5) if seed else 0
    rows = [_delta_row(rng, shape.block, depth) for _ in range(count)]
    layout = RowLayout(
        starts=tuple(accumulate((row[1] for row in rows), initial=0)),
        first=tuple(row[0] for row in rows),
        tables=tuple([1] * (row[0] + row[1]) for row in rows),
        slots=tuple(rng.sample(range(1, count + 3), count)),
        visible_from=(0,) * count,
        settled=tuple(row[2] for row in rows),
        settles=tuple(row[3] for row in rows),
        page_tokens=16,
    )
    inputs = random_inputs(layout.starts[-1], shape, draws)
    capacity = shape.specs[1].capacity(depth)
    return DeltaCase(layout, inputs, _delta_caches(layout, shape, capacity, draws), draws)


def _delta_row(rng: random.Random, block: int, depth: int) -> tuple[int, int, int, int]:
    """First position, length, settled, settles: a decode, verify, prefill, mixed or draft row."""
    first = rng.choice((0, block - 1, block, rng.randint(0, 3 * block)))
    kind = rng.choice(("decode", "verify", "prefill", "mixed", "draft"))
    if kind == "draft":
        settled = max(0, first - rng.randint(0, depth - 1))
        return first, 1, settled, settled
    longest = {"decode": 1, "verify": depth + 1, "prefill": 3 * block, "mixed": 3 * block}[kind]
    length = rng.randint(1, longest)
    drafted = min(length - 1, rng.randint(0, depth)) if kind in ("verify", "mixed") else 0
    return first, length, first, first + length - drafted


def random_inputs(tokens: int, shape: Sizes, draws: torch.Generator) -> DeltaInputs:
    def normal(*sizes: int) -> Tensor:
        return torch.randn(tokens, *sizes, generator=draws)

    return DeltaInputs(
        q=unit(normal(shape.key_heads, shape.key_size)) * shape.key_size**-0.5,
        k=unit(normal(shape.key_heads, shape.key_size)),
        v=normal(shape.value_heads, shape.value_size),
        decay=-(normal(shape.value_heads) - 2).exp(),
        beta=1 / (1 + (2 * normal(shape.value_heads)).exp()),
    )


def _delta_caches(
    layout: RowLayout, shape: Sizes, capacity: int, draws: torch.Generator
) -> DeltaCaches:
    """Checkpoints and rings of the rows: history where they have it, NaN elsewhere."""
    (state,), inputs = shape.specs[1].state, shape.specs[1].inputs
    slots = len(layout.first) + 3
    rings = [torch.full((slots, capacity, *part.shape), NAN) for part in inputs]
    states = torch.full((slots, *state.shape), NAN)
    for row, first in enumerate(layout.first):
        slot, base = layout.slots[row], layout.settled[row] // shape.block * shape.block
        history = random_inputs(first - base, shape, draws)
        states[slot] = torch.randn(state.shape, generator=draws) if base else 0
        known = history.k, history.v, history.decay, history.beta
        for ring, entries in zip(rings, known, strict=True):
            for at in range(first - base):
                ring[slot, (base + at) % capacity] = entries[at]
    k, value, decay, beta = rings
    return DeltaCaches(states, k, value, decay, beta, shape.block)


def history_of(case: DeltaCase) -> tuple[RowLayout, DeltaInputs]:
    """A step before the case's, from the checkpoints to each row's first token; nothing settles.

    Its inputs are what the case's rings hold. So each backend makes of v what it keeps.
    """
    layout, caches = case.layout, case.caches
    bases = tuple(settled // caches.block * caches.block for settled in layout.settled)
    lengths = [first - base for first, base in zip(layout.first, bases, strict=True)]
    starts = tuple(accumulate(lengths, initial=0))
    before = replace(layout, starts=starts, first=bases, settled=bases, settles=bases)
    rings = caches.k, caches.value, caches.decay, caches.beta
    capacity = caches.k.shape[1]
    places = [
        (slot, position % capacity)
        for slot, first, base in zip(layout.slots, layout.first, bases, strict=True)
        for position in range(base, first)
    ]
    slots, columns = [place[0] for place in places], [place[1] for place in places]
    k, v, decay, beta = (ring[slots, columns] for ring in rings)
    return before, DeltaInputs(torch.zeros_like(k), k, v, decay, beta)


def remembered(case: DeltaCase, backend: Backend) -> DeltaCaches:
    """Caches of a backend that has computed each row of the case up to its first token."""
    caches = to_device(case.caches, backend.device)
    for ring in tensors(caches)[1:]:
        ring.fill_(NAN)
    before, inputs = history_of(case)
    backend.rows(before).delta_rule(inputs_on(inputs, backend.device), caches)
    return caches


def inputs_on(inputs: DeltaInputs, device: torch.device) -> DeltaInputs:
    parts = inputs.q, inputs.k, inputs.v, inputs.decay, inputs.beta
    return DeltaInputs(*(part.to(device) for part in parts))


def tensors(caches: DeltaCaches) -> list[Tensor]:
    found = (getattr(caches, field.name) for field in fields(caches))
    return [part for part in found if isinstance(part, Tensor)]


def to_device(caches: DeltaCaches, device: torch.device) -> DeltaCaches:
    state, k, value, decay, beta = (part.clone().to(device) for part in tensors(caches))
    return DeltaCaches(state, k, value, decay, beta, caches.block)
