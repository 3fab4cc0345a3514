"""The caches of DeepSeek V4 and plans for them, from configs alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from surefoot.draft.mtp import mtp_caches
from surefoot.model.deepseek_v4 import describe
from surefoot.state.ledger import Ledger
from surefoot.state.plan import MemoryPlan, plan_memory
from surefoot.state.spec import CacheSpec, Ring
from surefoot.testing.tiny_latents import TinyLatentSizes, make_latent_config

FLASH_SIZES = TinyLatentSizes(
    vocab=129280,
    hidden=4096,
    streams=4,
    ratios=(0, 0, *(4, 128) * 20, 4),
    heads=64,
    head_dim=512,
    rotary=64,
    query_rank=1024,
    groups=8,
    output_rank=1024,
    window=128,
    heavy_ratio=128,
    index_heads=64,
    index_dim=128,
    index_chosen=512,
    experts=256,
    chosen=6,
    inner=2048,
    hashed=3,
    positions=1 << 20,
)
FLASH = make_latent_config(FLASH_SIZES)
"""The config of DeepSeek V4 Flash, as far as caches depend on it."""


def caches_of(
    config: Mapping[str, object], dtype: str, page_tokens: int, mtp: bool = True
) -> tuple[CacheSpec, ...]:
    """What a model of this config keeps, and what drafting with its head keeps."""
    description = describe(config, dtype, "")
    own = mtp_caches(description, dtype, page_tokens) if mtp else ()
    return (*description.caches, *own)


def plan_for(
    specs: tuple[CacheSpec, ...],
    *,
    page_tokens: int,
    budget_bytes: int,
    max_model_len: int,
    draft_tokens: int = 8,
    max_rows: int = 8,
    points: int | None = None,
) -> MemoryPlan:
    """`plan_memory` with a prefix cache."""
    return plan_memory(
        specs,
        page_tokens=page_tokens,
        draft_tokens=draft_tokens,
        max_rows=max_rows,
        max_model_len=max_model_len,
        budget_bytes=budget_bytes,
        points=points,
        prefix_cache=True,
    )


def pointed_pages(ledger: Ledger, tokens: Sequence[int]) -> list[int]:
    """Pages of the cached prefix of `tokens` that have a resume point."""
    node, size, pages = ledger.tree.root, ledger.limits.page_tokens, []
    for page in range(len(tokens) // size):
        child = node.children.get(tuple(tokens[page * size : (page + 1) * size]))
        if child is None:
            break
        pages += [page + 1] if child.point is not None else []
        node = child
    return pages


def lacking(name: str, count: int = 1) -> Callable[[CacheSpec], CacheSpec]:
    """Points lack the oldest ones of the positions that they must hold of one ring."""

    def change(spec: CacheSpec) -> CacheSpec:
        if spec.name != name:
            return spec
        assert isinstance(spec, Ring)
        assert spec.held is not None
        return replace(spec, held=replace(spec.held, columns=spec.held.columns - count))

    return change


def other_span(part: str, index: int) -> Callable[[CacheSpec], CacheSpec]:
    """Of raw rows, points hold the half of the values or scores that the next window ignores."""

    def change(spec: CacheSpec) -> CacheSpec:
        if spec.name != "sparse.raw":
            return spec
        assert isinstance(spec, Ring)
        assert spec.held is not None
        spans = list(spec.held.spans[part])
        start, stop = spans[index]
        spans[index] = stop, 2 * stop - start
        held = replace(spec.held, spans={**spec.held.spans, part: tuple(spans)})
        return replace(spec, held=held)

    return change
