"""From bytes to pages, slots and resume points: the memory plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from surefoot.errors import MemoryPlanError, SettingError
from surefoot.state.spec import CacheSpec, Paged, Recurrent, Ring, in_points, page_unit

_POINTS_PER_ROW = 4
_LEAST_POINTS = 32  # a few conversations, even if they take turns
_POINTS_SHARE = 4
_MIB = 1 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """What the pools hold.

    Attributes:
        page_tokens: tokens per page, P.
        draft_tokens: the deepest draft the rings make room for.
        pages: usable pages; the pools have one more, the sink.
        slots: usable slots; the pools have one more, the sink.
        points: resume points.
        page_bytes: one page over all paged caches and layers.
        slot_bytes: one slot row over all bounded caches and layers.
        point_bytes: one resume point over all bounded caches and layers.
        bounded: resume points hold some cache, a Ring or Recurrent, so requests resume there only.
        capacities: ring columns by cache name; for Recurrent those of its input ring.
        total_bytes: all pools together, sinks included.
    """

    page_tokens: int
    draft_tokens: int
    pages: int
    slots: int
    points: int
    page_bytes: int
    slot_bytes: int
    point_bytes: int
    bounded: bool
    capacities: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools together, sinks included."""
        pages, slots = (1 + self.pages) * self.page_bytes, (1 + self.slots) * self.slot_bytes
        return pages + slots + self.points * self.point_bytes


def plan_memory(  # noqa: PLR0913  # one flag each, and one place where all of them meet
    specs: Sequence[CacheSpec],
    *,
    page_tokens: int,
    draft_tokens: int,
    max_rows: int,
    max_model_len: int,
    budget_bytes: int,
    points: int | None,
    prefix_cache: bool,
) -> MemoryPlan:
    """Divide `budget_bytes` among pages, slots and resume points.

    Every row gets a slot. Pages get what is left, up to what `max_rows` requests of the greatest
    length can use, twice that if some of them can be kept for later requests.

    Args:
        specs: the caches of the model and of its drafter.
        page_tokens: tokens per page; a multiple of every ratio and every recurrent block.
        draft_tokens: most drafted tokens per row.
        max_rows: most requests in one step.
        max_model_len: most tokens of a request.
        budget_bytes: what all pools together may take.
        points: how many resume points; None takes four a row and at least 32, but no more
            than a quarter of what is spare. Without bounded caches or prefix cache there are none.
        prefix_cache: whether pages are kept for later requests.

    Raises:
        SettingError: page_tokens or draft_tokens do not suit the caches.
        MemoryPlanError: not even one request of the greatest length fits.
    """
    _check_sizes(specs, page_tokens, draft_tokens)
    paged = [spec for spec in specs if isinstance(spec, Paged)]
    bounded = [spec for spec in specs if not isinstance(spec, Paged)]
    page_bytes = sum(spec.page_bytes(page_tokens) for spec in paged)
    slot_bytes = sum(spec.slot_bytes(draft_tokens) for spec in bounded)
    point_bytes = sum(spec.point_bytes for spec in bounded)
    longest = -(-max_model_len // page_tokens)
    pointed = any(in_points(spec) for spec in specs)
    if not (pointed and prefix_cache):
        points = 0
    least = MemoryPlan(
        page_tokens=page_tokens,
        draft_tokens=draft_tokens,
        pages=longest,
        slots=max_rows,
        points=points or 0,
        page_bytes=page_bytes,
        slot_bytes=slot_bytes,
        point_bytes=point_bytes,
        bounded=pointed,
        capacities={spec.name: spec.capacity(draft_tokens) for spec in bounded},
    )
    spare = budget_bytes - least.total_bytes
    if spare < 0:
        raise MemoryPlanError(_shortage(least, max_model_len, budget_bytes))
    if points is None:
        affordable = spare // _POINTS_SHARE // max(1, point_bytes)
        points = min(max(_POINTS_PER_ROW * max_rows, _LEAST_POINTS), affordable)
        spare -= points * point_bytes
    # Where requests resume at points only, pages without points serve nobody else.
    reusing = prefix_cache and (points > 0 or not pointed)
    most = longest * max_rows * (2 if reusing else 1)
    pages = min(most, longest + spare // max(1, page_bytes))
    return replace(least, pages=pages, points=points)


def _check_sizes(specs: Sequence[CacheSpec], page_tokens: int, draft_tokens: int) -> None:
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names), f"cache names repeat: {names}"
    for spec in specs:
        if isinstance(spec, Ring):
            _check_held(spec)
            continue
        unit = spec.ratio if isinstance(spec, Paged) else spec.block
        if page_tokens < 1 or page_tokens % unit:
            # A cache with one entry a page goes with any size.
            others = [s for s in specs if not (isinstance(s, Paged) and s.ratio == page_tokens)]
            raise SettingError(
                "page_tokens",
                f"must be a multiple of {page_unit(others)} for cache {spec.name} and the others, "
                f"not {page_tokens}",
            )
        if isinstance(spec, Recurrent) and draft_tokens + 1 > spec.block:
            raise SettingError(
                "draft_tokens",
                f"cache {spec.name} allows drafts of at most {spec.block - 1} tokens "
                f"(its block is {spec.block}), not {draft_tokens}",
            )


def _check_held(ring: Ring) -> None:
    if ring.held is None:
        return
    assert ring.held.columns <= ring.window, f"points hold more of {ring.name} than it keeps"
    strange = ring.held.spans.keys() - {part.name for part in ring.parts}
    assert not strange, f"cache {ring.name} has no parts {sorted(strange)}"


def _shortage(least: MemoryPlan, max_model_len: int, budget_bytes: int) -> str:
    """What is needed, what there is, and what to change."""
    others = least.total_bytes - (1 + least.pages) * least.page_bytes
    advice = ["raise --memory"]
    if least.page_bytes:
        fitting = ((budget_bytes - others) // least.page_bytes - 1) * least.page_tokens
        fits = f" (to {fitting} or less)" if fitting > 0 else ""
        advice.append(f"lower --max-model-len{fits}")
    if least.slot_bytes:
        advice.append("lower --max-rows")
    if least.points:
        advice.append("lower --points")
    return (
        f"one request of {max_model_len} tokens needs {least.total_bytes / _MIB:.1f} MiB "
        f"({1 + least.pages} pages of {least.page_bytes} bytes, {1 + least.slots} slots of "
        f"{least.slot_bytes} bytes, the sinks among them, and {least.points} resume points of "
        f"{least.point_bytes} bytes), "
        f"there are {budget_bytes / _MIB:.1f} MiB; {' or '.join(advice)}"
    )
