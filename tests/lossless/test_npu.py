"""The NPU backend on the emulation of its operators: captured, speculative and plain runs agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from surefoot.backend.ascend.backend import AscendBackend
from surefoot.backend.ascend.emulate import EmulatedVendor, Profile
from surefoot.backend.ascend.machine import emulated_backend
from surefoot.backend.reads import HostReads
from surefoot.capture import CapturedCall
from surefoot.config import make_config
from surefoot.draft.drafter import DraftRow
from surefoot.draft.mtp import MtpDrafter
from surefoot.engine.engine import Engine
from surefoot.engine.runner import ModelForward, ModelRunner
from surefoot.params import SamplingParams
from surefoot.step import Batch
from surefoot.testing.drafters import StatelessDrafter
from surefoot.testing.strategies import pairwise
from surefoot.testing.tiny_hybrids import write_tiny_hybrid
from surefoot.testing.tiny_latents import TinyLatentSizes, write_tiny_latents
from surefoot.testing.tiny_models import write_tiny
from tests.lossless.harness import (
    ARCHITECTURES,
    DIAL,
    HYBRIDS,
    LATENTS,
    PROMPTS,
    SAMPLING,
    Bench,
    Case,
    Counts,
    Run,
    answer_of,
    drain,
)

FACTORS: dict[str, tuple[object, ...]] = {
    "model": ("qwen3", "sliding", "hybrid", "hybrid experts", LATENTS),
    "drafter": ("none", "ngram", "draft-model", "mtp"),
    "depth": (1, 2, 3, 5),
    "sampling": ("greedy", "top-p", "penalties"),
    "chunk": (5, 256),
    "batch": (1, 3),
    "preempt": ("never", "forced"),
    "poison": ("none", "nan", "garbage"),
    "cache": (True, False),
}
HEADLESS = ("qwen3", "sliding")
EMULATED = {"device": "npu", "emulate": True}
SAMPLE = [
    Case("sliding", "draft-model", 2, chunk=5, batch=1, poison="garbage"),
    Case("hybrid experts", "mtp", 3, chunk=5, sampling="penalties", preempt="forced", poison="nan"),
    Case(LATENTS, "mtp", 3, sampling="top-p", preempt="forced", poison="nan"),
]


def every_pair() -> list[Case]:
    chosen: list[dict[str, Any]] = pairwise(FACTORS, seed=13, at_least=24)
    return [
        Case(**each) for each in chosen if each["drafter"] != "mtp" or each["model"] not in HEADLESS
    ]


@pytest.fixture(scope="module")
def npu(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("npu"), EMULATED)


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.model)
def test_tokens_equal_the_plain_run(case: Case, npu: Bench) -> None:
    run = Run(npu, case)
    assert run.finish() == []
    assert run.counts.accepted > 5


@pytest.mark.deep
def test_tokens_equal_the_plain_run_for_every_pair_of_choices(npu: Bench) -> None:
    differences: list[str] = []
    counts = Counts()
    for case in every_pair():
        run = Run(npu, case)
        differences += run.finish()
        counts.add(run.requests)
        run.engine.close()
    assert not differences, "\n".join(differences)
    assert min(counts.partial, counts.cached) > 5
    assert counts.preemptions > 50


class LegalBench(Bench):
    """Models whose sizes the vendor's operators were made for."""

    @staticmethod
    def _write(name: str, folder: Path, drift: float, mixed: bool) -> Path:
        if name == LATENTS:
            return write_tiny_latents(
                folder, TinyLatentSizes(drift=drift, index_dim=128), dial=DIAL
            )
        if name in HYBRIDS:
            return write_tiny_hybrid(
                folder,
                HYBRIDS[name],
                dial=DIAL,
                drift=drift,
                layers=2,
                interval=2,
                head_dim=256,
                linear_key_size=128,
                linear_value_size=128,
            )
        return write_tiny(folder, ARCHITECTURES[name], mixed=mixed, drift=drift, head_dim=128)


LEGAL = [
    Case("qwen3", "draft-model", 3, page=128, sampling="top-p", preempt="forced"),
    Case("hybrid", "mtp", 3, page=128, chunk=5),
    Case(LATENTS, "mtp", 2, page=128, sampling="top-p"),
]


@pytest.mark.parametrize("case", LEGAL, ids=lambda case: case.model)
def test_models_of_legal_sizes_run_within_all_limits(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "surefoot.backend.ascend")
    run = Run(LegalBench(tmp_path, EMULATED), case)
    assert run.finish() == []
    assert run.counts.accepted > 5
    assert "the emulation lifts limits" not in caplog.text


def test_smaller_ones_run_with_limits_lifted_and_it_is_said(
    npu: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "surefoot.backend.ascend")
    fresh = Bench(npu.folder / "smaller", EMULATED)
    answer = fresh.alone(Case("qwen3", "none", 1), (1, 2), SamplingParams(max_tokens=2))
    assert len(answer.tokens) == 2
    assert "heads must have a multiple of 16 up to 512 numbers, not 8" in caplog.text


def test_engines_share_what_the_device_can_hold(tmp_path: Path) -> None:
    """vllm-ascend #2472, #7907: graphs of a second engine exhaust the device's streams."""
    vendor = EmulatedVendor(Profile(size_limits=False, most_graphs=1))
    bench = Bench(tmp_path, EMULATED)
    with patch("surefoot.engine.models.make_backend", lambda *_, **__: emulated_backend(vendor)):
        bench.target("qwen3")
    runs = [Run(bench, Case("qwen3", "right", depth, batch=3)) for depth in (2, 3)]
    assert [run.finish() for run in runs] == [[], []]
    assert [recordings_of(run.engine) for run in runs] == [1, 0]
    # A closed engine gives its graphs back.
    runs[0].engine.close()
    last = Run(bench, Case("qwen3", "right", 2, batch=3))
    assert last.finish() == []
    assert recordings_of(last.engine) == 1


def recordings_of(engine: Engine) -> int:
    """How many steps it has recorded."""
    runner = engine.parts.loop._runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner._forward, ModelForward)
    call = runner._forward._call
    assert isinstance(call, CapturedCall)
    return sum(recorded is not None for recorded in call._recorded.values())


class OneDrafts(StatelessDrafter):
    """Only the first request is drafted for."""

    def guess(self, row: DraftRow) -> list[int]:
        return [1] * row.limit if row.request.id == 1 else []


def test_a_full_step_of_which_one_row_is_wide_fits_a_short_context(npu: Bench) -> None:
    """All padding is then in one row, which is longer than any request."""
    config = make_config(
        **npu.device,
        drafter="ngram",
        draft_tokens=8,
        page_tokens=16,
        max_rows=8,
        max_model_len=32,
        memory=1 << 22,
    )
    engine = Engine(npu.target("qwen3"), config, None, OneDrafts())
    params = replace(SAMPLING["greedy"], max_tokens=6)
    requests = [engine.submit((start, 2, 3), params)[0] for start in range(1, 9)]
    drain(engine)
    assert [request.retries for request in requests] == [0] * 8
    case = Case("qwen3", "none", 0)
    assert [answer_of(request) for request in requests] == [
        npu.alone(case, (start, 2, 3), params) for start in range(1, 9)
    ]


# The loop asks the device for values once a step: for the tokens that were chosen.

ASKED_BY_THE_EMULATION = ("surefoot.backend.ascend.emulate", "surefoot.backend.tape")


def reads_of_steps(engine: Engine) -> Iterator[HostReads]:
    """What the host read in each step but the first ones, which prefill and capture."""
    for prompt in PROMPTS[:3]:
        engine.submit(prompt, SAMPLING["greedy"])
    for _ in range(3):
        engine.step()
    while not engine.idle:
        with HostReads([AscendBackend.read], ASKED_BY_THE_EMULATION) as reads:
            engine.step()
        yield reads
    engine.close()


def speculating(npu: Bench, capture: bool) -> Engine:
    config = make_config(
        **npu.device,
        drafter="mtp",
        draft_tokens=3,
        page_tokens=16,
        max_rows=3,
        memory=1 << 22,
        max_model_len=96,
        capture=capture,
    )
    return Engine(npu.target("hybrid"), config)


@pytest.mark.parametrize("capture", [True, False])
def test_a_step_reads_the_device_once(capture: bool, npu: Bench) -> None:
    reads = list(reads_of_steps(speculating(npu, capture)))
    assert len(reads) > 5
    assert [str(read) for step in reads for read in step.others] == []
    assert {step.allowed for step in reads} == {1}


def test_a_value_that_the_host_asks_for_is_found(npu: Bench) -> None:
    """Planted: the drafter looks at a token before it goes on."""
    next_pass = MtpDrafter._next_pass

    def curious(self: MtpDrafter, rows: Any, drafts: Any, hidden: Any) -> Any:
        assert hidden.sum().item() != 0
        return next_pass(self, rows, drafts, hidden)

    with patch.object(MtpDrafter, "_next_pass", curious):
        others = [read for step in reads_of_steps(speculating(npu, False)) for read in step.others]
    assert others
    assert all("test_npu.py" in str(read) and "item" in str(read) for read in others)


def test_a_value_that_a_captured_step_asks_for_is_refused(npu: Bench) -> None:
    """Planted: the model looks at a token while it is recorded."""
    routed = Batch.routed

    def curious(self: Batch, choice: Any) -> Any:
        return routed(self, choice) if int(self.tokens[0]) >= 0 else choice

    case = Case("hybrid experts", "none", 1, batch=1)
    with patch.object(Batch, "routed", curious):
        run = Run(npu, case)
        assert run.finish()
    assert "no recording can do so" in str(run.requests[0].error)
