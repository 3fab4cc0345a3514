"""What requests keep, worked out in full: formulas of caches, and a memory plan that adds up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from surefoot.cli.show import bytes_text
from surefoot.state.plan import MemoryPlan
from surefoot.state.spec import CacheSpec, Paged, Part, Ring

TableRows = tuple[str, Sequence[str], Sequence[Sequence[object]]]


@dataclass(frozen=True)
class Kept:
    """What a request keeps in one cache: for each token if it is paged, else once.

    Attributes:
        cache: its name.
        reach: how many tokens share an entry, are seen, or make a block.
        formula: layers, numbers of an entry, and how many entries there are.
        numbers: what the formula gives.
        bytes: what these numbers take.
    """

    cache: str
    reach: str
    formula: str
    numbers: int | float
    bytes: int | float

    @staticmethod
    def of(spec: CacheSpec, draft_tokens: int) -> Kept:
        """In this cache, with drafts of up to `draft_tokens` tokens."""
        layers = "1 layer" if spec.layers == 1 else f"{spec.layers} layers"
        if isinstance(spec, Paged):
            share = "" if spec.ratio == 1 else f" / {spec.ratio} tokens"
            return Kept(
                cache=spec.name,
                reach=f"ratio {spec.ratio}",
                formula=f"{layers} x {_entry(spec.parts)}{share}",
                numbers=_exact(spec.layers * _numbers(spec.parts), spec.ratio),
                bytes=_exact(spec.page_bytes(spec.ratio), spec.ratio),
            )
        columns = spec.capacity(draft_tokens)
        parts = spec.parts if isinstance(spec, Ring) else spec.inputs
        state = () if isinstance(spec, Ring) else spec.state
        ring = f"{_entry(parts)} x {columns} columns"
        return Kept(
            cache=spec.name,
            reach=f"window {spec.window}" if isinstance(spec, Ring) else f"block {spec.block}",
            formula=f"{layers} x {f'({_entry(state)} + {ring})' if state else ring}",
            numbers=spec.layers * (_numbers(state) + _numbers(parts) * columns),
            bytes=spec.slot_bytes(draft_tokens),
        )

    def row(self) -> tuple[str, ...]:
        """For a table."""
        return self.cache, self.reach, self.formula, f"{self.numbers:,}", f"{self.bytes:,}"


@dataclass(frozen=True)
class Footprint:
    """What a model and its drafter keep of a request, and how the memory is divided.

    Attributes:
        own: caches of the model.
        more: caches of its drafter, or of several that may be used.
        plan: how the memory is divided.
        longest: tokens of the longest request.
        memory: bytes that were given for it, if any were.
    """

    own: Sequence[CacheSpec]
    more: Sequence[CacheSpec]
    plan: MemoryPlan
    longest: int
    memory: int | None

    def kept(self, paged: bool, own: bool = False) -> list[Kept]:
        """Of a token if `paged`, else of a request; in all caches, or in the model's own."""
        specs = self.own if own else [*self.own, *self.more]
        depth = self.plan.draft_tokens
        return [Kept.of(spec, depth) for spec in specs if isinstance(spec, Paged) is paged]

    def entry(self) -> dict[str, object]:
        """As JSON objects by name."""
        plan = self.plan
        return {
            "per_token": self._sums(paged=True),
            "per_request": self._sums(paged=False),
            "plan": {
                **{name: _priced(count, each) for name, count, each in self._shares()},
                "total_bytes": plan.total_bytes,
                "memory": self.memory,
            },
            "longest_request": {
                "tokens": self.longest,
                **{name: _priced(count, each) for name, count, each in self._one()},
                "total_bytes": _total(self._one()),
            },
        }

    def _sums(self, paged: bool) -> dict[str, object]:
        whole, own = self.kept(paged), self.kept(paged, own=True)
        sums = {"": whole, "own_": own}
        return {
            name + what: sum(getattr(kept, what) for kept in group)
            for name, group in sums.items()
            for what in ("numbers", "bytes")
        }

    def _shares(self) -> list[tuple[str, int, int]]:
        """Name, count and bytes each of all that the plan is made of."""
        plan = self.plan
        return [
            ("pages", plan.pages, plan.page_bytes),
            ("sink_page", 1, plan.page_bytes),
            ("slots", plan.slots, plan.slot_bytes),
            ("points", plan.points, plan.point_bytes),
            ("sink_slot", 1, plan.slot_bytes),
        ]

    def _one(self) -> list[tuple[str, int, int]]:
        """The same of one request of the greatest length."""
        plan = self.plan
        pages = -(-self.longest // plan.page_tokens)
        return [("pages", pages, plan.page_bytes), ("slots", 1, plan.slot_bytes)]

    def tables(self) -> list[TableRows]:
        """For people: title, heads and rows of each table."""
        heads, priced = ("reach", "keeps", "numbers", "bytes"), ("", "count", "bytes each", "bytes")
        plan = _priced_rows(self._shares())
        if self.memory is not None:
            plan.append(("memory", "", "", f"{self.memory:,}"))
        one = _priced_rows(self._one())
        kept = [
            (title, ("cache", *heads), self._kept_rows(paged))
            for title, paged in (("Kept of each token", True), ("Kept of each request", False))
            if self.kept(paged)
        ]
        return [
            *kept,
            (f"Memory, in pages of {self.plan.page_tokens} tokens", priced, plan),
            (f"One request of {self.longest:,} tokens", priced, one),
        ]

    def _kept_rows(self, paged: bool) -> list[tuple[str, ...]]:
        whole, own = self.kept(paged), self.kept(paged, own=True)
        rows = [kept.row() for kept in whole]
        if 0 < len(own) < len(whole):
            rows.append(_sum_row("the model's own", own))
        if len(whole) > 1:
            rows.append(_sum_row("all", whole))
        return rows


def layers_text(layers: Sequence[str]) -> str:
    """Layers for people, repeated ones once: "2 x window, 20 x (sparse, heavy), sparse"."""
    pieces, at = [], 0
    while at < len(layers):
        length, times = _longest_run(layers[at:])
        unit = layers[at : at + length]
        if length == 1:
            pieces.append(unit[0] if times == 1 else f"{times} x {unit[0]}")
        else:
            pieces.append(f"{times} x ({_runs(unit)})")
        at += length * times
    return ", ".join(pieces)


def _longest_run(layers: Sequence[str]) -> tuple[int, int]:
    """Length and count of the repeated unit at the beginning that covers most layers."""
    best = (1, 1)
    for length in range(1, len(layers) // 2 + 1):
        times = 1
        while layers[:length] == layers[times * length : (times + 1) * length]:
            times += 1
        if times > 1 and length * times > best[0] * best[1]:
            best = (length, times)
    return best


def _runs(layers: Iterable[str]) -> str:
    runs = [(kind, len(list(same))) for kind, same in groupby(layers)]
    return ", ".join(kind if count == 1 else f"{count} x {kind}" for kind, count in runs)


def _numbers(parts: Iterable[Part]) -> int:
    return sum(math.prod(part.shape) for part in parts)


def _entry(parts: Iterable[Part]) -> str:
    """The numbers of an entry, by type: "(512 + 128) bfloat16"."""
    groups = []
    for dtype, same in groupby(parts, key=lambda part: part.dtype):
        sizes = [" x ".join(map(str, part.shape)) for part in same]
        groups.append(f"{_joined(sizes)} {dtype}")
    return _joined(groups)


def _joined(terms: Sequence[str]) -> str:
    return terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"


def _exact(value: int, divisor: int) -> int | float:
    return value / divisor if value % divisor else value // divisor


def _sum_row(name: str, group: Sequence[Kept]) -> tuple[str, ...]:
    numbers, size = sum(kept.numbers for kept in group), sum(kept.bytes for kept in group)
    return name, "", "", f"{numbers:,}", f"{size:,}"


def _priced(count: int, each: int) -> dict[str, int]:
    return {"count": count, "bytes_each": each, "bytes": count * each}


def _priced_rows(shares: Sequence[tuple[str, int, int]]) -> list[tuple[str, ...]]:
    rows = [
        (name.replace("_", " "), f"{count:,}", f"{each:,}", f"{count * each:,}")
        for name, count, each in shares
    ]
    total = _total(shares)
    return [*rows, (f"all, {bytes_text(total)}", "", "", f"{total:,}")]


def _total(shares: Iterable[tuple[str, int, int]]) -> int:
    return sum(count * each for _, count, each in shares)
