"""Compares the caches of a running request with those of a run that never speculated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.draft.draft_model import ModelDrafter
from surefoot.draft.guard import GuardedDrafter
from surefoot.draft.mtp import MtpDrafter
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel
from surefoot.request import Request
from surefoot.state.lease import Lease
from surefoot.state.plan import MemoryPlan
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec, Paged, Part, Ring
from surefoot.step import Batch, Row, Step


def fresh_batch(model: LoadedModel, plan: MemoryPlan, tokens: Sequence[int], first: int) -> Batch:
    """`tokens[first:]` as one row of known tokens in slot 1 and pages 1, 2, ..."""
    pages = list(range(1, len(tokens) // plan.page_tokens + 2))
    row = Row(tokens[first:], first, len(tokens) - first, pages, 1, first, 0, first)
    return Step.of([row], plan.page_tokens).build(model.backend)


@torch.inference_mode()
def fresh_caches(
    model: LoadedModel, plan: MemoryPlan, tokens: Sequence[int], first: int = 0
) -> Pools:
    """The model's caches after `tokens[first:]`, computed in one go; nothing before is known."""
    pools = Pools(model.model.description.caches, plan, model.backend.device)
    model.model.forward(fresh_batch(model, plan, tokens, first), pools)
    return pools


def check_target(engine: Engine, request: Request) -> None:
    """Every cache of the target up to the cursor."""
    lease = engine.parts.scheduler._running[request]
    tokens = request.tokens[: lease.computed]
    check_caches(engine.target, engine.parts.plan, (engine.parts.pools, lease), tokens)


def check_draft_model(engine: Engine, request: Request, draft: LoadedModel) -> None:
    """Every cache of a draft model, which may have started anew on the way."""
    lease = engine.parts.scheduler._running[request]
    guard = engine.parts.drafter
    assert isinstance(guard, GuardedDrafter)
    assert isinstance(guard._drafter, ModelDrafter)
    if lease.drafted > lease.draft_from:
        own = guard._drafter._pools, lease
        tokens = request.tokens[: lease.drafted]
        check_caches(draft, engine.parts.plan, own, tokens, lease.draft_from)


def check_drafter(engine: Engine, request: Request, draft: LoadedModel | None) -> None:
    """Every cache of the drafter up to its own cursor."""
    lease = engine.parts.scheduler._running[request]
    guard = engine.parts.drafter
    assert isinstance(guard, GuardedDrafter)
    assert guard.failures == 0
    drafter, plan = guard._drafter, engine.parts.plan
    tokens = request.tokens[: lease.drafted]
    assert lease.draft_from == 0
    if isinstance(drafter, ModelDrafter) and draft is not None and tokens:
        check_caches(draft, plan, (drafter._pools, lease), tokens)
    elif isinstance(drafter, MtpDrafter):
        check_head(engine.target, plan, (drafter, lease), request.tokens[: lease.computed])


@torch.inference_mode()
def check_head(
    model: LoadedModel,
    plan: MemoryPlan,
    own: tuple[MtpDrafter, Lease],
    tokens: Sequence[int],
) -> None:
    """The entries of the head, and the target's states that are kept for later."""
    drafter, lease = own
    head, description = model.model.draft_head, model.model.description
    assert head is not None
    target = Pools(description.caches, plan, model.backend.device)
    hidden = model.model.forward(fresh_batch(model, plan, tokens, 0), target)
    fresh = Pools(description.draft_caches, plan, model.backend.device)
    head.catch_up(fresh_batch(model, plan, tokens, 1), head.enter(hidden[:-1]), fresh)
    for spec in description.draft_caches:
        assert isinstance(spec, Paged)
        for part in spec.parts:
            check_pages(spec, part, (drafter._pools, lease), fresh, range(1, lease.drafted))
    waiting = range(max(0, lease.drafted - 1), len(tokens))
    recent = drafter._recent[drafter._columns_of(lease, waiting)]
    right = torch.equal(recent, hidden[waiting.start :])
    assert right, f"states of {waiting}"
    size = plan.page_tokens
    for page in range(len(tokens) // size):
        state = hidden[(page + 1) * size - 1]
        assert torch.equal(drafter._boundary[lease.pages[page]], state), f"boundary of page {page}"


def check_caches(
    model: LoadedModel,
    plan: MemoryPlan,
    own: tuple[Pools, Lease],
    tokens: Sequence[int],
    first: int = 0,
) -> None:
    """Every entry that may be read has the bits of a fresh run that starts at `first`."""
    fresh = fresh_caches(model, plan, tokens, first)
    for spec in model.model.description.caches:
        if isinstance(spec, Paged):
            for part in spec.parts:
                check_pages(spec, part, own, fresh, range(first, len(tokens)))
        else:
            check_rows(spec, own, fresh, plan.capacities[spec.name], len(tokens))


def check_pages(
    spec: Paged, part: Part, own: tuple[Pools, Lease], fresh: Pools, positions: range
) -> None:
    pools, lease = own
    mine = entries(pools.paged(spec.name, part.name), lease.pages, positions)
    theirs = entries(fresh.paged(spec.name, part.name), range(1, positions.stop + 1), positions)
    assert torch.equal(mine, theirs), f"{spec.name}.{part.name} of {positions}"


def check_rows(
    spec: CacheSpec, own: tuple[Pools, Lease], fresh: Pools, capacity: int, end: int
) -> None:
    """The window of a ring; or a checkpoint and the inputs since then."""
    assert not isinstance(spec, Paged)
    pools, lease = own
    first = max(0, end - spec.window) if isinstance(spec, Ring) else end // spec.block * spec.block
    columns = [position % capacity for position in range(first, end)]
    for part in spec.parts if isinstance(spec, Ring) else spec.inputs:
        mine = pools.rows(spec.name, part.name)[:, lease.slot, columns]
        theirs = fresh.rows(spec.name, part.name)[:, 1, columns]
        assert torch.equal(mine, theirs), f"{spec.name}.{part.name} from {first} to {end}"
    for part in () if isinstance(spec, Ring) else spec.state:
        mine = pools.rows(spec.name, part.name)[:, lease.slot]
        theirs = fresh.rows(spec.name, part.name)[:, 1]
        assert torch.equal(mine, theirs), f"{spec.name}.{part.name} at {first}"


def entries(pool: Tensor, table: Sequence[int], positions: range) -> Tensor:
    """The entries of some positions: [n, layers, heads, size]."""
    size = pool.shape[-2]
    pages = [table[position // size] for position in positions]
    return pool[:, pages, :, [position % size for position in positions]]
