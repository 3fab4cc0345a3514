"""What public engines got wrong on the NPU, planted in captured steps: every fault is noticed.

The emulation refuses what an operator would not take or the device would not notice; where nothing
is refused, the tokens are not those of a plain run. Beside the faults are the same runs without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import RELAXED, EmulatedVendor, SilentError, products, scatters
from surefoot.backend.ascend.graph import AscendRecording
from surefoot.backend.ascend.latents import LatentRows
from surefoot.backend.ascend.placed import PlacedRows
from surefoot.backend.ascend.places import Derived, Places
from surefoot.backend.ascend.rows import AscendRows
from surefoot.backend.operands import Compression, RowLayout
from surefoot.engine.rows import PlannedRow
from surefoot.engine.runner import ModelRunner
from surefoot.state.spec import Ring
from surefoot.step import Batch
from surefoot.testing.faults import planted
from surefoot.testing.tiny_hybrids import TinyHybridSizes
from tests.lossless.harness import LATENTS, Bench, answer_of
from tests.lossless.scenes import (
    PACKED,
    PAGE,
    Fault,
    Scene,
    Stage,
    live_rows,
    moved,
    rejected,
    settled_with,
)
from tests.lossless.test_npu import EMULATED, LegalBench


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    folders = [tmp_path_factory.mktemp(name) for name in ("small", "legal")]
    return Stage(Bench(folders[0], EMULATED), LegalBench(folders[1], EMULATED))


PAGES = Scene("qwen3")
PACKED_PAGES = Scene(PACKED, (6, 5))
RINGS = Scene("sliding")
HYBRID = Scene("hybrid")
RESUMED = Scene("hybrid", (14,), "right", rows=1, follow=True)
SHRINKING = Scene("qwen3", (3, 9, 9, 9), rows=4)
ENTRIES = Scene(LATENTS, (12,), "right", rows=1)
EXPERTS = Scene("hybrid experts", (8, 6))
SCENES = (PAGES, PACKED_PAGES, RINGS, HYBRID, RESUMED, SHRINKING, ENTRIES, EXPERTS)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: f"{scene.model}-{scene.drafter}")
def test_without_a_fault_all_is_right(scene: Scene, stage: Stage) -> None:
    """Otherwise the faults below would prove nothing."""
    replays: list[RowLayout] = []
    replay = AscendRecording.replay

    def counted(self: AscendRecording, layout: RowLayout) -> None:
        replays.append(layout)
        replay(self, layout)

    plain = stage.plain(scene)
    with patch.object(AscendRecording, "replay", counted):
        requests = stage.play(scene)
    assert [answer_of(request) for request in requests] == plain
    assert len(replays) > 2
    assert sum(request.speculation.accepted for request in requests) > 2
    assert not scene.follow or requests[-1].cached_tokens == PAGE


# Lengths and places of before the padding.


def cut_to_live(places: Places, layout: RowLayout) -> None:
    live = live_rows(layout)
    if 0 < live < places.rows:
        del places.ends[live:], places.lengths[live:], places.reaches[layout.starts[live] :]


def sums_of_live(places: Places, layout: RowLayout) -> None:
    live = live_rows(layout)
    if 0 < live < places.rows:
        places.ends[live:] = [places.ends[live - 1]] * (places.rows - live)


@pytest.mark.parametrize("scene", [PAGES, PACKED_PAGES], ids=lambda scene: scene.model)
def test_lengths_of_the_unpadded_step_are_refused(scene: Scene, stage: Stage) -> None:
    """SGLang #32791, vllm-ascend #6596: lengths were taken before the query was padded."""
    errors = stage.found(scene, moved(cut_to_live))
    assert len(errors) == len(scene.lengths)
    assert all("lengths as captured, came" in error for error in errors)


def test_sums_of_lengths_that_end_before_the_padding_are_refused(stage: Stage) -> None:
    """vllm-ascend #4518: query rows are not the last of the summed lengths."""
    errors = stage.found(PACKED_PAGES, moved(sums_of_live))
    assert len(errors) == 2
    assert all("last of actual_seq_lengths" in error for error in errors)


def noticed(stage: Stage, scene: Scene, fault: Fault) -> None:
    """The emulation refuses places written twice; where nobody looks, tokens tell."""
    assert all("repeats in indices" in found for found in stage.found(scene, fault))
    with patch.object(scatters, "check_once"):
        assert "tokens" in stage.found(scene, fault)


@pytest.mark.parametrize("scene", [RINGS, HYBRID], ids=lambda scene: scene.model)
def test_padded_rows_in_the_slot_of_a_live_row_are_noticed(scene: Scene, stage: Stage) -> None:
    """SGLang #27202, tokenspeed #700: the scratch of padded rows was the first live request's."""
    noticed(stage, scene, patch("surefoot.step.SINK_SLOT", 1))


@pytest.mark.parametrize("scene", [PAGES, PACKED_PAGES], ids=lambda scene: scene.model)
def test_padded_rows_on_the_page_of_a_live_row_are_noticed(scene: Scene, stage: Stage) -> None:
    """tokenspeed #700 for pages: the number that stands for padding is a legal one."""
    noticed(stage, scene, patch("surefoot.step.SINK_PAGE", 1))


# Slots that are saved or kept half.


@pytest.mark.parametrize("fault", ["points without rings", "points without checkpoints"])
def test_half_a_resume_point_is_noticed_by_the_next_turn(fault: str, stage: Stage) -> None:
    """SGLang #27202: a tracked slot got the recurrent state and not the conv inputs."""
    first, *later = stage.found(RESUMED, planted(fault))
    assert first == ""
    assert set(later) == {"", "tokens"}


def test_conv_inputs_that_are_rolled_back_once_more_are_noticed(stage: Stage) -> None:
    """llama.cpp #28123, SGLang #27202: a right recurrent state beside wrong conv inputs."""

    def roll(runner: ModelRunner, row: PlannedRow) -> None:
        ring = runner._pools.rows("conv", "x")
        ring[:, row.lease.slot] = ring[:, row.lease.slot].roll(rejected(row), dims=1)

    assert "tokens" in stage.found(HYBRID, settled_with(roll))


@contextmanager
def shifted_conv(stage: Stage) -> Iterator[None]:
    """Conv inputs go to the column behind the last one written, rejected or not."""
    shift = torch.zeros(8, dtype=torch.long)
    caches, write = stage.small.target("hybrid").model.description.caches, PlacedRows.ring_write
    [capacity] = [cache.capacity(3) for cache in caches if isinstance(cache, Ring)]

    def count(runner: ModelRunner, row: PlannedRow) -> None:
        shift[row.lease.slot] += rejected(row)

    def astray(self: PlacedRows, ring: Tensor, entries: Tensor) -> None:
        places = self.places
        if ring.shape[1] != capacity:
            return write(self, ring, entries)
        position = places.position + self.derived.of_rows(shift.index_select(0, places.slot))
        with patch.object(places, "position", position):
            return write(self, ring, entries)

    with settled_with(count), patch.object(PlacedRows, "ring_write", astray):
        yield


def test_conv_inputs_that_are_shifted_by_rejected_drafts_are_noticed(stage: Stage) -> None:
    """The kind of llama.cpp #28123: the next place counts what was written, not what was kept."""
    assert "tokens" in stage.found(HYBRID, shifted_conv(stage))


# Compressed entries.


def live_entry_0() -> Fault:
    """Tokens that close no window write entry 0 of the first row's first page."""
    compress = LatentRows.compress

    def faulty(
        self: LatentRows, raw: Tensor, ring: Tensor, pool: Tensor, form: Compression
    ) -> None:
        write = self.write

        def astray(target: Tensor, indices: Tensor, entries: Tensor) -> None:
            first = torch.stack((self.places.tables[0, 0], torch.zeros_like(indices[0, 0])))
            write(target, torch.where(indices[:, :1] == 0, first, indices), entries)

        with patch.object(self, "write", astray):
            compress(self, raw, ring, pool, form)

    return patch.object(LatentRows, "compress", faulty)


def test_tokens_that_close_no_window_and_write_a_live_entry_are_noticed(stage: Stage) -> None:
    """SGLang #28980: location 0 stands for "no entry" in verify metadata, and is a place."""
    noticed(stage, ENTRIES, live_entry_0())


def test_no_entry_that_is_read_as_entry_0_is_noticed(stage: Stage) -> None:
    """tokenspeed #700 for chosen entries: -1 is made 0, which is a legal number."""
    choose = LatentRows.choose_entries

    def clamped(self: LatentRows, *given: Any) -> Tensor:
        return choose(self, *given).clamp(min=0)

    fault = patch.object(LatentRows, "choose_entries", clamped)
    assert stage.found(ENTRIES, fault) == ["tokens"]


# What a graph holds, and what it is told before a replay.


def frozen(stage: Stage, fault: Fault) -> None:
    """Tokens tell that the capture is replayed; run one by one, the same steps are right."""
    assert stage.found(PAGES, fault) == ["tokens", "tokens"]
    assert stage.found(replace(PAGES, capture=False), fault) == ["", ""]


def lists_made(change: Callable[[dict[str, list[int]]], dict[str, list[int]]]) -> Fault:
    """Rows that hand other lists to the graph than their attention took."""
    attention = AscendRows.paged_attention

    def faulty(self: AscendRows, *given: Any) -> Tensor:
        out = attention(self, *given)
        self.host_lists = change(self.host_lists)
        return out

    return patch.object(AscendRows, "paged_attention", faulty)


SECOND = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
}


def test_the_second_versions_keyword_for_the_first_is_refused(stage: Stage) -> None:
    """The vendor's update ignores keys that it does not know: the last lengths stay, in silence."""

    def renamed(lists: Mapping[str, list[int]]) -> dict[str, list[int]]:
        return {SECOND[name]: values for name, values in lists.items()}

    errors = stage.found(PAGES, lists_made(renamed))
    assert len(errors) == 2
    assert all("actual_seq_kvlen is unknown" in error for error in errors)


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_a_graph_of_one_version_refuses_the_keyword_of_the_other(second: bool) -> None:
    """The same on the operators themselves, either way round."""
    vendor, names, others = EmulatedVendor(RELAXED), list(SECOND), list(SECOND.values())
    attention = vendor.npu_fused_infer_attention_score
    if second:
        names, others = others, names
        attention = vendor.npu_fused_infer_attention_score_v2  # type: ignore[assignment]
    query, pages = torch.zeros(2, 1, 16).bfloat16(), torch.zeros(2, 16, 16).bfloat16()
    table = torch.ones(2, 1, dtype=torch.int32)
    lengths: dict[str, Any] = {names[0]: [1, 2], names[1]: [1, 1]}

    def attend() -> object:
        form: dict[str, Any] = {"input_layout": "TND", "block_size": 16, "block_table": table}
        return attention(query, pages, pages, **lengths, **form)

    attend()
    graph = vendor.npu.NPUGraph()
    with vendor.npu.graph(graph, auto_dispatch_capture=True):
        attend()
    graph.update([lengths])
    for wrong in ({others[0]: [1, 2], others[1]: [1, 1]}, {names[0]: [1, 2], others[1]: [1, 1]}):
        with pytest.raises(SilentError) as caught:
            graph.update([wrong])
        assert caught.value.rule == "unknown key"


def test_lengths_that_are_those_of_the_capture_are_noticed(stage: Stage) -> None:
    """TensorRT-LLM #17110: the graph holds a copy of the list that it was captured with."""

    def copied(lists: Mapping[str, list[int]]) -> dict[str, list[int]]:
        return {name: list(values) for name, values in lists.items()}

    frozen(stage, lists_made(copied))


def offset_of(make: Callable[[Sequence[int]], Tensor]) -> Fault:
    """Places on pages that come from the host's positions."""

    def offset(self: Derived) -> Tensor:
        places = self._places
        return make([reach - 1 for reach in places.reaches]) % places.page_tokens

    return patch.object(Derived, "offset", property(offset))


def test_positions_that_are_those_of_the_capture_are_noticed(stage: Stage) -> None:
    """TensorRT-LLM #17110: a loop on the host froze its positions into the graph."""

    def ints(positions: Sequence[int]) -> Tensor:
        return torch.cat([torch.arange(at, at + 1) for at in positions])

    frozen(stage, offset_of(ints))


def test_a_tensor_of_the_hosts_positions_is_refused_by_the_capture(stage: Stage) -> None:
    """The same as above where it can be known at once."""
    errors = stage.found(PAGES, offset_of(torch.tensor))
    assert len(errors) == 2
    assert all("would stay the same in every replay" in error for error in errors)


def test_block_tables_that_are_those_of_the_capture_are_noticed(stage: Stage) -> None:
    """vllm-ascend #7460: persistent metadata stays stale, as each step makes tables of its own."""

    def new_memory(places: Places, layout: RowLayout) -> None:
        places.tables = torch.zeros_like(places.tables)

    frozen(stage, moved(lambda places, layout: None, before=new_memory))


def test_a_replay_without_an_update_of_its_own_is_refused(stage: Stage) -> None:
    """vllm-ascend #7460, #15461: what an older step left in metadata is replayed for this one."""
    replay, updated = AscendRecording.replay, set[int]()

    def once(self: AscendRecording, layout: RowLayout) -> None:
        if id(self) not in updated:
            updated.add(id(self))
            return replay(self, layout)
        self._places.move(layout)
        return self._graph.replay()

    errors = stage.found(PAGES, patch.object(AscendRecording, "replay", once))
    assert len(errors) == 2
    assert all("wanted an update of actual_seq_lengths_kv" in error for error in errors)


def test_the_tail_of_a_buffer_that_keeps_an_older_step_is_noticed(stage: Stage) -> None:
    """SGLang #32555, vllm-ascend #15461: live rows are refreshed, rows behind them are not."""
    older: dict[int, list[Tensor]] = {}

    def remember(places: Places, layout: RowLayout) -> None:
        older[id(places)] = [places.slot.clone(), places.tables.clone()]

    def front_only(places: Places, layout: RowLayout) -> None:
        live = live_rows(layout)
        for part, before in zip((places.slot, places.tables), older[id(places)], strict=True):
            part[live:] = before[live:]

    assert "tokens" in stage.found(SHRINKING, moved(front_only, before=remember))


# Padding and experts. A row's experts read that row alone and no expert has a capacity, so padding
# that chooses experts costs time and cannot change a live token. So the groups are counted.


@contextmanager
def counted_groups(counts: list[tuple[int, int]]) -> Iterator[None]:
    """Of each product of a replay, its rows in groups, and the choices of live tokens."""
    stops, replay = products._stops, AscendRecording.replay
    live: list[int] = []

    def stopping(*given: Any) -> list[int]:
        found = stops(*given)
        counts.extend((found[-1], choices) for choices in live)
        return found

    def replaying(self: AscendRecording, layout: RowLayout) -> None:
        live.append(TinyHybridSizes.chosen * layout.starts[live_rows(layout)])
        replay(self, layout)
        live.clear()

    with (
        patch.object(products, "_stops", stopping),
        patch.object(AscendRecording, "replay", replaying),
    ):
        yield


def test_padded_tokens_are_in_no_group(stage: Stage) -> None:
    """The same as below, without the fault."""
    counts: list[tuple[int, int]] = []
    assert stage.found(EXPERTS, counted_groups(counts)) == ["", ""]
    assert len(counts) > 10
    assert all(rows == choices for rows, choices in counts)


def test_padded_tokens_that_choose_experts_are_counted(stage: Stage) -> None:
    """vllm-ascend #7460: padded rows are not marked as such, and take part like live ones."""
    counts: list[tuple[int, int]] = []
    with patch.object(Batch, "routed", lambda batch, choice: choice):
        assert stage.found(EXPERTS, counted_groups(counts)) == ["", ""]
    assert len(counts) > 10
    assert all(rows > choices for rows, choices in counts)
