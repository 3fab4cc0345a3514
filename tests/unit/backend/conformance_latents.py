"""Operators of compressed caches and of streams, each on the random case of a given number."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.backend.operands import Compression, Entries, LatentPages, Latents, StreamGates
from surefoot.backend.protocol import Backend
from surefoot.backend.reference import ReferenceBackend
from surefoot.model.layers.rotary import make_rotary
from tests.unit.backend.layouts import GARBAGE, Case, case_of


def _entries(case: Case, ratio: int, size: int) -> Tensor:
    """[pages, P / ratio, size]: complete entries, garbage where none is, NaN in other pages."""
    layout = case.layout
    share = layout.page_tokens // ratio
    pool = torch.full((case.pages, share, size), float("nan"))
    for table in layout.tables:
        pool[list(table)] = GARBAGE
    for row, first in enumerate(layout.first):
        for number in range(first // ratio):
            values = torch.randn(size, generator=case.draws)
            pool[layout.tables[row][number // share], number % share] = values
    return pool


def _ring(case: Case, size: int, window: int) -> Tensor:
    """[slots, capacity, size]: the window before each row, garbage in its other columns."""
    capacity = window + 2
    ring = torch.full((case.slots, capacity, size), float("nan"))
    for row, first in enumerate(case.layout.first):
        slot = case.layout.slots[row]
        ring[slot] = GARBAGE
        for position in range(max(0, first - window), first):
            ring[slot, position % capacity] = torch.randn(size, generator=case.draws)
    return ring


def _ratio(case: Case, seed: int) -> int:
    page = case.layout.page_tokens
    return random.Random(seed).choice([n for n in (1, 2, 4, 8) if page % n == 0])


def compress(backend: Backend, seed: int) -> Sequence[Tensor]:
    case, device = case_of(seed), backend.device
    ratio, halves, size = _ratio(case, seed), 1 + seed % 2, case.size
    raw = torch.randn(case.tokens, 2 * halves * size, generator=case.draws)
    ring, pool = _ring(case, 2 * halves * size, halves * ratio), _entries(case, ratio, size)
    layout = case.layout
    begins = [
        (first + i) // ratio * ratio
        for row, first in enumerate(layout.first)
        for i in range(layout.length(row))
    ]
    positions = torch.tensor(begins, dtype=torch.long).to(device)
    cos, sin = make_rotary(size, 10000.0, None).on(backend)(positions)
    norm = torch.rand(size, generator=case.draws).to(device)
    form = Compression(ratio, halves == 2, norm, 1e-6, cos, sin)
    pool = pool.to(device)
    backend.rows(layout).compress(raw.to(device), ring.to(device), pool, form)
    return (pool,)


def choose_entries(backend: Backend, seed: int) -> Sequence[Tensor]:
    """Whole numbers and few of them, so that sums are exact and most scores are tied."""
    case, rng, device = case_of(seed), random.Random(seed), backend.device
    ratio, heads, size = _ratio(case, seed), rng.randint(1, 9), case.size
    draws = case.draws
    q = torch.randint(-2, 3, (case.tokens, heads, size), generator=draws).float()
    weights = torch.randint(-1, 2, (case.tokens, heads), generator=draws).float()
    keys = _entries(case, ratio, size)
    pool = torch.where(keys.abs() < 100, keys.round(), keys)
    # Garbage stays, and what the step itself completes is there by now.
    pool = torch.where(keys == GARBAGE, torch.randint(-2, 3, keys.shape, generator=draws), pool)
    rows = backend.rows(case.layout)
    count = rng.randint(1, 9)
    return (rows.choose_entries(q.to(device), weights.to(device), pool.to(device), ratio, count),)


def attend_latents(backend: Backend, seed: int) -> Sequence[Tensor]:
    case, rng, device = case_of(seed), random.Random(seed), backend.device
    ratio, size, draws = _ratio(case, seed), case.size, case.draws
    q = case.queries().to(device)
    own = torch.randn(case.tokens, size, generator=draws).to(device)
    latents = Latents(own, _ring(case, size, case.window).to(device), case.window)
    pool = _entries(case, ratio, size)
    pool = torch.where(pool == GARBAGE, torch.randn(pool.shape, generator=draws), pool).to(device)
    sinks = torch.randn(case.query_heads, generator=draws).to(device)
    rows, scale = backend.rows(case.layout), size**-0.5
    plain = ReferenceBackend().rows(case.layout)
    chosen = plain.choose_entries(q.cpu(), q.cpu().sum(-1), pool.cpu(), ratio, rng.randint(1, 9))
    some = chosen.masked_fill(torch.rand(chosen.shape, generator=draws) < 0.3, -1)
    some = some.masked_fill(some < 0, 1 << 30).sort(dim=1).values
    some = some.masked_fill(some == 1 << 30, -1).to(device)
    choices = (None, Entries(pool, ratio, None), Entries(pool, ratio, some))
    return [rows.attend_latents(q, latents, entries, sinks, scale) for entries in choices]


def _latent_pages(case: Case, sizes: Sequence[int]) -> list[Tensor]:
    """[pages, P, size] each: what rows see, garbage elsewhere in their pages, NaN in others."""
    layout = case.layout
    pools = [torch.full((case.pages, layout.page_tokens, size), float("nan")) for size in sizes]
    for pool in pools:
        for table in layout.tables:
            pool[list(table)] = GARBAGE
        for row, first in enumerate(layout.first):
            for position in range(layout.visible_from[row], first + layout.length(row)):
                page, offset = divmod(position, layout.page_tokens)
                entry = torch.randn(pool.shape[-1], generator=case.draws)
                pool[layout.tables[row][page], offset] = entry
    return pools


def some_positions(case: Case, count: int, share: float) -> Tensor:
    """[T, count] of what each token sees so large a share, ascending, then -1."""
    layout = case.layout
    chosen = torch.full((case.tokens, count), -1)
    for row, first in enumerate(layout.first):
        for i in range(layout.length(row)):
            seen = torch.arange(layout.visible_from[row], first + i + 1)
            some = seen[torch.rand(len(seen), generator=case.draws) < share][:count]
            chosen[layout.starts[row] + i, : len(some)] = some
    return chosen


def only(pool: Tensor, case: Case, chosen: Tensor) -> Tensor:
    """The pool with NaN in the place of what nobody has chosen."""
    kept, layout = torch.full_like(pool, float("nan")), case.layout
    for row, table in enumerate(layout.tables):
        own = chosen[layout.starts[row] : layout.starts[row + 1]]
        for position in own[own >= 0].tolist():
            page, offset = divmod(position, layout.page_tokens)
            kept[table[page], offset] = pool[table[page], offset]
    return kept


def attend_chosen(backend: Backend, seed: int) -> Sequence[Tensor]:
    """All that is seen, much of it, little of it, nothing."""
    case, device, rng = case_of(seed), backend.device, random.Random(seed)
    turned_size = rng.choice((2, 8, 10, 64))
    pools = _latent_pages(case, (case.size, turned_size))
    q, scale = case.queries().to(device), case.size**-0.5
    turned = torch.randn(case.tokens, case.query_heads, turned_size, generator=case.draws)
    rows = backend.rows(case.layout)
    widths = ((rng.randint(1, 9), 0.1), (rng.randint(9, 99), 0.7), (rng.randint(1, 9), 0.0))
    everything = LatentPages(*(pool.to(device) for pool in pools))
    outputs = [rows.attend_chosen(q, turned.to(device), everything, None, scale)]
    for width in widths:
        chosen = some_positions(case, *width)
        keys = LatentPages(*(only(pool, case, chosen).to(device) for pool in pools))
        chosen = chosen.to(device)
        outputs.append(rows.attend_chosen(q, turned.to(device), keys, chosen, scale))
    return outputs


def streams(backend: Backend, seed: int) -> Sequence[Tensor]:
    rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    count, size, tokens = rng.randint(1, 5), rng.randint(1, 70), rng.choice((0, rng.randrange(40)))
    width, device = count * (count + 2), backend.device
    base, scale = torch.randn(width, generator=draws), torch.rand(3, generator=draws)
    norm, rounds = 1 + 0.2 * torch.randn(size, generator=draws), rng.randint(1, 20)
    gates = StreamGates(
        base.to(device), scale.to(device), count, rounds, 1e-6, norm.to(device), 1e-6
    )
    products = torch.randn(tokens, width, generator=draws).to(device)
    many = torch.randn(tokens, count, size, generator=draws).to(device)
    out = torch.randn(tokens, size, generator=draws).to(device)
    x, factors, mixing = backend.enter_streams(many, products, gates)
    made = backend.write_streams(many, out, factors, mixing)
    return x, factors, mixing, made, backend.read_streams(many, factors)


def routers(backend: Backend, seed: int) -> Sequence[Tensor]:
    """Some scores are tied, and some so far from 0 that softplus is 0 or the score.

    None is near -103, where softplus has a few bits at most.
    """
    rng, draws = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, count = rng.choice((0, rng.randrange(20))), rng.randint(1, 40)
    scores = torch.randint(-9, 9, (tokens, count), generator=draws) * rng.choice((0.3, 4.0, 30.0))
    bias = torch.randint(0, 3, (count,), generator=draws).float()
    scores, bias = scores.to(backend.device), bias.to(backend.device)
    choice = backend.choose_experts(scores, bias, rng.randint(1, count))
    return choice, backend.weigh_experts(scores, choice, 1.5)
