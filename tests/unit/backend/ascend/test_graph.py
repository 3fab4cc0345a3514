"""Graphs: what a replay does, and every rule of capture, update and replay broken once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.backend.ascend.emulate import (
    RELAXED,
    EmulatedVendor,
    Profile,
    RefusedError,
    SilentError,
)
from surefoot.backend.ascend.emulate.graph import Graph
from surefoot.backend.reads import HostReads
from surefoot.backend.tape import TapeError

BF = torch.bfloat16


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF)


class Decoder:
    """A norm, a cache write and attention over pages, on buffers that stay where they are."""

    def __init__(self, vendor: EmulatedVendor, second: bool = False) -> None:
        self.vendor = vendor
        self.second = second
        self.x = torch.zeros(2, 1, 16, dtype=BF)
        self.slots = torch.zeros(2, 1, dtype=torch.int64)
        self.table = torch.zeros(2, 2, dtype=torch.int32)
        self.keys = torch.zeros(6, 16, 16, dtype=BF)
        self.values = torch.zeros(6, 16, 16, dtype=BF)
        self.key_lengths = [1, 1]

    def fill(self, seed: int, lengths: list[int]) -> None:
        self.x.copy_(draw(2, 1, 16, seed=seed))
        self.key_lengths = lengths
        self.table.copy_(torch.tensor([[3, 1], [2, 5]]))
        for row, length in enumerate(lengths):
            page, offset = divmod(length - 1, 16)
            self.slots[row] = int(self.table[row, page]) * 16 + offset

    def run(self) -> Tensor:
        normed = self.vendor.npu_rms_norm(self.x, torch.ones(16, dtype=BF))[0]
        for pool, factor in ((self.keys, 1), (self.values, 2)):
            entries = normed[:, 0] * factor
            self.vendor.npu_scatter_nd_update_(pool.view(96, 16), self.slots, entries)
        if self.second:
            return self.vendor.npu_fused_infer_attention_score_v2(
                normed,
                self.keys,
                self.values,
                actual_seq_qlen=[1, 2],
                actual_seq_kvlen=self.key_lengths,
                block_table=self.table,
                input_layout="TND",
                block_size=16,
            )[0]
        return self.vendor.npu_fused_infer_attention_score(
            normed,
            self.keys,
            self.values,
            actual_seq_lengths=[1, 2],
            actual_seq_lengths_kv=self.key_lengths,
            block_table=self.table,
            input_layout="TND",
            block_size=16,
        )[0]


def captured(decoder: Decoder, times: int = 1, auto: bool = True) -> tuple[Graph, list[Tensor]]:
    decoder.run()
    graph = decoder.vendor.npu.NPUGraph()
    with decoder.vendor.npu.graph(graph, auto_dispatch_capture=auto):
        outs = [decoder.run() for _ in range(times)]
    return graph, outs


def lengths(key: list[int], second: bool = False) -> dict[str, list[int]]:
    names = ("actual_seq_qlen", "actual_seq_kvlen")
    if not second:
        names = ("actual_seq_lengths", "actual_seq_lengths_kv")
    return dict(zip(names, ([1, 2], key), strict=True))


@pytest.mark.parametrize("second", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("inference", [False, True], ids=["plain", "inference"])
def test_replays_do_what_the_calls_do(inference: bool, second: bool) -> None:
    with torch.inference_mode(inference):
        decoder = Decoder(EmulatedVendor(RELAXED), second)
        graph, (out,) = captured(decoder)
        twin = Decoder(EmulatedVendor(RELAXED), second)
        twin.run()
        for step in ([1, 15], [2, 16], [3, 17], [4, 18]):
            decoder.fill(step[0], step)
            twin.fill(step[0], step)
            want = twin.run()
            graph.update(cpu_update_input=[lengths(step, second)])
            graph.replay()
            assert torch.equal(out, want)
            assert torch.equal(decoder.keys, twin.keys)
            assert torch.equal(decoder.values, twin.values)


def test_a_capture_leaves_nothing_behind() -> None:
    decoder = Decoder(EmulatedVendor(RELAXED))
    decoder.fill(1, [1, 15])
    decoder.run()
    decoder.fill(2, [2, 16])
    before = decoder.keys.clone()
    _, (out,) = captured_without_warm_up(decoder)
    assert torch.equal(decoder.keys, before)
    assert bool(out.isnan().all())


def captured_without_warm_up(decoder: Decoder) -> tuple[Graph, list[Tensor]]:
    graph = decoder.vendor.npu.NPUGraph()
    with decoder.vendor.npu.graph(graph, auto_dispatch_capture=True):
        out = decoder.run()
    return graph, [out]


def test_one_mapping_serves_all_calls_or_each_has_its_own() -> None:
    decoder = Decoder(EmulatedVendor(RELAXED))
    graph, (first, second) = captured(decoder, times=2)
    decoder.fill(1, [2, 16])
    graph.update([lengths([2, 16])])
    graph.replay()
    assert torch.equal(first, second)
    graph.update([lengths([2, 16]), lengths([1, 15])])
    graph.replay()
    assert not torch.equal(first, second)


def test_a_graph_without_lengths_needs_no_update() -> None:
    vendor = EmulatedVendor(RELAXED)
    x, gamma = draw(2, 8), torch.ones(8, dtype=BF)
    vendor.npu_rms_norm(x, gamma)
    graph = vendor.npu.NPUGraph()
    with vendor.npu.graph(graph):
        out = vendor.npu_rms_norm(x, gamma)[0]
    x.copy_(draw(2, 8, seed=3))
    graph.replay()
    graph.replay()
    assert torch.equal(out, vendor.npu_rms_norm(x, gamma)[0])


def test_contracts_hold_in_each_replay() -> None:
    decoder = Decoder(EmulatedVendor(RELAXED))
    graph, _ = captured(decoder)
    decoder.table.fill_(6)
    graph.update([lengths([1, 1])])
    with pytest.raises(SilentError, match="block_table"):
        graph.replay()


def wrong(rule: str, error: type[Exception], call: Callable[[Decoder, Graph], object]) -> Any:
    return pytest.param(rule, error, call, id=rule)


def capture_in_capture(decoder: Decoder, graph: Graph) -> None:
    other, inner = decoder.vendor.npu.NPUGraph(), decoder.vendor.npu.NPUGraph()
    with decoder.vendor.npu.graph(other), decoder.vendor.npu.graph(inner):
        pass


def in_capture(decoder: Decoder, call: Callable[[], object]) -> None:
    with decoder.vendor.npu.graph(decoder.vendor.npu.NPUGraph()):
        call()


def capture_again(decoder: Decoder, graph: Graph) -> None:
    with decoder.vendor.npu.graph(graph):
        pass


def other_shapes(decoder: Decoder, graph: Graph) -> None:
    x = torch.zeros(3, 1, 16, dtype=BF)
    in_capture(decoder, lambda: decoder.vendor.npu_rms_norm(x, torch.ones(16, dtype=BF)))


def updated(values: Mapping[str, Any], times: int = 1) -> Callable[[Decoder, Graph], None]:
    return lambda decoder, graph: graph.update([values] * times)


def replay_twice(decoder: Decoder, graph: Graph) -> None:
    graph.update([lengths([1, 1])])
    graph.replay()
    graph.replay()


@pytest.mark.parametrize(
    ("rule", "error", "call"),
    [
        wrong("stale lengths", SilentError, lambda decoder, graph: graph.replay()),
        wrong("stale lengths", SilentError, replay_twice),
        wrong("unknown key", SilentError, updated({**lengths([1, 1]), "actual_seq_kvlen": [1, 1]})),
        wrong("unknown key", SilentError, updated(lengths([1, 1], second=True))),
        wrong("missing key", SilentError, updated({"actual_seq_lengths_kv": [1, 1]})),
        wrong("number of mappings", RefusedError, updated(lengths([1, 1]), times=2)),
        wrong("number of mappings", RefusedError, updated(lengths([1, 1]), times=0)),
        wrong("number of lengths", RefusedError, updated(lengths([1, 1, 1]))),
        wrong(
            "host list",
            RefusedError,
            updated({**lengths([1, 1]), "actual_seq_lengths_kv": torch.tensor([1, 1])}),
        ),
        wrong("in a capture", RefusedError, capture_in_capture),
        wrong("in a capture", RefusedError, lambda d, g: in_capture(d, d.vendor.npu.synchronize)),
        wrong("in a capture", RefusedError, lambda d, g: in_capture(d, g.replay)),
        wrong("captured twice", RefusedError, capture_again),
        wrong("warm-up", RefusedError, other_shapes),
        wrong("no capture", RefusedError, lambda d, g: d.vendor.npu.NPUGraph().replay()),
        wrong(
            "auto_dispatch_capture",
            RefusedError,
            lambda d, g: captured(d, auto=False)[0].update([lengths([1, 1])]),
        ),
        wrong(
            "auto_dispatch_capture",
            RefusedError,
            lambda d, g: d.vendor.npu.NPUGraph().update([lengths([1, 1])]),
        ),
        wrong("stale lengths", SilentError, lambda d, g: captured(d, auto=False)[0].replay()),
    ],
)
def test_a_broken_rule_is_caught(
    rule: str, error: type[RefusedError], call: Callable[[Decoder, Graph], object]
) -> None:
    decoder = Decoder(EmulatedVendor(RELAXED))
    graph, _ = captured(decoder)
    with pytest.raises(error) as caught:
        call(decoder, graph)
    assert caught.value.rule == rule
    # Nothing has been spoilt.
    graph.update([lengths([1, 1])])
    graph.replay()
    assert not decoder.vendor.npu.is_current_stream_capturing()


def test_a_read_in_a_capture_is_refused() -> None:
    decoder = Decoder(EmulatedVendor(RELAXED))
    with pytest.raises(TapeError, match="tolist"):
        in_capture(decoder, decoder.slots.tolist)
    with pytest.raises(TapeError, match="tensor"):
        in_capture(decoder, lambda: torch.tensor([1, 2]))


def test_the_device_holds_so_many_graphs() -> None:
    decoder = Decoder(EmulatedVendor(Profile(size_limits=False, most_graphs=2)))
    first, _ = captured(decoder)
    held = [first, captured(decoder)[0]]
    with pytest.raises(RefusedError) as caught:
        captured(decoder)
    assert caught.value.rule == "device resources"
    first.reset()
    held.append(captured(decoder)[0])
    held.clear()
    captured(decoder)


def test_a_capture_that_fails_takes_no_room() -> None:
    decoder = Decoder(EmulatedVendor(Profile(size_limits=False, most_graphs=1)))
    graph = decoder.vendor.npu.NPUGraph()
    with pytest.raises(TapeError), decoder.vendor.npu.graph(graph):
        decoder.slots.tolist()
    other, _ = captured(decoder)
    with pytest.raises(RefusedError, match="no stream left"), decoder.vendor.npu.graph(graph):
        pass
    other.reset()
    with decoder.vendor.npu.graph(graph):
        pass
    graph.replay()


def test_the_device_tells_about_itself() -> None:
    vendor = EmulatedVendor(RELAXED)
    free, total = vendor.npu.mem_get_info()
    assert 0 < free <= total
    assert vendor.npu.synchronizations == 0
    vendor.npu.synchronize()
    assert vendor.npu.synchronizations == 1
    pool = vendor.npu.graph_pool_handle()
    graph = vendor.npu.NPUGraph()
    with vendor.npu.graph(graph, pool=pool, stream=None, capture_error_mode="global"):
        assert vendor.npu.is_current_stream_capturing()
    assert vendor.npu.synchronizations == 2
    assert graph.pool() is graph.pool()


def test_operators_read_what_they_like_and_callers_do_not() -> None:
    decoder = Decoder(EmulatedVendor(RELAXED))
    with HostReads(device=["surefoot.backend.ascend.emulate"]) as reads:
        decoder.run()
        decoder.slots.tolist()
    assert [read.call for read in reads.others] == ["tolist"]
