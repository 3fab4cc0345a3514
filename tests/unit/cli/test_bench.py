from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.cli.asks import Ask
from surefoot.cli.bench import LoadOptions
from surefoot.cli.lanes import Lane, Texts
from surefoot.cli.measure import Load, Trial, measure, time_batch
from surefoot.cli.prompts import PROMPT_TOKENS, TEXTS
from surefoot.cli.show import Screen
from surefoot.config import EngineConfig
from surefoot.engine.engine import Engine
from surefoot.engine.models import LoadedModel, load
from surefoot.engine.rows import Emission
from surefoot.errors import SettingError, SurefootError
from tests.unit.cli.commands import Run

Lines = Callable[..., Path]
RUN_KEYS = [
    "batch",
    "drafter",
    "draft_tokens",
    "prompt_tokens",
    "new_tokens",
    "decode_tokens_per_s",
    "prefill_tokens_per_s",
    "ttft_s",
    "accept_length",
    "speedup",
]
SMALL = ("--new-tokens", 6, "--prompt-tokens", 12, "--repeats", 1)


@pytest.fixture(scope="module")
def target(tiny: Path) -> LoadedModel:
    return load(str(tiny), EngineConfig())


@pytest.fixture(scope="module")
def bare(tiny_ids: Path) -> LoadedModel:
    return load(str(tiny_ids), EngineConfig())


def test_a_run_for_each_batch_drafter_and_depth(surefoot: Run, tiny: Path) -> None:
    done = surefoot(
        *("bench", tiny, "--batch", "1,3", "--drafter", "ngram,none", "--draft-tokens", "1,4"),
        *(*SMALL, "--json"),
    )
    assert done.status == 0
    assert done.json.keys() == {"runs", "peak_memory_bytes"}
    assert done.json["peak_memory_bytes"] > 1 << 20
    runs = done.json["runs"]
    assert all(list(run) == RUN_KEYS for run in runs)
    kinds = [(run["batch"], run["drafter"], run["draft_tokens"]) for run in runs]
    one = [(1, "none", 0), (1, "ngram", 1), (1, "ngram", 4)]
    assert kinds == one + [(3, *kind[1:]) for kind in one]
    assert {(run["prompt_tokens"], run["new_tokens"]) for run in runs} == {(12, 6)}
    for run in runs:
        assert run["decode_tokens_per_s"] > 0
        assert run["prefill_tokens_per_s"] > 0
        assert run["ttft_s"] > 0


def test_speedup_is_against_no_drafter_of_the_same_batch(surefoot: Run, tiny: Path) -> None:
    flags = ("--batch", "1,2", "--drafter", "ngram", "--draft-tokens", "2")
    runs = surefoot("bench", tiny, *flags, *SMALL, "--json").json["runs"]
    for plain, drafted in (runs[:2], runs[2:]):
        assert (plain["drafter"], plain["speedup"]) == ("none", 1.0)
        ratio = drafted["decode_tokens_per_s"] / plain["decode_tokens_per_s"]
        assert drafted["speedup"] == pytest.approx(ratio)


def test_a_draft_model_is_measured(surefoot: Run, tiny: Path, tiny_draft: Path) -> None:
    flags = ("--draft-model", tiny_draft, "--draft-tokens", "3")
    runs = surefoot("bench", tiny, *flags, *SMALL, "--json").json["runs"]
    assert [run["drafter"] for run in runs] == ["none", "draft-model"]
    assert runs[0]["accept_length"] == 1 < runs[1]["accept_length"]


def test_auto_that_means_a_named_drafter_comes_once(surefoot: Run, tiny: Path) -> None:
    flags = ("--drafter", "ngram,auto", "--draft-tokens", "2")
    runs = surefoot("bench", tiny, *flags, *SMALL, "--json").json["runs"]
    assert [run["drafter"] for run in runs] == ["none", "ngram"]


def test_tokens_decide_how_often_each_kind_is_timed() -> None:
    load = LoadOptions(tokens=100, new_tokens=8)
    assert [load.runs(batch) for batch in (1, 4, 16)] == [13, 4, 1]
    assert LoadOptions(repeats=5).runs(4) == 5


def test_every_kind_is_timed_in_turns(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[str, int]] = []

    def time_nothing(engine: Engine, load: Load) -> Trial:
        timed.append((engine.config.drafter, load.new_tokens))
        return Trial(len(timed), 1.0, 1.0, 1.0)

    monkeypatch.setattr("surefoot.cli.measure.time_batch", time_nothing)
    names = ("none", "ngram")
    engines = [Engine(target, EngineConfig(drafter=name, draft_tokens=2)) for name in names]
    lanes = [Lane(engine, name, 2) for engine, name in zip(engines, names, strict=True)]
    runs = measure(lanes, [Load([[1, 2]], 20, 3)], Screen())
    assert timed == [(name, 8) for name in names] + [(name, 20) for name in names] * 3
    # The speeds were 3, 5, 7 and 4, 6, 8.
    assert [run.decode_tokens_per_s for run in runs] == [5, 6]
    assert [run.speedup for run in runs] == [1.0, 1.2]


def test_the_table(surefoot: Run, tiny_ids: Path) -> None:
    done = surefoot("bench", tiny_ids, "--draft-tokens", "2", *SMALL)
    assert done.status == 0
    lines = done.out.splitlines()
    assert lines[1].split()[:4] == ["batch", "drafter", "draft", "prompt"]
    assert lines[3].split()[:5] == ["1", "none", "0", "12", "6"]
    assert lines[4].split()[:3] == ["1", "ngram", "2"]
    assert lines[-1].startswith("peak memory ")
    assert done.err == ""


def test_prompts_of_a_file_keep_their_lengths(surefoot: Run, tiny: Path, lines: Lines) -> None:
    path = lines([1, 2, 3, 4], {"prompt": "eight ch"})
    flags = ("--prompts", path, "--batch", "2", "--drafter", "none", "--new-tokens", 3)
    runs = surefoot("bench", tiny, *flags, "--repeats", 1, "--json").json["runs"]
    assert [run["prompt_tokens"] for run in runs] == [6]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--batch", "0"], "batch: must be a whole number of at least 1"),
        (["--batch", "x"], "batch: must be a whole number"),
        (["--batch", "9", "--max-rows", "8"], "batch: 9 is more than max_rows 8"),
        (["--new-tokens", "1"], "new_tokens: must be at least 2"),
        (["--repeats", "0"], "repeats: must be at least 1"),
        (["--tokens", "0"], "tokens: must be at least 1"),
        (["--prompt-tokens", "0"], "prompt_tokens: must be at least 1"),
        (["--prompt-tokens", "600"], "prompt_tokens: prompts and new tokens are 664 together"),
        (["--max-model-len", "100"], "prompt_tokens: prompts and new tokens are 128 together"),
        (["--random", "--prompts", "x"], "random: contradicts --prompts"),
        (["--drafter", "mtp"], "drafter: 'mtp' needs a draft head"),
        (["--prompts", "none.jsonl"], "file: none.jsonl cannot be read"),
    ],
)
def test_a_mistake_is_named(surefoot: Run, tiny: Path, flags: list[str], line: str) -> None:
    assert surefoot("bench", tiny, *flags).error.startswith(line)


def test_own_texts_are_cut_or_repeated(target: LoadedModel) -> None:
    for length in (5, 700):
        prompts = Texts(None, False, length).prompts(target, 3)
        assert [len(prompt) for prompt in prompts] == [length] * 3
    assert bytes(prompts[0][:20]).decode() == TEXTS[0][:20]
    assert prompts[0][len(TEXTS[0]) :][:9] == prompts[0][:9]
    assert len(Texts(None, False, None).prompts(target, 1)[0]) == PROMPT_TOKENS


def test_no_two_prompts_of_a_large_batch_are_alike(target: LoadedModel) -> None:
    prompts = Texts(None, False, 32).prompts(target, 3 * len(TEXTS))
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)


def test_random_prompts_lie_in_the_vocabulary_and_repeat(bare: LoadedModel) -> None:
    texts = Texts(None, True, 50)
    prompts = texts.prompts(bare, 4)
    assert prompts == texts.prompts(bare, 4)
    assert {token for prompt in prompts for token in prompt} <= set(range(64))
    assert len({tuple(prompt) for prompt in prompts}) == 4
    assert Texts(None, False, 50).prompts(bare, 4) == prompts


def test_the_texts_are_long_enough_not_to_repeat_at_once() -> None:
    assert all(len(text.split()) >= 25 for text in TEXTS)


class Clock:
    """Stands still but for `spend`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Slow(Engine):
    """Each step takes a second on the clock."""

    clock: Clock
    emissions: list[int]

    def step(self) -> list[Emission]:
        emissions = super().step()
        self.clock.now += 1
        self.emissions.append(sum(len(emission.token_ids) for emission in emissions))
        return emissions


def slow(target: LoadedModel, monkeypatch: pytest.MonkeyPatch, **settings: int) -> Slow:
    config = EngineConfig(drafter="none", prefix_cache=False, **settings)  # type: ignore[arg-type]
    engine = Slow(target, config)
    engine.clock, engine.emissions = Clock(), []
    monkeypatch.setattr("surefoot.cli.measure.time.perf_counter", engine.clock.perf_counter)
    return engine


def test_prefill_is_left_out_of_decode_speed(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = slow(target, monkeypatch, prefill_chunk=4, max_step_tokens=32)
    trial = time_batch(engine, Load([[7] * 12, [8] * 4], 5, 1))
    # The short prompt has its first token after one step, the long one after three.
    assert engine.emissions == [1, 1, 2, 2, 2, 1, 1]
    assert trial.ttft_s == 2.0
    assert trial.prefill_tokens_per_s == 16 / 3
    assert trial.decode_tokens_per_s == 6 / 4
    assert trial.accept_length == 1.0


def test_a_request_that_fails_is_not_timed(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_chosen(logits: Tensor, *_: object) -> Tensor:
        return torch.full((len(logits),), -1)

    monkeypatch.setattr("surefoot.engine.runner.try_choose", nothing_chosen)
    with pytest.raises(SurefootError, match="ended early"):
        time_batch(Engine(target, EngineConfig(drafter="none")), Load([[1, 2]], 4, 1))


def test_empty_prompts_are_refused(target: LoadedModel, lines: Lines) -> None:
    with pytest.raises(SettingError, match="a prompt is empty"):
        Texts([Ask(prompt="")], False, None).prompts(target, 1)
