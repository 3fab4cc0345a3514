"""The caches of DeepSeek V4 and plans for them, from configs alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from surefoot.draft.mtp import mtp_caches
from surefoot.model.deepseek_v4 import describe
from surefoot.state.ledger import Ledger
from surefoot.state.spec import CacheSpec, Ring


def caches_of(
    config: Mapping[str, object], dtype: str, page_tokens: int, mtp: bool = True
) -> tuple[CacheSpec, ...]:
    """What a model of this config keeps, and what drafting with its head keeps."""
    description = describe(config, dtype, "")
    own = mtp_caches(description, dtype, page_tokens) if mtp else ()
    return (*description.caches, *own)


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
