"""The gated delta rule block by block, from a checkpoint that stands at a block's start.

With S0 the state at the start of a block, G the sums of the decays inside it and R the errors:

    N = beta (k k^T) exp(G_i - G_j), below the diagonal
    P = (q k^T) exp(G_i - G_j), up to the diagonal
    R = beta (v - exp(G) k S0)
    U = (I + N)^-1 R
    outputs = exp(G) q S0 + P U
    next state = exp(G_last) S0 + (k exp(G_last - G))^T U

(section 3 of arXiv 2412.06464, written out in full). A new position needs its own rows of P only:
its output is W R with W = P (I + N)^-1, a triangular solve from the right. R is kept in the ring,
so old positions never read the state again, and U is needed only where a block is complete.

Blocks lie at absolute positions and a row of a product does not depend on how many rows there are,
so a token's bits do not depend on the cut. The repeats that fill a tile meet factors of exact zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.backend.blockwise.blocks import (
    CHECKPOINT,
    BlockGroup,
    Columns,
    DeltaPlan,
    DeltaShape,
    Part,
    Run,
)
from surefoot.backend.operands import DeltaCaches, DeltaInputs


def delta_shape(caches: DeltaCaches) -> DeltaShape:
    """The sizes of a layer's caches."""
    _, value_heads, key_size, value_size = caches.state.shape
    _, capacity, key_heads, _ = caches.k.shape
    return DeltaShape(key_heads, value_heads, key_size, value_size, caches.block, capacity)


@dataclass(frozen=True)
class Advance:
    """How states move over their blocks, whatever the states are.

    Attributes:
        inverse: [n * Hv, B, B], (I + N)^-1.
        keys: [n * Hv, B, dk], k exp(G_last - G).
        fade: [n, Hv, 1, 1], exp(G_last).
    """

    inverse: Tensor
    keys: Tensor
    fade: Tensor

    def select(self, tiles: slice) -> Advance:
        """The same of some of the n tiles."""
        heads = self.fade.shape[1]
        here = slice(tiles.start * heads, tiles.stop * heads)
        return Advance(self.inverse[here], self.keys[here], self.fade[tiles])


@dataclass(frozen=True)
class Prepared:
    """What a group of tiles is before any state is known.

    Attributes:
        reads: [tiles, Hv, 2 m, dk], the rows q and k of new positions that read the state.
        mix: [tiles * Hv, at least 2, B], W.
        growth: [tiles, Hv, 2 m, 1], exp(G) of the rows that read.
        v: [tiles, Hv, m, dv].
        beta: [tiles, Hv, m, 1].
        advance: of the moving tiles, or None if none moves.
    """

    reads: Tensor
    mix: Tensor
    growth: Tensor
    v: Tensor
    beta: Tensor
    advance: Advance | None

    def of(self, part: Part) -> Prepared:
        """The same of a part's tiles."""
        if part.whole:
            return self
        tiles, heads = part.tiles, self.reads.shape[1]
        return Prepared(
            reads=self.reads[tiles],
            mix=self.mix[tiles.start * heads : tiles.stop * heads],
            growth=self.growth[tiles],
            v=self.v[tiles],
            beta=self.beta[tiles],
            advance=self.advance,
        )


def run_delta(plan: DeltaPlan, inputs: DeltaInputs, caches: DeltaCaches) -> Tensor:
    """Compute a step; see RowOperators.delta_rule."""
    _write_inputs(plan.before, inputs, caches)
    prepared = [_prepare(group, plan.shape, inputs, caches) for group in plan.groups]
    outputs: list[list[Tensor]] = [[] for _ in plan.groups]
    errors: list[list[Tensor]] = [[] for _ in plan.groups]
    states = States(caches.state)
    for part in plan.parts:
        ready, group = prepared[part.group].of(part), plan.groups[part.group]
        seen = states.read(ready.reads, part.entering).mul_(ready.growth)
        out, own = seen[:, :, : group.width], seen[:, :, group.width :]
        torch.sub(ready.v, own, out=own).mul_(ready.beta)
        block_errors = _block_errors(part, group, own, caches)
        mixed = torch.bmm(ready.mix, block_errors)[:, : group.width]
        outputs[part.group].append(out.add_(mixed.view(out.shape)))
        errors[part.group].append(own)
        if ready.advance is not None and part.leaving:
            _move(part, ready.advance, block_errors, states)
    for group, found in zip(plan.groups, errors, strict=True):
        if group.kept is not None:
            _write(caches.value, _by_token(torch.cat(found)), group.kept)
    _write_inputs(plan.after, inputs, caches)
    return _in_order(plan, outputs, inputs.v)


class States:
    """The checkpoints, and scratch tensors of states that drafted tokens have moved."""

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool
        self._scratch: list[Tensor] = []

    def _take(self, run: Run) -> Tensor:
        """[count, Hv, dk, dv], in place."""
        source = self._pool if run.source == CHECKPOINT else self._scratch[run.source]
        return source[run.first : run.first + run.count]

    def read(self, rows: Tensor, runs: tuple[Run, ...]) -> Tensor:
        """Rows [n, Hv, M, dk] times the states of these runs, none of which is copied."""
        tiles, heads, count, size = rows.shape
        flat = rows.reshape(tiles * heads, count, size)
        if len(runs) == 1:
            product = torch.bmm(flat, self._take(runs[0]).flatten(0, 1))
        else:
            product = flat.new_empty(tiles * heads, count, self._pool.shape[-1])
            for run in runs:
                here = slice(run.at * heads, (run.at + run.count) * heads)
                torch.bmm(flat[here], self._take(run).flatten(0, 1), out=product[here])
        return product.view(tiles, heads, count, -1)

    def move(self, run: Run, advance: Advance, written: Tensor) -> None:
        """Fade the states of a run and add what their blocks write.

        Args:
            run: which, and whether they are moved where they are.
            advance: of these states.
            written: [count * Hv, B, dv], U.
        """
        before = self._take(run)
        if run.settles:
            after = before.mul_(advance.fade)
        else:
            after = before * advance.fade
            self._scratch.append(after)
        after.flatten(0, 1).baddbmm_(advance.keys.transpose(1, 2), written)


def _prepare(
    group: BlockGroup, shape: DeltaShape, inputs: DeltaInputs, caches: DeltaCaches
) -> Prepared:
    block, tiles = shape.block, group.tiles
    source = caches if group.in_ring else inputs
    k = by_tile(source.k.reshape(-1, *source.k.shape[-2:]), group.inputs, tiles)
    decay, beta = (
        numbers.reshape(-1).index_select(0, group.gates).view(tiles, shape.value_heads, block)
        for numbers in (source.decay, source.beta)
    )
    q_new, k_new, v_new = (by_tile(x, group.new, tiles) for x in (inputs.q, inputs.k, inputs.v))
    rows = torch.cat((k, q_new, k_new), 2)
    sums = decay.cumsum(-1)
    begins = sums.flatten().index_select(0, group.starts).view(tiles, shape.value_heads, -1)
    pairs = faded_products(rows, begins[:, :, : block + group.width], sums, group.bias)
    n = pairs[:, :, :block].mul_(beta.unsqueeze(-1))
    return Prepared(
        reads=_spread(rows[:, :, block:], shape.value_heads),
        mix=solve_mix(n.flatten(0, 1), pairs[:, :, block:].flatten(0, 1)),
        growth=begins[:, :, block:].exp().unsqueeze(-1),
        v=v_new,
        beta=by_tile(inputs.beta.unsqueeze(-1), group.new, tiles),
        advance=make_advance(n, rows[:, :, :block], sums, group.moving) if group.moves else None,
    )


def faded_products(rows: Tensor, begins: Tensor, sums: Tensor, bias: Tensor) -> Tensor:
    """Products of rows and keys, faded from key to row.

    Args:
        rows: [tiles, Hk, at least M, dk]; the first B of them are the keys.
        begins: [tiles, Hv, M] sums of decays up to each row.
        sums: [tiles, Hv, B] the same for the keys.
        bias: [tiles or 1, 1, M, B] 0 where a row sees a key and -inf elsewhere.

    Returns:
        [tiles, Hv, M, B].
    """
    tiles, heads = rows.shape[:2]
    count, block = begins.shape[-1], sums.shape[-1]
    flat = rows.flatten(0, 1)
    dots = torch.bmm(flat, flat[:, :block].transpose(1, 2))[:, :count]
    fade = torch.sub(begins.unsqueeze(-1), sums.unsqueeze(-2)).add_(bias).exp_()
    by_key_head = fade.view(tiles, heads, -1, count, block)
    return by_key_head.mul_(dots.view(tiles, heads, 1, count, block)).view(fade.shape)


def solve_mix(n: Tensor, p: Tensor) -> Tensor:
    """P (I + N)^-1, with at least two rows: the kernels for one row add up in another order.

    Some libraries also take another kernel for matrices that lie apart in memory.
    """
    if p.shape[1] == 1:
        p = torch.cat((p, p), 1)
    n, p = n.contiguous(), p.contiguous()
    mix: Tensor = torch.linalg.solve_triangular(n, p, upper=False, left=False, unitriangular=True)
    return mix


def make_advance(n: Tensor, k: Tensor, sums: Tensor, moving: Tensor | None) -> Advance:
    """Of the `moving` tiles of n [tiles, Hv, B, B], k [tiles, Hk, B, dk], sums [tiles, Hv, B]."""
    if moving is not None:
        n, k, sums = (x.index_select(0, moving) for x in (n, k, sums))
    tiles, heads, block = sums.shape
    one = torch.eye(block, device=n.device).expand(tiles * heads, -1, -1)
    last = sums[..., -1:]
    left = torch.sub(last, sums).exp_().view(tiles, k.shape[1], -1, block, 1)
    return Advance(
        inverse=torch.linalg.solve_triangular(
            n.flatten(0, 1).contiguous(), one, upper=False, unitriangular=True
        ),
        keys=(k.unsqueeze(2) * left).view(tiles * heads, block, -1),
        fade=last.exp().unsqueeze(-1),
    )


def _move(part: Part, advance: Advance, errors: Tensor, states: States) -> None:
    """Move states over the blocks of a part; `errors` [tiles * Hv, B, dv] are of all its tiles."""
    heads = advance.fade.shape[1]
    if part.chosen is not None:
        errors = errors.unflatten(0, (-1, heads)).index_select(0, part.chosen).flatten(0, 1)
    written = torch.bmm(advance.select(part.moving).inverse, errors)
    for run in part.leaving:
        here = slice(part.moving.start + run.at, part.moving.start + run.at + run.count)
        theirs = written[run.at * heads : (run.at + run.count) * heads]
        states.move(run, advance.select(here), theirs)


def _block_errors(part: Part, group: BlockGroup, new: Tensor, caches: DeltaCaches) -> Tensor:
    """Errors of whole blocks, [tiles * Hv, B, dv], of which the `new` ones go to the ring."""
    if not group.in_ring:
        return new.flatten(0, 1)
    _write(caches.value, _by_token(new), part.written)
    tiles, heads, _, size = new.shape
    index = group.gates
    if not part.whole:
        per_tile = len(index) // group.tiles
        index = index[part.tiles.start * per_tile : part.tiles.stop * per_tile]
    return caches.value.view(-1, size).index_select(0, index).view(tiles * heads, -1, size)


def _in_order(plan: DeltaPlan, outputs: list[list[Tensor]], like: Tensor) -> Tensor:
    """Outputs of all tiles in the order of the step's tokens: [T, Hv, dv]."""
    found = [
        (group, _pick(_by_token(parts[0] if len(parts) == 1 else torch.cat(parts)), group.real))
        for group, parts in zip(plan.groups, outputs, strict=True)
    ]
    if len(found) == 1 and found[0][0].targets is None:
        return found[0][1]
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    for group, values in found:
        if group.targets is None:
            out.copy_(values)
        else:
            out.index_copy_(0, group.targets, values)
    return out


def _pick(x: Tensor, entries: Tensor | None) -> Tensor:
    return x if entries is None else x.index_select(0, entries)


def by_tile(x: Tensor, entries: Tensor | None, tiles: int) -> Tensor:
    """Entries of x [entries, heads, size] by tile and head: [tiles, heads, n, size]."""
    picked = _pick(x, entries)
    if len(picked) == tiles:
        return picked.unsqueeze(2)
    return picked.view(tiles, -1, *picked.shape[1:]).transpose(1, 2)


def _by_token(x: Tensor) -> Tensor:
    """[tiles, heads, n, size] as [tiles * n, heads, size]."""
    return x.transpose(1, 2).flatten(0, 1)


def _spread(rows: Tensor, value_heads: int) -> Tensor:
    """[tiles, Hk, M, dk] for each value head: [tiles, Hv, M, dk]."""
    ratio = value_heads // rows.shape[1]
    if ratio == 1:
        return rows
    return rows.unsqueeze(2).expand(-1, -1, ratio, -1, -1).flatten(1, 2)


def _write(ring: Tensor, entries: Tensor, places: Columns | None) -> None:
    """Put entries [n, *shape] into a ring [slots, capacity, *shape]."""
    if places is not None:
        flat = ring.view(-1, *ring.shape[2:])
        flat.index_copy_(0, places.columns, _pick(entries, places.entries))


def _write_inputs(places: Columns | None, inputs: DeltaInputs, caches: DeltaCaches) -> None:
    if places is None:
        return
    _write(caches.k, inputs.k, places)
    _write(caches.decay, inputs.decay, places)
    _write(caches.beta, inputs.beta, places)


def least_new_width(shape: DeltaShape) -> int:
    """Fewest new positions of a tile from which every product keeps a row's bits at this shape.

    Compares tiles of every width with full ones. At worst every tile has to be full, and then all
    rows go through products of one size.
    """
    block, draws = shape.block, torch.Generator().manual_seed(shape.key_size)
    batch = 2 * shape.key_heads
    state = torch.randn(batch, shape.key_size, shape.value_size, generator=draws)
    keys = torch.randn(batch, block, shape.key_size, generator=draws)
    new = torch.randn(batch, 2 * block, shape.key_size, generator=draws)
    errors = torch.randn(batch, block, shape.value_size, generator=draws)
    n = (torch.randn(batch, block, block, generator=draws) / 4).tril_(-1)

    def dots(rows: Tensor) -> Tensor:
        every = torch.cat((keys, rows, rows), 1)
        return torch.bmm(every, keys.transpose(1, 2))[:, : block + rows.shape[1]]

    def outputs(p: Tensor) -> Tensor:
        return torch.bmm(solve_mix(n, p), errors)[:, : p.shape[1]]

    lower = torch.randn(batch, block, block, generator=draws).tril_()
    least = 1
    for width in range(1, block):
        agrees = (
            _agree(lambda rows: torch.bmm(rows, state), new, 2 * width, 0)
            and _agree(dots, new[:, :block], width, block)
            and _agree(outputs, lower, width, 0)
        )
        if not agrees:
            least = width + 1
    return least


def _agree(product: Callable[[Tensor], Tensor], rows: Tensor, count: int, before: int) -> bool:
    """Whether `count` rows, from either end, come out as among all; `before` others precede."""
    whole = product(rows)
    for start in (0, rows.shape[1] - count):
        alone = product(rows[:, start : start + count].contiguous())
        if not torch.equal(alone[:, :before], whole[:, :before]):
            return False
        if not torch.equal(alone[:, before:], whole[:, before + start : before + start + count]):
            return False
    return True
