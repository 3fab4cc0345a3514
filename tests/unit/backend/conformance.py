"""The operators of a backend, each run on the random case of a given number.

A run builds its inputs on the CPU from the number alone, so two backends see the same ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from surefoot.backend import make_backend
from surefoot.backend.operands import DeltaCaches, Fold, Placing
from surefoot.backend.protocol import Backend
from surefoot.model.layers.rotary import make_rotary
from tests.unit.backend.conformance_grouped import grouped_experts, grouped_gated, grouped_linear
from tests.unit.backend.conformance_int8 import int8_experts, int8_gated, int8_linear
from tests.unit.backend.conformance_latents import (
    attend_chosen,
    attend_latents,
    choose_entries,
    compress,
    routers,
    streams,
)
from tests.unit.backend.layouts import GARBAGE, HEADS, SIZES, Case, case_of
from tests.unit.backend.recurrent_steps import delta_case, inputs_on, remembered
from tests.unit.backend.tiled import TILED

Run = Callable[[Backend, int], Sequence[Tensor]]

TOLERANCE = 1e-5

BACKENDS: Mapping[str, Callable[[], Backend]] = {
    "cpu": lambda: make_backend("cpu", True),
    "cpu-fast": lambda: make_backend("cpu", False),
    "tiled": lambda: TILED,
    **({"cuda": lambda: make_backend("cuda", None)} if torch.cuda.is_available() else {}),
}


def paged_write(backend: Backend, seed: int) -> Sequence[Tensor]:
    case = case_of(seed)
    rows = backend.rows(case.layout)
    pool = case.pool().to(backend.device)
    flat = pool[:, 0].clone()
    entries = case.entries().to(backend.device)
    rows.paged_write(pool, entries)
    rows.paged_write(flat, entries[:, 0])
    return pool, flat


def paged_attention(backend: Backend, seed: int) -> Sequence[Tensor]:
    case = case_of(seed)
    rows = backend.rows(case.layout)
    pools = [case.pool().to(backend.device) for _ in range(2)]
    for pool in pools:
        rows.paged_write(pool, case.entries().to(backend.device))
    q = case.queries().to(backend.device)
    return (rows.paged_attention(q, pools[0], pools[1], _scale(case)),)


def attend_pages(backend: Backend, seed: int) -> Sequence[Tensor]:
    case, (rng, draws) = case_of(seed), _sources(seed)
    rows, device = backend.rows(case.layout), backend.device
    q, k, v = case.queries(), case.entries(), case.entries()
    size, heads = q.shape[2], q.shape[1] + k.shape[1]
    cos, sin = (torch.randn(len(q), 1, size, generator=draws).to(device) for _ in range(2))
    norms = torch.rand(heads, size, generator=draws).to(device) if rng.random() < 0.5 else None
    pools = case.pool().to(device), case.pool().to(device)
    both = torch.cat((q, k, q), 1).to(device)[:, :heads]
    placing = Placing(norms, 1e-5, cos, sin)
    out = rows.attend_pages(both, v.to(device), placing, pools, _scale(case))
    return out, *pools


def ring_write(backend: Backend, seed: int) -> Sequence[Tensor]:
    case = case_of(seed)
    ring = case.ring().to(backend.device)
    backend.rows(case.layout).ring_write(ring, case.entries().to(backend.device))
    return (ring,)


def window_attention(backend: Backend, seed: int) -> Sequence[Tensor]:
    case = case_of(seed)
    rings = case.ring().to(backend.device), case.ring().to(backend.device)
    kv = case.entries().to(backend.device), case.entries().to(backend.device)
    q = case.queries().to(backend.device)
    rows = backend.rows(case.layout)
    return (rows.window_attention(q, kv, rings, case.window, _scale(case)),)


def rms_norm(backend: Backend, seed: int) -> Sequence[Tensor]:
    rng, draws = _sources(seed)
    tokens, heads, width = rng.randrange(40), rng.randint(1, 12), rng.randint(1, 300)
    weight = torch.randn(width, generator=draws).to(backend.device)
    flat = 3 * torch.randn(tokens, width, generator=draws)
    by_head = torch.randn(tokens, heads + 2, width, generator=draws)[:, :heads]
    eps = rng.choice((1e-6, 1e-5, 1e-2))
    return [backend.rms_norm(x.to(backend.device), weight, eps) for x in (flat, by_head)]


def pick_rows(backend: Backend, seed: int) -> Sequence[Tensor]:
    rng, draws = _sources(seed)
    rows, count, shape = rng.randint(1, 50), rng.randrange(60), rng.choice(((1,), (65,), (3, 40)))
    table = torch.randn(rows, 2, *shape, generator=draws).to(backend.device)
    places = torch.randint(0, rows, (count,), generator=draws).to(backend.device)
    return [backend.pick_rows(x, places) for x in (table, table[:, 0], table.flip(0)[:, 0])]


def join_tokens(backend: Backend, seed: int) -> Sequence[Tensor]:
    rng, draws = _sources(seed)
    count, vocab, width = rng.randrange(40), rng.randint(1, 50), rng.randint(1, 300)
    tokens = torch.randint(0, vocab, (count,), generator=draws)
    table, states = (3 * torch.randn(n, width, generator=draws) for n in (vocab, count))
    norms, eps = torch.randn(2, width, generator=draws), rng.choice((1e-6, 1e-5, 1e-2))
    device = backend.device
    given = tokens.to(device), table.to(device), states.to(device), norms.to(device)
    return (backend.join_tokens(*given, eps),)


def pack_gated(backend: Backend, seed: int) -> Sequence[Tensor]:
    rng, draws = _sources(seed)
    outputs, inputs = rng.randint(1, 200), rng.randint(1, 200)
    weight = torch.randn(2 * outputs, inputs, generator=draws) / inputs**0.5
    bias = torch.randn(2 * outputs, generator=draws)
    x = torch.randn(rng.randrange(40), inputs, generator=draws).to(backend.device)
    whole = [backend.pack_gated(weight, added)(x) for added in (None, bias)]
    return [*whole, backend.pack_gated(weight, bias, limit=0.5)(x)]


def rotary(backend: Backend, seed: int) -> Sequence[Tensor]:
    rng, draws = _sources(seed)
    heads, size = sum(rng.choice(HEADS)), rng.choice((2, 6, *SIZES))
    tokens = rng.randrange(40)
    positions = torch.randint(0, 10_000, (tokens,), generator=draws)
    cos, sin = make_rotary(size, 10_000.0, None).on(backend)(positions)
    wide = torch.randn(tokens, heads + 2, size, generator=draws)
    device = backend.device
    return [
        backend.rotary(x.to(device), cos.to(device), sin.to(device)) for x in (wide, wide[:, 2:])
    ]


def pack_linear(backend: Backend, seed: int) -> Sequence[Tensor]:
    rng, draws = _sources(seed)
    outputs, inputs = rng.randint(1, 300), rng.randint(1, 300)
    weight = torch.randn(outputs, inputs, generator=draws) / inputs**0.5
    bias = torch.randn(outputs, generator=draws)
    x = torch.randn(rng.choice((0, 1, 2, rng.randint(3, 80))), inputs, generator=draws)
    x = x.to(backend.device)
    return [backend.pack_linear(weight, added)(x) for added in (None, bias)]


def add_linear(backend: Backend, seed: int) -> Sequence[Tensor]:
    rng, draws = _sources(seed)
    outputs, inputs = rng.randint(1, 300), rng.randint(1, 300)
    weight = torch.randn(outputs, inputs, generator=draws) / inputs**0.5
    bias = torch.randn(outputs, generator=draws)
    rows = rng.choice((0, 1, 2, rng.randint(3, 80)))
    x = torch.randn(rows, inputs, generator=draws).to(backend.device)
    stream = torch.randn(rows, outputs, generator=draws).to(backend.device)
    kept = stream.clone()
    sums = [backend.pack_linear(weight, added).add(x, stream) for added in (None, bias)]
    assert torch.equal(stream, kept)
    return sums


def causal_conv(backend: Backend, seed: int) -> Sequence[Tensor]:
    case = case_of(seed)
    rng, draws = _sources(seed)
    taps, channels = rng.choice((1, 2, 4)), rng.randint(1, 40)
    capacity = taps + rng.choice((0, 3, 8))
    ring = torch.full((case.slots, capacity, channels), float("nan"))
    for row, first in enumerate(case.layout.first):
        ring[case.layout.slots[row]] = GARBAGE
        for position in range(max(0, first - taps + 1), first):
            entry = torch.randn(channels, generator=draws)
            ring[case.layout.slots[row], position % capacity] = entry
    wide = torch.randn(case.tokens, channels + 3, generator=draws).to(backend.device)
    weight = torch.randn(channels, taps, generator=draws).to(backend.device)
    rows, ring = backend.rows(case.layout), ring.to(backend.device)
    return [rows.causal_conv(x, ring, weight) for x in (wide[:, 3:], wide[:, :channels])]


def delta_rule(backend: Backend, seed: int) -> Sequence[Tensor]:
    case = delta_case(seed)
    caches = remembered(case, backend)
    inputs = inputs_on(case.inputs, backend.device)
    out = backend.rows(case.layout).delta_rule(inputs, caches)
    return [out, *_seen(caches)]


def fold_delta(backend: Backend, seed: int) -> Sequence[Tensor]:
    case = delta_case(seed)
    caches, block = remembered(case, backend), case.caches.block
    folds = [
        Fold(case.layout.slots[row], settled // block * block)
        for row, settled in enumerate(case.layout.settled)
        if case.layout.first[row] >= settled // block * block + block
    ]
    backend.fold_delta(caches, folds)
    return _seen(caches)


def _seen(caches: DeltaCaches) -> list[Tensor]:
    """What backends agree on; of what each makes of v, where there is something."""
    return [caches.state, caches.k, caches.decay, caches.beta, caches.value.isnan().float()]


def delta_gates(backend: Backend, seed: int) -> Sequence[Tensor]:
    rng, draws = _sources(seed)
    tokens, heads = rng.randrange(40), rng.randint(1, 40)
    a, b = (9 * torch.randn(tokens, heads, generator=draws) for _ in range(2))
    a_log, dt_bias = (torch.randn(heads, generator=draws) for _ in range(2))
    device = backend.device
    return backend.delta_gates(a.to(device), b.to(device), a_log.to(device), dt_bias.to(device))


def gate(backend: Backend, seed: int) -> Sequence[Tensor]:
    rng, draws = _sources(seed)
    tokens, width = rng.randrange(40), rng.randint(1, 200)
    x, gates = (3 * torch.randn(tokens, width, generator=draws) for _ in range(2))
    x, gates = x.to(backend.device), gates.to(backend.device)
    return backend.gate(x, gates), backend.gate(x, gates[:, :1])


def gated_norm(backend: Backend, seed: int) -> Sequence[Tensor]:
    rng, draws = _sources(seed)
    shape = rng.randrange(40), rng.randint(1, 12), rng.randint(1, 200)
    x, gates = (3 * torch.randn(shape, generator=draws).to(backend.device) for _ in range(2))
    weight = torch.randn(shape[2], generator=draws).to(backend.device)
    return (backend.gated_norm(x, gates, weight, 1e-6),)


def top_k(backend: Backend, seed: int) -> Sequence[Tensor]:
    """Few different scores, so that most of them are tied."""
    rng, draws = _sources(seed)
    tokens, count = rng.randrange(40), rng.randint(1, 40)
    scores = torch.randint(0, rng.randint(1, 9), (tokens, count), generator=draws).float()
    return backend.top_k(scores.to(backend.device), rng.randint(1, count))


def experts(backend: Backend, seed: int) -> Sequence[Tensor]:
    rng, draws = _sources(seed)
    count, inner, hidden = rng.randint(1, 9), rng.randint(1, 30), rng.randint(1, 30)
    gate_up = torch.randn(count, 2 * inner, hidden, generator=draws) / hidden**0.5
    down = torch.randn(count, hidden, inner, generator=draws) / inner**0.5
    limit = rng.choice((math.inf, 0.3))
    packed = backend.pack_experts(gate_up.to(backend.device), down.to(backend.device), limit)
    chosen = rng.randint(1, count)
    tokens = rng.choice((0, 1, 2, rng.randint(3, 40)))
    order = torch.rand(tokens, count, generator=draws).argsort(-1)[:, :chosen]
    choice = order.masked_fill(torch.rand(order.shape, generator=draws) < 0.2, -1)
    weights = torch.rand(order.shape, generator=draws).masked_fill(choice < 0, float("nan"))
    x = torch.randn(tokens, hidden, generator=draws)
    device = backend.device
    return (packed(x.to(device), choice.to(device), weights.to(device)),)


OPERATORS: Mapping[str, Run] = {
    run.__name__: run
    for run in (
        paged_write,
        paged_attention,
        attend_pages,
        ring_write,
        window_attention,
        rms_norm,
        pick_rows,
        join_tokens,
        rotary,
        pack_linear,
        add_linear,
        pack_gated,
        causal_conv,
        delta_rule,
        fold_delta,
        delta_gates,
        gate,
        gated_norm,
        top_k,
        experts,
        compress,
        choose_entries,
        attend_latents,
        attend_chosen,
        streams,
        routers,
    )
}

INT8_OPERATORS: Mapping[str, Run] = {
    run.__name__: run for run in (int8_linear, int8_gated, int8_experts)
}
"""Of backends that pack weights in int8."""

GROUPED_OPERATORS: Mapping[str, Run] = {
    run.__name__: run for run in (grouped_linear, grouped_gated, grouped_experts)
}
"""The same with scales by groups of inputs."""


def differing(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[str]:
    """What is wrong with `got`: shapes, element types, or values further apart than TOLERANCE."""
    faults = []
    for place, (one, other) in enumerate(zip(got, want, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            faults.append(f"{place}: {one.dtype}{list(one.shape)}, not {list(other.shape)}")
        elif not torch.allclose(one.cpu(), other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            faults.append(f"{place}: values differ")
    return faults


def _scale(case: Case) -> float:
    return 1 / math.sqrt(case.size)


def _sources(seed: int) -> tuple[random.Random, torch.Generator]:
    return random.Random(seed), torch.Generator().manual_seed(seed)
