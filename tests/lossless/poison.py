"""Spoils what nobody may read."""

from __future__ import annotations

import torch

from surefoot.draft.draft_model import ModelDrafter
from surefoot.draft.guard import GuardedDrafter
from surefoot.draft.mtp import MtpDrafter
from surefoot.engine.engine import Engine
from surefoot.ids import SINK_PAGE, SINK_SLOT
from surefoot.state.ledger import Restore, Save
from surefoot.state.pool import Pools
from surefoot.state.spec import Paged, Ring


def poison(engine: Engine, kind: str) -> None:
    """Spoil what nobody may read: free pages and rows and the sinks, or what lies past the cursors.

    What a row may meet under a mask has to be finite, so there it is large numbers.
    """
    ledger, pools = engine.parts.ledger, engine.parts.pools
    # What a row or a point held is still read where the ledger has recorded that before.
    awaited = {move.slot for move in ledger._work.moves if isinstance(move, Save)}
    if kind == "nan":
        restored = {move.point for move in ledger._work.moves if isinstance(move, Restore)}
        slots = [slot for slot in (SINK_SLOT, *ledger._free_slots) if slot not in awaited]
        points = [point for point in ledger._free_points if point not in restored]
        for each in (pools, *drafter_pools(engine)):
            each.poison([SINK_PAGE, *ledger._free_pages], slots, points, torch.nan)
        return
    size = ledger.limits.page_tokens
    for lease in ledger._leases:
        for pool in pools._paged.values():
            ratio = size // pool.shape[-2]
            for position in range(lease.computed, lease.capacity, ratio):
                page, offset = divmod(position, size)
                pool[:, lease.pages[page]].select(-2, offset // ratio).fill_(1e4)
        if lease.slot not in awaited:
            _spoil_rings(engine, pools, lease.slot, lease.computed)


def drafter_pools(engine: Engine) -> list[Pools]:
    """Those of a drafter that keeps caches."""
    guard = engine.parts.drafter
    drafter = guard._drafter if isinstance(guard, GuardedDrafter) else guard
    return [drafter._pools] if isinstance(drafter, MtpDrafter | ModelDrafter) else []


def _spoil_rings(engine: Engine, pools: Pools, slot: int, computed: int) -> None:
    """Overwrite the columns whose positions have left the window, or lie before the checkpoint."""
    for spec in engine.target.model.description.caches:
        if isinstance(spec, Paged):
            continue
        capacity = spec.capacity(engine.parts.plan.draft_tokens)
        if isinstance(spec, Ring):
            first, parts = max(0, computed - spec.window), spec.parts
        else:
            first, parts = computed // spec.block * spec.block, spec.inputs
        kept = {p % capacity for p in range(first, computed)}
        gone = [column for column in range(capacity) if column not in kept]
        for part in parts:
            pools.rows(spec.name, part.name)[:, slot, gone] = 1e4
