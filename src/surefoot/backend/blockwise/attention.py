"""Attention over pages and rings in batched products, whose bits do not depend on the cut.

Scores and weighted values are computed page by page (one small product per page and head, all in
one batched call), and the pages' sums are added in a tree over absolute page numbers. The softmax
of a row adds its terms lane by lane, and the columns of a tile fill whole lanes, so masked ones
change nothing. Pages that a token does not see add exact zeros: neither the number of pages read
nor the other rows of the step can change a result. The products themselves keep a row's bits from
some least number of query rows on; `least_tile_width` measures it for the shape at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.backend.blockwise.block_plan import plan_delta
from surefoot.backend.blockwise.blocks import DeltaPlan, DeltaShape
from surefoot.backend.blockwise.conv import ConvPlan, plan_conv, run_conv
from surefoot.backend.blockwise.heads import placed
from surefoot.backend.blockwise.recurrent import delta_shape, run_delta
from surefoot.backend.blockwise.spans import Blocks, InOrder, Spanned
from surefoot.backend.blockwise.tiles import TILE_TOKENS, PageGroup, TileGroup, group_pages
from surefoot.backend.blockwise.window import RingShape, WindowGroup, group_windows
from surefoot.backend.operands import DeltaCaches, DeltaInputs, Placing, RowLayout
from surefoot.backend.plain_latents import PlainLatentRows

_ALIGNED = 4  # float32 in 16 bytes


@dataclass(frozen=True)
class ProductShape:
    """What decides which kernel a batched product takes.

    Attributes:
        key_heads: K.
        group: query heads per key head.
        size: D.
        page_tokens: P.
        scale: factor on the scores; kernels round it into the sum at different places.
    """

    key_heads: int
    group: int
    size: int
    page_tokens: int
    scale: float


def tree_sum(x: Tensor) -> Tensor:
    """Sum over axis 1 by pairs of neighbours; zeros at the end change nothing."""
    while x.shape[1] > 1:
        count = x.shape[1]
        pairs = x[:, 0 : count - 1 : 2] + x[:, 1:count:2]
        x = torch.cat((pairs, x[:, -1:]), dim=1) if count % 2 else pairs
    return x[:, 0]


def take_queries(q: Tensor, group: TileGroup, heads: int) -> Tensor:
    """Query rows by tile and key head: [tiles, K, G * width, D] from q [T, H, D]."""
    rows = q if group.queries is None else q.index_select(0, group.queries)
    size = q.shape[-1]
    if group.width == 1:
        return rows.reshape(group.tiles, heads, -1, size)
    rows = rows.view(group.tiles, group.width, heads, -1, size)
    return rows.permute(0, 2, 3, 1, 4).reshape(group.tiles, heads, -1, size)


def by_token(values: Tensor, group: TileGroup) -> Tensor:
    """[tiles, K, G * width, D] in the order of the group's tokens, repeats left out: [n, H, D]."""
    tiles, heads, _, size = values.shape
    if group.width > 1:
        values = values.view(tiles, heads, -1, group.width, size).permute(0, 3, 1, 2, 4)
    flat = values.reshape(tiles * group.width, -1, size)
    return flat if group.real is None else flat.index_select(0, group.real)


def gather_outputs(parts: list[tuple[TileGroup, Tensor]], like: Tensor) -> Tensor:
    """Outputs of all groups in the order of the step's tokens, shaped and typed like q."""
    if len(parts) == 1 and parts[0][0].whole:
        return by_token(parts[0][1], parts[0][0]).to(like.dtype)
    out = torch.empty_like(like)
    for group, values in parts:
        out.index_copy_(0, group.targets, by_token(values, group).to(like.dtype))
    return out


def spread_bias(bias: Tensor, shape: ProductShape, give: Tensor | None) -> Tensor:
    """A bias as it is added to the scores.

    Args:
        bias: [tiles, blocks, 1, 1, width, P].
        shape: of the products.
        give: the block that each page is, or None where pages come tile by tile.

    Returns:
        [pages * K, R, P].
    """
    tiles, blocks, _, _, width, columns = bias.shape
    wide = bias.expand(tiles, blocks, shape.key_heads, shape.group, width, columns).flatten(0, 1)
    by_page = wide if give is None else wide.index_select(0, give)
    return by_page.reshape(-1, shape.group * width, columns)


def dots(bias: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Bias + scale * q k^T, [n, R, P], by batched products of q [n, R, D] and k [n, P, D].

    Some libraries take another kernel for a row that does not begin at a multiple of 16 bytes
    (MKL on processors of another maker). So rows of another size are made up with zeros.
    """
    missing = -q.shape[-1] % _ALIGNED
    if missing:
        q, k = F.pad(q, (0, missing)), F.pad(k, (0, missing))
    return torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale)


def attend(q: Tensor, keys: Blocks, bias: Tensor, scale: float) -> Tensor:
    """Softmax attention by blocks of keys.

    Args:
        q: [tiles, K, R, D]; R = G * width.
        keys: the keys and values that the tiles read.
        bias: [pages * K, R, P], added to the scores of the pages as `keys` has them.
        scale: factor on the scores.

    Returns:
        [tiles, K, R, D].
    """
    tiles, heads, rows, size = q.shape
    blocks = keys.blocks
    by_page = dots(bias, keys.spread(q), keys.k, scale)
    scores = keys.scores(by_page, heads)
    if blocks == 1:
        weights = torch.softmax(scores, -1)
    else:
        joint = scores.view(tiles, blocks, heads, rows, -1).permute(0, 2, 3, 1, 4)
        wide = torch.softmax(joint.reshape(tiles, heads, rows, -1), -1)
        by_block = wide.view(tiles, heads, rows, blocks, -1).permute(0, 3, 1, 2, 4)
        weights = by_block.reshape(tiles * blocks, heads, rows, -1)
    values = keys.sums(torch.bmm(keys.to_pages(weights), keys.v), heads)
    return tree_sum(values.view(tiles, blocks, heads, rows, size))


@dataclass(frozen=True)
class Widths:
    """How wide tiles must at least be.

    Attributes:
        attention: tokens per tile of attention, for a shape.
        delta: new positions per tile of the gated delta rule, for a shape.
    """

    attention: Callable[[ProductShape], int]
    delta: Callable[[DeltaShape], int]


class BlockwiseRows(PlainLatentRows):
    """Cache writes and row operators of one step; index tensors are built at their first use."""

    def __init__(self, layout: RowLayout, widths: Widths, device: torch.device) -> None:
        """Prepare the step `layout` with tiles of at least these widths."""
        super().__init__(layout)
        self._device = device
        self._widths = widths
        self._groups: dict[ProductShape, list[tuple[PageGroup, Tensor]]] = {}
        self._windows: dict[tuple[ProductShape, RingShape], list[tuple[WindowGroup, Tensor]]] = {}
        self._columns: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._flat: dict[int, Tensor] = {}
        self._convs: dict[tuple[int, int], ConvPlan] = {}
        self._deltas: dict[DeltaShape, DeltaPlan] = {}
        self._pages, self._offsets = (index.to(device) for index in _addresses(layout))

    def paged_write(self, pool: Tensor, entries: Tensor) -> None:
        """See RowOperators."""
        self._check(entries)
        heads = pool.shape[1] if pool.dim() == 4 else 1
        if heads not in self._flat:
            rows = self._pages[:, None] * heads + torch.arange(heads, device=self._device)
            flat = rows * self.layout.page_tokens + self._offsets[:, None]
            self._flat[heads] = flat.flatten()
        size = pool.shape[-1]
        pool.view(-1, size).index_copy_(0, self._flat[heads], entries.reshape(-1, size))

    def paged_attention(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float) -> Tensor:
        """See RowOperators."""
        self._check(q)
        heads = k_pool.shape[1]
        wide = q.float()
        parts = []
        for group, bias in self._page_groups(self._shape(q, heads, scale)):
            tiles = take_queries(wide, group.queries, heads)
            keys = read_pages(k_pool, v_pool, group)
            parts.append((group.queries, attend(tiles, keys, bias, scale)))
        return gather_outputs(parts, q)

    def attend_pages(
        self,
        q_and_k: Tensor,
        v: Tensor,
        placing: Placing,
        pools: tuple[Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        """See RowOperators."""
        heads = q_and_k.shape[1] - v.shape[1]
        q, k = placed(q_and_k, placing).split((heads, v.shape[1]), dim=1)
        self.paged_write(pools[0], k)
        self.paged_write(pools[1], v)
        return self.paged_attention(q, *pools, scale)

    def ring_write(self, ring: Tensor, entries: Tensor) -> None:
        """See RowOperators."""
        self._check(entries)
        capacity = ring.shape[1]
        if capacity not in self._columns:
            addresses = _ring_addresses(self.layout, capacity)
            self._columns[capacity] = (
                addresses[0].to(self._device),
                addresses[1].to(self._device),
                addresses[2].to(self._device),
            )
        slots, columns, tokens = self._columns[capacity]
        ring[slots, columns] = entries.index_select(0, tokens)

    def window_attention(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        rings: tuple[Tensor, Tensor],
        window: int,
        scale: float,
    ) -> Tensor:
        """See RowOperators."""
        self._check(q)
        heads, capacity = rings[0].shape[2], rings[0].shape[1]
        wide = q.float()
        parts = []
        shape = self._shape(q, heads, scale)
        for group, bias in self._window_groups(shape, RingShape(window, capacity)):
            k, v = (group.gather(ring, own) for ring, own in zip(rings, kv, strict=True))
            tiles = take_queries(wide, group.queries, heads)
            keys = InOrder(k, v, group.bias.shape[1])
            parts.append((group.queries, attend(tiles, keys, bias, scale)))
        return gather_outputs(parts, q)

    def causal_conv(self, x: Tensor, ring: Tensor, weight: Tensor) -> Tensor:
        """See RowOperators."""
        self._check(x)
        key = (weight.shape[1], ring.shape[1])
        if key not in self._convs:
            self._convs[key] = plan_conv(self.layout, *key, self._device)
        return run_conv(self._convs[key], x, ring, weight)

    def delta_rule(self, inputs: DeltaInputs, caches: DeltaCaches) -> Tensor:
        """See RowOperators."""
        self._check(inputs.q)
        shape = delta_shape(caches)
        if shape not in self._deltas:
            width = self._widths.delta(shape)
            self._deltas[shape] = plan_delta(self.layout, shape, width, self._device)
        return run_delta(self._deltas[shape], inputs, caches)

    def _check(self, per_token: Tensor) -> None:
        count, planned = per_token.shape[0], self.layout.starts[-1]
        assert count == planned, f"{count} tokens came, the layout was made for {planned}"

    def _shape(self, q: Tensor, heads: int, scale: float) -> ProductShape:
        return ProductShape(heads, q.shape[1] // heads, q.shape[2], self.layout.page_tokens, scale)

    def _page_groups(self, shape: ProductShape) -> list[tuple[PageGroup, Tensor]]:
        if shape not in self._groups:
            groups = group_pages(self.layout, self._widths.attention(shape), self._device)
            self._groups[shape] = [
                (group, spread_bias(group.bias, shape, group.span.give if group.span else None))
                for group in groups
            ]
        return self._groups[shape]

    def _window_groups(
        self, shape: ProductShape, ring: RingShape
    ) -> list[tuple[WindowGroup, Tensor]]:
        key = (shape, ring)
        if key not in self._windows:
            groups = group_windows(self.layout, self._widths.attention(shape), ring, self._device)
            self._windows[key] = [(group, spread_bias(group.bias, shape, None)) for group in groups]
        return self._windows[key]


def read_pages(k_pool: Tensor, v_pool: Tensor, group: PageGroup) -> Blocks:
    """The keys and values of a group, in place where its pages lie together."""
    if group.span is not None:
        stretch = slice(group.span.first, group.span.first + group.span.count)
        k, v = (_flat(pool[stretch]) for pool in (k_pool, v_pool))
        return Spanned(k, v, group.count, group.span)
    if group.run >= 0:
        stretch = slice(group.run, group.run + len(group.pages))
        k, v = (_flat(pool[stretch]) for pool in (k_pool, v_pool))
    else:
        k, v = (_flat(pool.index_select(0, group.pages)) for pool in (k_pool, v_pool))
    return InOrder(k, v, group.count)


def _flat(pages: Tensor) -> Tensor:
    return pages.view(-1, *pages.shape[2:]).float()


def _addresses(layout: RowLayout) -> tuple[Tensor, Tensor]:
    """Page id and offset of every token of the step."""
    size = layout.page_tokens
    pages: list[int] = []
    offsets: list[int] = []
    for row, first in enumerate(layout.first):
        table = layout.tables[row]
        for position in range(first, first + layout.length(row)):
            page, offset = divmod(position, size)
            pages.append(table[page])
            offsets.append(offset)
    return torch.tensor(pages, dtype=torch.long), torch.tensor(offsets, dtype=torch.long)


def _ring_addresses(layout: RowLayout, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slot, column and step index of the entries that stay in a ring of this capacity."""
    addresses: list[Sequence[int]] = []
    for row, first in enumerate(layout.first):
        length, slot = layout.length(row), layout.slots[row]
        kept = range(max(0, length - capacity), length)
        addresses.extend((slot, (first + i) % capacity, layout.starts[row] + i) for i in kept)
    slots, columns, tokens = torch.tensor(addresses, dtype=torch.long).view(-1, 3).unbind(1)
    return slots, columns, tokens


def least_tile_width(shape: ProductShape) -> int:
    """Fewest tokens per tile from which batched products keep a row's bits at this shape.

    Compares tiles of every width with full ones of TILE_TOKENS, for both products of attention.
    At worst every tile has to be full, and then all rows go through one product of one size.
    """
    generator = torch.Generator().manual_seed(shape.size)
    batch, rows = 2 * shape.key_heads, TILE_TOKENS * shape.group
    q = torch.randn(batch, rows, shape.size, generator=generator)
    pages = torch.randn(batch, shape.page_tokens, shape.size, generator=generator)
    weights = torch.rand(batch, rows, shape.page_tokens, generator=generator)

    def scores(left: Tensor, right: Tensor) -> Tensor:
        return dots(left.new_zeros(*left.shape[:2], right.shape[1]), left, right, shape.scale)

    least = 1
    for width in range(1, TILE_TOKENS):
        count = width * shape.group
        if not (_agree(scores, q, pages, count) and _agree(torch.bmm, weights, pages, count)):
            least = width + 1
    return least


def _agree(
    product: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor, count: int
) -> bool:
    """Whether `count` rows, taken from either end, come out as they do among all rows."""
    whole = product(left, right)
    for rows in (slice(0, count), slice(left.shape[1] - count, left.shape[1])):
        part = left[:, rows].contiguous()
        alone = product(part[:1], right[:1])
        if not torch.equal(product(part, right), whole[:, rows]):
            return False
        if not torch.equal(alone, whole[:1, rows]):
            return False
    return True
