"""The memory plan: what fits, what is capped, what is refused and with which words."""

import dataclasses
from functools import partial

import pytest

from surefoot.errors import MemoryPlanError, SettingError
from surefoot.state.spec import CacheSpec, Held, Paged, Part, Recurrent, Ring
from tests.unit.state.plans import plan_of

K = Part("k", (2, 8), "float32")  # 64 bytes
KV = Paged("kv", 3, (K, dataclasses.replace(K, name="v")))  # 384 bytes a token
INDEX = Paged("index", 1, (Part("k", (16,), "float32"),), ratio=4)  # 64 bytes per 4 tokens
WINDOW = Ring("window", 2, (K,), 10, Held(10))  # 128 bytes a column
DELTA = Recurrent("delta", 1, (Part("s", (4, 4), "float32"),), (K,), block=8)


plan = partial(plan_of, max_rows=4, draft_tokens=3)


def test_bytes_are_summed_over_the_caches() -> None:
    made = plan(KV, INDEX, WINDOW, DELTA)
    assert made.page_bytes == 16 * 384 + 4 * 64
    assert made.capacities == {"window": 10 + 3 + 1, "delta": 8 + 3}
    assert made.slot_bytes == 14 * 128 + 64 + 11 * 64
    assert made.point_bytes == 10 * 128 + 64
    assert made.bounded
    assert (made.page_tokens, made.draft_tokens, made.slots) == (16, 3, 4)


def test_a_ring_outside_of_points_takes_room_but_bounds_nothing() -> None:
    scratch = dataclasses.replace(WINDOW, held=None)
    made = plan(KV, scratch, points=5)
    assert (made.bounded, made.points, made.slot_bytes) == (False, 0, 14 * 128)
    assert made.capacities == {"window": 14}
    assert made.total_bytes == (1 + made.pages) * made.page_bytes + 5 * 14 * 128
    assert plan(KV, scratch, DELTA, points=5).points == 5


@pytest.mark.parametrize("held", [Held(11), Held(4, {"v": ((0, 2),)})])
def test_points_hold_no_more_of_a_ring_than_there_is(held: Held) -> None:
    with pytest.raises(AssertionError, match="window"):
        plan(KV, dataclasses.replace(WINDOW, held=held))


def test_pages_are_capped_at_what_can_be_used() -> None:
    assert plan(KV).pages == 2 * 4 * 7
    assert plan(KV, prefix_cache=False).pages == 4 * 7


def test_a_tight_budget_is_used_to_the_last_page() -> None:
    page = 16 * 384
    made = plan(KV, budget_bytes=page * 21 - 1)
    assert made.pages == 19
    assert made.total_bytes == 20 * page <= page * 21 - 1
    assert plan(KV, budget_bytes=page * 21).pages == 20


def test_the_least_plan_holds_one_request_of_the_greatest_length() -> None:
    page = 16 * 384
    assert plan(KV, budget_bytes=page * 8).pages == 7
    with pytest.raises(MemoryPlanError) as caught:
        plan(KV, budget_bytes=page * 8 - 1)
    text = str(caught.value)
    assert "one request of 100 tokens" in text
    assert "raise --memory" in text
    assert "--max-model-len (to 96 or less)" in text
    assert "--max-rows" not in text


def test_the_length_that_the_error_names_fits() -> None:
    page = 16 * 384
    assert plan(KV, budget_bytes=page * 8 - 1, max_model_len=96).pages == 6


def test_the_sinks_and_all_slots_are_counted() -> None:
    made = plan(KV, WINDOW, points=5)
    rows = (1 + 4) * 14 * 128 + 5 * 10 * 128
    assert made.total_bytes == (1 + made.pages) * made.page_bytes + rows
    least = 8 * 16 * 384 + rows
    assert plan(KV, WINDOW, points=5, budget_bytes=least).pages == 7
    with pytest.raises(MemoryPlanError, match=r"lower --max-rows or lower --points"):
        plan(KV, WINDOW, points=5, budget_bytes=least - 1)


def test_points_by_default_are_four_a_row_or_32_within_a_quarter_of_what_is_spare() -> None:
    assert plan(KV, WINDOW, max_rows=20, budget_bytes=1 << 30).points == 80
    assert plan(KV, WINDOW).points == 32
    point = 10 * 128
    least = 8 * 16 * 384 + 5 * 14 * 128
    assert plan(KV, WINDOW, budget_bytes=least).points == 0
    made = plan(KV, WINDOW, budget_bytes=least + 4 * 3 * point)
    assert made.points == 3
    assert made.pages == 7 + 9 * point // (16 * 384)


@pytest.mark.parametrize("wanted", [None, 9])
def test_no_points_without_bounded_caches_or_prefix_cache(wanted: int | None) -> None:
    assert plan(KV, points=wanted).points == 0
    assert plan(KV, WINDOW, points=wanted, prefix_cache=False).points == 0
    assert not plan(KV).bounded


def test_pages_that_cannot_be_kept_are_not_planned() -> None:
    assert plan(KV, WINDOW, points=1).pages == 2 * 4 * 7
    assert plan(KV, WINDOW, points=0).pages == 4 * 7


def test_a_model_without_paged_caches_is_not_limited_by_pages() -> None:
    made = plan(DELTA)
    assert made.page_bytes == 0
    assert made.pages == 2 * 4 * 7


@pytest.mark.parametrize(("spec", "page_tokens"), [(INDEX, 6), (DELTA, 12), (KV, 0)])
def test_pages_must_be_multiples_of_ratio_and_block(spec: CacheSpec, page_tokens: int) -> None:
    with pytest.raises(SettingError, match=spec.name) as caught:
        plan(spec, page_tokens=page_tokens)
    assert caught.value.parameter == "page_tokens"


def test_the_refusal_names_a_multiple_that_suits_all_caches() -> None:
    with pytest.raises(SettingError, match="multiple of 8 "):
        plan(INDEX, DELTA, page_tokens=6)
    whole_page = dataclasses.replace(INDEX, name="boundary", ratio=6)
    with pytest.raises(SettingError, match="multiple of 8 "):
        plan(whole_page, INDEX, DELTA, page_tokens=6)


def test_a_draft_fits_in_a_block() -> None:
    assert plan(DELTA, draft_tokens=7).capacities == {"delta": 15}
    with pytest.raises(SettingError, match="at most 7") as caught:
        plan(DELTA, draft_tokens=8)
    assert caught.value.parameter == "draft_tokens"


def test_cache_names_are_unique() -> None:
    with pytest.raises(AssertionError, match="kv"):
        plan(KV, KV)
