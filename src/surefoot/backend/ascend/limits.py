"""Sizes that the vendor's operators were made for, looked at when the memory plan is made.

The figures are those of the operators' pages for A2 and A3; `docs/ascend.md` lists their sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from surefoot.backend.operands import CacheShape

_HEAD_UNIT, _MOST_HEAD = 16, 512
_PAGE_UNIT, _MOST_PAGE = 16, 512
_STATE_SIZE, _STATE_HEADS = 128, 64
_ENTRIES_UNIT = 16
_INDEX_SIZE = 128
_LATENT_SIZES = {"values": ("latents", 512), "turned": ("turned keys", 64)}
"""Of attention over chosen positions, by the cache's part."""


def beyond_limits(caches: Sequence[CacheShape], page_tokens: int) -> list[str]:
    """A sentence for each size that the operators do not take."""
    return [
        *_pages(page_tokens),
        *dict.fromkeys(each for c in caches for each in _cache(c, page_tokens)),
    ]


def _pages(page_tokens: int) -> Iterator[str]:
    if page_tokens % _PAGE_UNIT or page_tokens > _MOST_PAGE:
        wanted = f"a multiple of {_PAGE_UNIT} up to {_MOST_PAGE}"
        yield f"pages must have {wanted} tokens, not {page_tokens}"


def _cache(cache: CacheShape, page_tokens: int) -> Iterator[str]:
    size = cache.shape[-1]
    if cache.kind == "paged" and len(cache.shape) > 1 and (size % _HEAD_UNIT or size > _MOST_HEAD):
        wanted = f"a multiple of {_HEAD_UNIT} up to {_MOST_HEAD}"
        yield f"attention heads must have {wanted} numbers, not {size}"
    if cache.kind == "paged" and cache.part in _LATENT_SIZES:
        what, legal = _LATENT_SIZES[cache.part]
        if size != legal:
            yield f"{what} must have {legal} numbers, not {size}"
    if cache.kind == "recurrent":
        heads, *sizes = cache.shape
        if any(size != _STATE_SIZE for size in sizes):
            yield f"recurrent states must have sides of {_STATE_SIZE}, not {sizes}"
        if heads > _STATE_HEADS:
            yield f"recurrent layers must have up to {_STATE_HEADS} heads, not {heads}"
    if cache.kind == "paged" and cache.part == "index":
        if cache.shape[-1] != _INDEX_SIZE:
            yield f"index keys must have {_INDEX_SIZE} numbers, not {cache.shape[-1]}"
        if page_tokens // cache.ratio % _ENTRIES_UNIT:
            wanted = f"a multiple of {_ENTRIES_UNIT}"
            yield f"a page must hold {wanted} entries, not {page_tokens // cache.ratio}"
