"""Memory plans for tests: `plan_memory` with usual values."""

from surefoot.state.plan import MemoryPlan, plan_memory
from surefoot.state.spec import CacheSpec


def plan_of(
    *specs: CacheSpec,
    page_tokens: int = 16,
    draft_tokens: int = 0,
    max_rows: int = 1,
    max_model_len: int = 100,
    budget_bytes: int = 1 << 30,
    points: int | None = None,
    prefix_cache: bool = True,
) -> MemoryPlan:
    return plan_memory(
        specs,
        page_tokens=page_tokens,
        draft_tokens=draft_tokens,
        max_rows=max_rows,
        max_model_len=max_model_len,
        budget_bytes=budget_bytes,
        points=points,
        prefix_cache=prefix_cache,
    )
