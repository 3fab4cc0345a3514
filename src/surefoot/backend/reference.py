"""The readable truth: every operator in the plainest form, one row at a time.

Other backends are tested against this one; it is not meant to be fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from surefoot.backend.protocol import Capabilities, Linear, RowLayout, RowOperators


@dataclass(frozen=True)
class ReferenceLinear:
    """y = x W^T + b, each token on its own, so that no token sees how many others there are."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, inputs] to [T, outputs]."""
        y = x.new_empty(x.shape[0], self.weight.shape[0])
        for token in range(x.shape[0]):
            y[token] = torch.mv(self.weight, x[token])
        return y if self.bias is None else y + self.bias

    def add(self, x: Tensor, stream: Tensor) -> Tensor:
        """See Linear."""
        return stream + self(x)


@dataclass(frozen=True)
class ReferenceRows:
    """Operators of one step, written as loops over rows and tokens."""

    layout: RowLayout

    def paged_write(self, pool: Tensor, entries: Tensor) -> None:
        """See RowOperators."""
        for row, token, position in self._tokens():
            page, offset = divmod(position, self.layout.page_tokens)
            pool[self.layout.tables[row][page]].select(-2, offset).copy_(entries[token])

    def paged_attention(self, q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float) -> Tensor:
        """See RowOperators."""
        out = torch.empty_like(q)
        for row, token, position in self._tokens():
            start = self.layout.visible_from[row]
            k = self._history(k_pool, row, start, position + 1)
            v = self._history(v_pool, row, start, position + 1)
            out[token] = _attend(q[token], k, v, scale)
        return out

    def ring_write(self, ring: Tensor, entries: Tensor) -> None:
        """See RowOperators."""
        capacity = ring.shape[1]
        for row, token, position in self._tokens():
            last = self.layout.first[row] + self.layout.length(row) - 1
            if position > last - capacity:
                ring[self.layout.slots[row], position % capacity] = entries[token]

    def window_attention(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        rings: tuple[Tensor, Tensor],
        window: int,
        scale: float,
    ) -> Tensor:
        """See RowOperators."""
        out = torch.empty_like(q)
        for row, token, position in self._tokens():
            start = max(0, position - window + 1, self.layout.visible_from[row])
            k, v = (
                self._window(own, ring, row, start, position + 1)
                for own, ring in zip(kv, rings, strict=True)
            )
            out[token] = _attend(q[token], k, v, scale)
        return out

    def _tokens(self) -> list[tuple[int, int, int]]:
        """(row, index in the step, absolute position) of every token."""
        layout = self.layout
        return [
            (row, layout.starts[row] + i, layout.first[row] + i)
            for row in range(len(layout.first))
            for i in range(layout.length(row))
        ]

    def _history(self, pool: Tensor, row: int, start: int, stop: int) -> Tensor:
        """Entries of positions [start, stop) of one row: [stop - start, K, D]."""
        pages, table = self.layout.page_tokens, self.layout.tables[row]
        entries = [pool[table[p // pages]].select(-2, p % pages) for p in range(start, stop)]
        return torch.stack(entries)

    def _window(self, own: Tensor, ring: Tensor, row: int, start: int, stop: int) -> Tensor:
        first, capacity = self.layout.first[row], ring.shape[1]
        slot = self.layout.slots[row]
        before = [ring[slot, p % capacity] for p in range(start, min(stop, first))]
        base = self.layout.starts[row] - first
        return torch.stack(before + [own[base + p] for p in range(max(start, first), stop)])


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Softmax attention of one token: q [H, D] over k, v [S, K, D]; returns [H, D]."""
    group = q.shape[0] // k.shape[1]
    k = k.float().repeat_interleave(group, dim=1)
    v = v.float().repeat_interleave(group, dim=1)
    scores = (q.float()[None] * k).sum(-1) * scale
    weights = torch.softmax(scores, dim=0)
    return (weights[..., None] * v).sum(0).to(q.dtype)


class ReferenceBackend:
    """All operators in float32 on the CPU."""

    def __init__(self) -> None:
        """Take no settings: there is one way to be plain."""
        self.capabilities = Capabilities(
            name="reference",
            bitwise=True,
            dtypes=("float32",),
            page_tokens=16,
            max_draft_tokens=64,
            capture=False,
        )
        self.device = torch.device("cpu")

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """See Backend."""
        return ReferenceLinear(weight.float(), None if bias is None else bias.float())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """See Backend."""
        both = self.pack_linear(weight, bias)

        def gated(x: Tensor) -> Tensor:
            gate, up = both(x).chunk(2, dim=-1)
            return gate / (1 + torch.exp(-gate)) * up

        return gated

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See Backend."""
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((second, first), dim=-1) * sin

    def free_memory(self) -> int:
        """See Backend."""
        return int(psutil.virtual_memory().available)

    def rows(self, layout: RowLayout) -> RowOperators:
        """See Backend."""
        return ReferenceRows(layout)
