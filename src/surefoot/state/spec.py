"""What a model declares about its caches: three kinds, each addressed by position.

    kind        grows        address of position p
    Paged       with length  page table[p // P], offset (p % P) // ratio, when (p + 1) % ratio == 0
    Ring        no           row slot, column p % capacity
    Recurrent   no           row slot: a checkpoint at `base`, and a ring of what followed

Plain data: no tensors here, so a memory plan can be made and tested without a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class Part:
    """One tensor of a cache entry, for instance the keys of one position.

    Attributes:
        name: "k", "v", "conv", ...
        shape: per entry, e.g. (kv_heads, head_dim).
        dtype: a key of DTYPE_BYTES.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Size of one entry of one layer."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def _entry_bytes(layers: int, parts: tuple[Part, ...]) -> int:
    return layers * sum(part.bytes for part in parts)


@dataclass(frozen=True)
class Paged:
    """Entries that accumulate with length; `ratio` tokens share one entry.

    Attributes:
        name: unique within the engine, e.g. "kv" or "draft.kv".
        layers: how many layers keep such a cache.
        parts: the tensors of an entry.
        ratio: tokens per entry; the page size must be a multiple of it.
    """

    name: str
    layers: int
    parts: tuple[Part, ...]
    ratio: int = 1

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes of one page over all layers; `page_tokens` is P."""
        return _entry_bytes(self.layers, self.parts) * (page_tokens // self.ratio)


@dataclass(frozen=True)
class Held:
    """What resume points hold of a ring.

    Attributes:
        columns: how many positions before the end of a page, at most the window.
        spans: by part, what of the last axis; of a part that is not named all of it.
    """

    columns: int
    spans: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def spans_of(self, part: Part) -> tuple[tuple[int, int], ...]:
        """What is held of the last axis of a part."""
        return self.spans.get(part.name, ((0, part.shape[-1]),))


@dataclass(frozen=True)
class Ring:
    """The last `window` positions, kept in columns p % capacity of the request's slot row.

    Attributes:
        name: unique within the engine.
        layers: how many layers keep such a cache.
        parts: the tensors of an entry.
        window: positions that are kept.
        held: None if the ring is in no resume point. It is not cleared for a new request then
            either: whoever reads it knows what it has written.
    """

    name: str
    layers: int
    parts: tuple[Part, ...]
    window: int
    held: Held | None

    def capacity(self, draft_tokens: int) -> int:
        """Columns that keep the window intact under drafts of up to `draft_tokens` tokens.

        A verify row writes positions up to computed + draft_tokens; the next row, after all of
        them were rejected, starts at computed + 1 and still reads back `window` positions.
        """
        return self.window + draft_tokens + 1

    @property
    def point_bytes(self) -> int:
        """Bytes of a resume point over all layers, whatever the depth of drafts."""
        held = self.held
        if held is None:
            return 0
        spans = [(part, span) for part in self.parts for span in held.spans_of(part)]
        entry = sum(part.bytes // part.shape[-1] * (stop - start) for part, (start, stop) in spans)
        return self.layers * entry * held.columns

    @property
    def window_bytes(self) -> int:
        """Bytes of the window alone over all layers."""
        return _entry_bytes(self.layers, self.parts) * self.window

    def slot_bytes(self, draft_tokens: int) -> int:
        """Bytes of one slot row over all layers."""
        return _entry_bytes(self.layers, self.parts) * self.capacity(draft_tokens)


@dataclass(frozen=True)
class Recurrent:
    """A checkpoint at the last multiple of `block`, and the inputs that followed it.

    A page ends with a block, so a resume point holds the checkpoint and no inputs.
    """

    name: str
    layers: int
    state: tuple[Part, ...]
    inputs: tuple[Part, ...]
    block: int

    def capacity(self, draft_tokens: int) -> int:
        """Columns of the input ring."""
        return self.block + draft_tokens

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint over all layers, whatever the depth of drafts."""
        return _entry_bytes(self.layers, self.state)

    @property
    def point_bytes(self) -> int:
        """Bytes of a resume point over all layers."""
        return self.checkpoint_bytes

    def ring_bytes(self, draft_tokens: int) -> int:
        """Bytes of one input ring over all layers."""
        return _entry_bytes(self.layers, self.inputs) * self.capacity(draft_tokens)

    def slot_bytes(self, draft_tokens: int) -> int:
        """Bytes of one slot row over all layers: checkpoint and input ring."""
        return self.checkpoint_bytes + self.ring_bytes(draft_tokens)


CacheSpec = Paged | Ring | Recurrent


def page_unit(specs: Sequence[CacheSpec]) -> int:
    """What the page size must be a multiple of: every ratio and every block."""
    return math.lcm(
        *(spec.ratio for spec in specs if isinstance(spec, Paged)),
        *(spec.block for spec in specs if isinstance(spec, Recurrent)),
    )


def in_points(spec: CacheSpec) -> bool:
    """Whether resume points hold the cache, so that a model with it can resume only there."""
    return spec.held is not None if isinstance(spec, Ring) else isinstance(spec, Recurrent)


def recurrent_block(specs: Iterable[CacheSpec]) -> int:
    """The block at whose multiples the checkpoints of a model stand; 0 if it has none."""
    blocks = {spec.block for spec in specs if isinstance(spec, Recurrent)}
    assert len(blocks) <= 1, f"the recurrent caches of a model have blocks {sorted(blocks)}"
    return max(blocks, default=0)
