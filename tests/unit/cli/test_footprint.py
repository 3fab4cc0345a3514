"""What `inspect` says of a request's caches and of the memory plan can be worked out again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.footprint import Footprint, Kept, layers_text
from surefoot.state.spec import DTYPE_BYTES, CacheSpec, Held, Paged, Part, Recurrent, Ring
from tests.unit import dsa
from tests.unit.cli.commands import Run
from tests.unit.flash import FLASH
from tests.unit.state.plans import plan_of

MILLION = 1 << 20
MEMORY = 8 << 30
MIXED = Paged("mixed", 3, (Part("k", (2, 5), "int8"), Part("scale", (1,), "float16")), ratio=4)
STATE = Recurrent(
    "state", 2, (Part("s", (2, 3, 4), "float32"),), (Part("k", (5,), "bfloat16"),), block=8
)
SPECS: Sequence[CacheSpec] = (
    Paged("kv", 1, (Part("k", (2, 3), "float32"), Part("v", (2, 3), "float32"))),
    MIXED,
    Paged("odd", 1, (Part("x", (3,), "int8"),), ratio=8),
    Ring("window", 4, (Part("kv", (7,), "bfloat16"),), 6, Held(6)),
    STATE,
)


def worked_out(formula: str) -> tuple[float, float]:
    """Numbers and bytes that a formula gives."""
    plain = re.sub(r"\b(layers?|tokens|columns)\b", "", formula).replace("x", "*")
    sized = plain
    for dtype, size in DTYPE_BYTES.items():
        sized = re.sub(rf"\b{dtype}\b", f"* {size}", sized)
        plain = re.sub(rf"\b{dtype}\b", "", plain)
    assert not re.search(r"[^\d\s()+*/.]", sized), sized
    return eval(plain), eval(sized)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: str(spec.name))
def test_a_formula_gives_what_the_spec_says(spec: CacheSpec) -> None:
    kept = Kept.of(spec, 3)
    assert worked_out(kept.formula) == (kept.numbers, kept.bytes)
    want = spec.page_bytes(16) / 16 if isinstance(spec, Paged) else spec.slot_bytes(3)
    assert kept.bytes == want


def test_formulas_are_read_like_this() -> None:
    assert Kept.of(SPECS[0], 3).formula == "1 layer x (2 x 3 + 2 x 3) float32"
    assert Kept.of(MIXED, 3).formula == "3 layers x (2 x 5 int8 + 1 float16) / 4 tokens"
    assert Kept.of(STATE, 3).formula == "2 layers x (2 x 3 x 4 float32 + 5 bfloat16 x 11 columns)"


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ("w", "w"),
        ("wwsh", "2 x w, s, h"),
        ("ww" + 20 * "sh" + "s", "2 x w, 20 x (s, h), s"),
        (4 * "lllf", "4 x (3 x l, f)"),
        ("aabaab", "2 x (2 x a, b)"),
        ("abcab", "a, b, c, a, b"),
        ("", ""),
    ],
)
def test_layers_that_repeat_are_told_once(layers: str, text: str) -> None:
    assert layers_text(list(layers)) == text


@pytest.fixture
def flash(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(dict(FLASH)))
    return tmp_path


def flags(*more: object) -> Sequence[object]:
    limits = ("--memory", MEMORY, "--max-model-len", MILLION)
    return (*limits, "--dtype", "bfloat16", *more)


def inspected(surefoot: Run, flash: Path, *more: object) -> dict[str, Any]:
    done = surefoot("inspect", flash, *flags(*more), "--json")
    assert done.status == 0, done.err
    content: dict[str, Any] = done.json
    return content


def test_a_token_of_v4_flash_takes_what_its_formula_says(surefoot: Run, flash: Path) -> None:
    """21 layers of 4:1 entries with index keys, and 20 of 128:1 entries."""
    content = inspected(surefoot, flash)
    caches = {cache["name"]: cache for cache in content["caches"]}
    assert caches["sparse"]["formula"] == "21 layers x (512 + 128) bfloat16 / 4 tokens"
    assert caches["heavy"]["formula"] == "20 layers x 512 bfloat16 / 128 tokens"
    token = content["per_token"]
    assert token["own_numbers"] == 21 * (512 + 128) / 4 + 20 * 512 / 128 == 3440
    assert token["own_bytes"] == 2 * 3440
    # The draft head's are the four streams of each page's last token.
    assert token["bytes"] == 2 * 3440 + 2 * 4 * 4096 // 128


@pytest.mark.parametrize(("name", "layers"), [("DEEPSEEK", 61), ("GLM", 78)])
def test_a_token_of_chosen_positions_takes_latents_and_index_keys(
    name: str, layers: int, surefoot: Run, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(getattr(dsa, name))))
    more = ("--drafter", "none", "--max-model-len", 4096, "--memory", MEMORY)
    content = surefoot("inspect", tmp_path, "--dtype", "bfloat16", *more, "--json").json
    caches = {cache["name"]: cache for cache in content["caches"]}
    assert caches["latents"]["formula"] == f"{layers} layers x (512 + 64) bfloat16"
    assert caches["index"]["formula"] == f"{layers} layers x 128 bfloat16"
    assert content["per_token"]["bytes"] == 2 * layers * (512 + 64 + 128)


@pytest.mark.parametrize("drafter", [("none", 0), ("ngram", 5), ("mtp", 3)])
def test_a_request_of_v4_flash_takes_its_rings(
    drafter: tuple[str, int], surefoot: Run, flash: Path
) -> None:
    name, depth = drafter
    told = ("--draft-tokens", depth) if depth else ()
    content = inspected(surefoot, flash, "--drafter", name, *told, "--max-rows", 1)
    wide, narrow = 128 + depth + 1, 8 + depth + 1
    window = 43 * 512 * 2 * wide
    raw = 21 * (2 * 1024 + 2 * 256) * 4 * narrow + 20 * 2 * 512 * 4 * wide
    request = content["per_request"]
    assert request["own_bytes"] == window + raw
    more = (512 + 4 * 4096) * 2 * wide if name == "mtp" else 0
    assert request["bytes"] == window + raw + more


def test_the_plan_for_a_million_tokens_adds_up(surefoot: Run, flash: Path) -> None:
    content = inspected(surefoot, flash)
    plan, pages = content["plan"], content["pages"]
    parts = {name: part for name, part in plan.items() if isinstance(part, dict)}
    assert parts.keys() == {"pages", "sink_page", "slots", "points", "sink_slot"}
    assert all(part["bytes"] == part["count"] * part["bytes_each"] for part in parts.values())
    assert sum(part["bytes"] for part in parts.values()) == plan["total_bytes"] <= MEMORY
    assert plan["memory"] == MEMORY
    assert (parts["pages"]["count"], parts["slots"]["count"]) == (pages, content["slots"])
    assert parts["points"]["count"] > 0
    # What is left would not do for another page, or they are all there.
    assert MEMORY - plan["total_bytes"] < parts["pages"]["bytes_each"]
    page, slot = content["per_token"]["bytes"] * 128, content["per_request"]["bytes"]
    assert (parts["pages"]["bytes_each"], parts["slots"]["bytes_each"]) == (page, slot)
    held = content["bytes"]
    assert held["pages"] + held["slots"] + held["points"] == plan["total_bytes"]
    point = sum(cache.get("bytes_per_point", 0) for cache in content["caches"])
    assert parts["points"]["bytes_each"] == point
    longest = content["longest_request"]
    assert longest["tokens"] == MILLION
    assert longest["pages"]["count"] == MILLION // 128 <= pages
    assert longest["total_bytes"] == MILLION // 128 * page + slot


def table(out: str, title: str) -> list[list[str]]:
    """Cells of the table below a title; those of one row lie two spaces or more apart."""
    lines = [line.rstrip() for line in out.splitlines()]
    begin = lines.index(title) + 3
    rows = []
    for line in lines[begin:]:
        if "  " not in line:
            break
        rows.append(re.split(r"\s{2,}", line))
    return rows


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize("title", ["Kept of each token", "Kept of each request"])
def test_the_tables_of_caches_add_up(title: str, surefoot: Run, flash: Path) -> None:
    done = surefoot("inspect", flash, *flags())
    *caches, own, every = table(done.out, title)
    assert (own[0], every[0]) == ("the model's own", "all")
    sums = [0, 0]
    for _, _, formula, *told in caches:
        assert worked_out(formula) == (number(told[0]), number(told[1]))
        sums = [total + number(one) for total, one in zip(sums, told, strict=True)]
    assert sums == [number(one) for one in every[-2:]]
    name = "per_token" if "token" in title else "per_request"
    same = inspected(surefoot, flash)[name]
    assert [number(one) for one in every[-2:]] == [same["numbers"], same["bytes"]]
    assert [number(one) for one in own[-2:]] == [same["own_numbers"], same["own_bytes"]]


def test_the_tables_of_memory_add_up(surefoot: Run, flash: Path) -> None:
    done, content = surefoot("inspect", flash, *flags()), inspected(surefoot, flash)
    plan = table(done.out, "Memory, in pages of 128 tokens")
    one = table(done.out, f"One request of {MILLION:,} tokens")
    assert plan.pop() == ["memory", f"{MEMORY:,}"]
    for rows, told in ((plan, content["plan"]), (one, content["longest_request"])):
        *parts, every = rows
        for name, count, each, size in parts:
            assert number(count) * number(each) == number(size)
            assert told[name.replace(" ", "_")]["bytes"] == number(size)
        assert sum(number(part[-1]) for part in parts) == number(every[-1]) == told["total_bytes"]
    assert "2 x window, 20 x (sparse, heavy), sparse" in done.out


def test_memory_that_was_not_given_is_not_told(surefoot: Run, tiny: Path) -> None:
    assert surefoot("inspect", tiny, "--json").json["plan"]["memory"] is None
    rows = table(surefoot("inspect", tiny).out, "Memory, in pages of 32 tokens")
    assert rows[-1][0].startswith("all, ")


def test_a_last_page_that_is_not_full_counts_whole() -> None:
    plan = plan_of(*SPECS[:1], max_model_len=33, budget_bytes=1 << 20, prefix_cache=False)
    entry = Footprint(SPECS[:1], (), plan, 33, 1 << 20).entry()
    assert entry["longest_request"] == {
        "tokens": 33,
        "pages": {"count": 3, "bytes_each": 768, "bytes": 3 * 768},
        "slots": {"count": 1, "bytes_each": 0, "bytes": 0},
        "total_bytes": 3 * 768,
    }
