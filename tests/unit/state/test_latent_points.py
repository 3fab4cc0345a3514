"""Resume points of DeepSeek V4: what one takes, byte for byte, and what all of them may take."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest
import torch

from surefoot.state.ledger import Lease, Ledger, LedgerLimits
from surefoot.state.plan import MemoryPlan
from surefoot.state.pool import Pools
from surefoot.testing.tiny_latents import TinyLatentSizes, make_latent_config
from tests.unit.flash import FLASH
from tests.unit.state.latents import caches_of, pointed_pages
from tests.unit.state.plans import plan_of

P = 128
TINY = make_latent_config(TinyLatentSizes(ratios=(0, 4, 128, 4, 4), window=128, heavy_ratio=128))
SHORT = make_latent_config(TinyLatentSizes())
VOCAB = 129280
BYTES = {"float32": 4, "bfloat16": 2}
ROOMY, SCARCE = 4 << 30, 5 << 28
LONG = 100_000
ALONG = [1, 2, 4, 8, *range(16, 777, 16)]


def needed_bytes(config: Mapping[str, Any], dtype: str, mtp: bool) -> int:
    """What the page before leaves to the token behind it, all layers together.

    The window of every layer but for the token itself; of the last four raw rows of the 4:1
    windows one half of values and scores, for entries and for their keys; nothing of 128:1.
    """
    *ratios, _ = config["compress_ratios"]
    rows = (len(ratios) + mtp) * (config["sliding_window"] - 1)
    raw = 4 * 2 * (config["head_dim"] + config["index_head_dim"]) * BYTES["float32"]
    return int(rows * config["head_dim"] * BYTES[dtype] + ratios.count(4) * raw)


@pytest.mark.parametrize(
    ("config", "page", "dtype"),
    [(FLASH, P, "bfloat16"), (TINY, P, "float32"), (SHORT, 16, "float32")],
    ids=["flash", "tiny", "short"],
)
@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize("depth", [0, 3, 8])
def test_a_point_takes_what_it_must_hold_and_no_more(
    config: Mapping[str, Any], page: int, dtype: str, mtp: bool, depth: int
) -> None:
    specs = caches_of(config, dtype, page, mtp)
    plan = plan_of(
        *specs,
        max_rows=8,
        page_tokens=page,
        budget_bytes=4 << 30,
        max_model_len=4096,
        draft_tokens=depth,
        points=5,
    )
    assert plan.point_bytes == needed_bytes(config, dtype, mtp)
    # Nothing is allocated on this device; the shapes are those of any other.
    pools = Pools(specs, plan, torch.device("meta"))
    assert pools.bytes == plan.total_bytes
    points = pools._points()
    assert sum(tensor.numel() * tensor.element_size() for tensor in points) == 5 * plan.point_bytes


def test_a_point_of_the_real_model_in_figures() -> None:
    """44 windows of 127 x 512 numbers in bfloat16, 21 x 4 x 1280 numbers in float32."""
    plan = flash_plan()
    assert plan.point_bytes == 44 * 127 * 512 * 2 + 21 * 4 * 1280 * 4 == 6_152_192
    # A slot row has room for drafts besides, and for windows that end with the page.
    assert plan.slot_bytes > 4 * plan.point_bytes


def flash_plan(points: int | None = None, budget: int = ROOMY) -> MemoryPlan:
    specs = caches_of(FLASH, "bfloat16", P)
    return plan_of(
        *specs,
        max_rows=8,
        draft_tokens=8,
        page_tokens=P,
        budget_bytes=budget,
        max_model_len=110_000,
        points=points,
    )


def ledger_on(plan: MemoryPlan, ledger: type[Ledger] = Ledger) -> Ledger:
    limits = LedgerLimits(plan.pages, plan.slots, plan.points, P, plan.bounded)
    return ledger(limits)


def step(ledger: Ledger, lease: Lease, n: int, tokens: Sequence[int]) -> None:
    assert ledger.reserve(lease, n)
    ledger.commit(lease, n)
    ledger.publish(lease, tokens)


def run(ledger: Ledger, tokens: list[int], answer: int = 0) -> Lease:
    """A request from its admission to its end, its answer in rows of three tokens."""
    lease = ledger.admit(tokens, 1)
    assert lease is not None
    while lease.computed < len(tokens):
        step(ledger, lease, ledger.chunk(lease, min(2048, len(tokens) - lease.computed)), tokens)
    for _ in range(-(-answer // 3)):
        tokens += [1, 2, 3]
        step(ledger, lease, 3, tokens)
    ledger.audit()
    ledger.release(lease, tokens)
    ledger.audit()
    return lease


def check_budget(ledger: Ledger, plan: MemoryPlan, budget: int = ROOMY) -> None:
    """Whatever was taken fits what was planned, and the plan what was given."""
    ledger.audit()
    assert ledger.tree.points <= plan.points
    points = ledger.tree.points * plan.point_bytes
    held = (1 + plan.pages) * plan.page_bytes + (1 + plan.slots) * plan.slot_bytes
    assert points + held <= plan.total_bytes <= budget


def text(length: int, seed: object) -> list[int]:
    random = Random(str(seed))
    return [random.randrange(VOCAB) for _ in range(length)]


def test_a_prompt_of_100_000_tokens_leaves_points_all_along() -> None:
    plan = flash_plan(points=64)
    ledger, tokens = ledger_on(plan), text(LONG, "long")
    run(ledger, list(tokens))
    assert ledger.cached_pages * P > LONG - P
    assert pointed_pages(ledger, tokens) == [*ALONG, 781]
    check_budget(ledger, plan)
    for shared, found in ((300, 256), (5000, 32 * P), (60_000, 464 * P), (LONG, 781 * P)):
        again = run(ledger, [*tokens[:shared], 7])
        assert again.cached == found
        check_budget(ledger, plan)


@pytest.mark.parametrize("points", [2, 5, 9, 32])
def test_a_long_prompt_keeps_to_a_small_budget_and_is_found_again(points: int) -> None:
    # What is planned when nothing is said are 32.
    plan = flash_plan(None if points == 32 else points)
    assert plan.points == points
    ledger, tokens = ledger_on(plan), text(LONG, "long")
    run(ledger, list(tokens))
    check_budget(ledger, plan)
    assert pointed_pages(ledger, tokens) == [*ALONG[: points - 1], 781]
    assert run(ledger, [*tokens, 7]).cached == 781 * P


def test_many_conversations_share_their_beginning_and_the_last_ones_are_found() -> None:
    """So many that pages and points of old ones have to go, again and again."""
    plan = flash_plan(32, SCARCE)
    ledger, system = ledger_on(plan), text(300, "system")
    assert 100_000 < plan.pages * P < 200_000
    talks: list[list[int]] = []
    most = 0
    for number in range(120):
        talk = system + text(100 + 97 * (number % 40), number)
        lease = run(ledger, talk, answer=150)
        assert lease.cached == (2 * P if number else 0)
        check_budget(ledger, plan, SCARCE)
        most = max(most, ledger.cached_pages)
        talks.append(talk)
    assert most * P >= LONG
    assert ledger.tree.points == plan.points
    for talk in talks[-4:]:
        # All of the answer but for the last page that is not full, and the token to compute.
        assert run(ledger, [*talk, 5, 6]).cached == len(talk) // P * P
        check_budget(ledger, plan, SCARCE)


def test_an_answer_leaves_one_point_at_its_last_whole_page() -> None:
    ledger, tokens = ledger_on(flash_plan()), text(1100, "prompt")
    run(ledger, tokens, answer=600)
    assert len(tokens) // P == 13
    # The prompt ends in the ninth page.
    assert pointed_pages(ledger, tokens) == [1, 2, 4, 8, 13]


def settings_of(config: Mapping[str, object], every: int, points: int) -> LedgerLimits:
    plan = plan_of(
        *caches_of(config, "bfloat16", P),
        max_rows=8,
        draft_tokens=8,
        page_tokens=P,
        budget_bytes=4 << 30,
        max_model_len=10_000,
        points=points,
    )
    return LedgerLimits(plan.pages, plan.slots, plan.points, P, plan.bounded, every)


@pytest.mark.parametrize(
    ("every", "pages"),
    [
        (1, [*range(1, 61)]),
        (2, [1, *range(2, 61, 2)]),
        (3, [1, 2, *range(3, 61, 3)]),
        (16, [1, 2, 4, 8, 16, 32, 48, 60]),
        (24, [1, 2, 4, 8, 16, 24, 48, 60]),
        (1000, [1, 2, 4, 8, 16, 32, 60]),
    ],
)
def test_points_lie_at_powers_of_two_and_then_every_so_many_pages(
    every: int, pages: list[int]
) -> None:
    ledger, tokens = Ledger(settings_of(FLASH, every, 80)), text(60 * P + 1, "prompt")
    run(ledger, tokens)
    assert pointed_pages(ledger, tokens) == pages
