import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surefoot.cli.report import Comparison, summary
from surefoot.cli.session import Run as SessionRun
from surefoot.results import Completion, Result, Speculation, Timing
from surefoot.testing.fakes import FakeClock
from tests.unit.cli.commands import Run

Lines = Callable[..., Path]
RESULT_KEYS = {
    "text",
    "token_ids",
    "prompt_tokens",
    "completion_tokens",
    "finish_reason",
    "cached_tokens",
    "speculation",
    "timing",
}
SPECULATION_KEYS = {
    "drafter",
    "drafts",
    "drafted_tokens",
    "accepted_tokens",
    "accept_length",
    "accepted_per_position",
}


def test_json_has_exactly_its_keys(surefoot: Run, tiny: Path) -> None:
    done = surefoot(
        "generate", tiny, "abcabcabc", "--max-tokens", 8, "--drafter", "ngram", "--json"
    )
    assert done.status == 0
    assert done.json.keys() == {"results"}
    (entry,) = done.json["results"]
    assert entry.keys() == RESULT_KEYS
    assert entry["speculation"].keys() == SPECULATION_KEYS
    assert entry["timing"].keys() == {"ttft_s", "decode_tokens_per_s"}
    assert (entry["prompt_tokens"], entry["completion_tokens"]) == (9, 8)
    assert len(entry["token_ids"]) == 8
    assert entry["finish_reason"] == "length"
    assert entry["speculation"]["drafter"] == "ngram"
    assert entry["timing"]["ttft_s"] > 0


def test_logprobs_come_when_asked_for(surefoot: Run, tiny: Path) -> None:
    done = surefoot("generate", tiny, "abc", "--max-tokens", 2, "--logprobs", 1, "--json")
    (entry,) = done.json["results"]
    assert entry.keys() == {*RESULT_KEYS, "logprobs"}
    for token, logprobs in zip(entry["token_ids"], entry["logprobs"], strict=True):
        assert logprobs[str(token)] <= 0


def test_text_goes_out_as_it_grows_and_the_summary_to_stderr(surefoot: Run, tiny: Path) -> None:
    shown = surefoot("generate", tiny, "abc", "--max-tokens", 12, "--drafter", "none")
    entry = surefoot("generate", tiny, "abc", "--max-tokens", 12, "--json").json["results"][0]
    assert shown.status == 0
    assert shown.out == entry["text"] + "\n"
    assert shown.err.startswith("12 tokens, ")
    assert shown.err.endswith(" tok/s, no drafter\n")


def test_the_summary_names_the_drafter(surefoot: Run, tiny: Path) -> None:
    done = surefoot("generate", tiny, "abcabcabc", "--max-tokens", 8, "--drafter", "ngram")
    assert "ngram, accept length " in done.err


def test_without_tokenizer_token_ids_are_shown(surefoot: Run, tiny_ids: Path, lines: Lines) -> None:
    asked = ("generate", tiny_ids, "--file", lines([1, 2, 3]), "--max-tokens", 4)
    entry = surefoot(*asked, "--json").json["results"][0]
    assert surefoot(*asked).out.split() == [str(token) for token in entry["token_ids"]]
    assert surefoot("generate", tiny_ids, "text").error.startswith("prompt: is text")


def test_several_prompts_are_printed_in_the_end(surefoot: Run, tiny: Path) -> None:
    done = surefoot("generate", tiny, "a", "b", "--prompt", "c", "--max-tokens", 2, "--n", 2)
    heads = [line for line in done.out.splitlines() if line.startswith("[")]
    assert heads == ["[1.1]", "[1.2]", "[2.1]", "[2.2]", "[3.1]", "[3.2]"]
    assert done.err.startswith("12 tokens, ")


def test_each_line_of_a_file_has_its_own_sampling(surefoot: Run, tiny: Path, lines: Lines) -> None:
    path = lines(
        "plain",
        {"prompt": [1, 2], "max_tokens": 3, "n": 2, "temperature": 1, "seed": 4},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    )
    done = surefoot("generate", tiny, "--file", path, "--max-tokens", 5, "--json")
    counts = [entry["completion_tokens"] for entry in done.json["results"]]
    assert counts == [5, 3, 3, 1]
    lengths = [entry["prompt_tokens"] for entry in done.json["results"]]
    assert lengths == [5, 2, 2, len("user: hi\nassistant:")]


def test_chat_goes_through_the_template(surefoot: Run, tiny: Path) -> None:
    done = surefoot("generate", tiny, "hi", "--chat", "--system", "s", "--max-tokens", 1, "--json")
    rendered = "system: s\nuser: hi\nassistant:"
    assert done.json["results"][0]["prompt_tokens"] == len(rendered)


def test_a_prompt_may_come_through_a_pipe(surefoot: Run, tiny: Path) -> None:
    done = surefoot("generate", tiny, "--max-tokens", 1, "--json", stdin="piped\n")
    assert done.json["results"][0]["prompt_tokens"] == len("piped")


def test_nothing_to_continue_is_a_mistake(surefoot: Run, tiny: Path) -> None:
    assert surefoot("generate", tiny).error.startswith("prompt: none was given")


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        (["--drafter", "mtp"], "drafter"),
        (["--max-model-len", "100000"], "max_model_len"),
        (["--dtype", "bfloat16", "--device", "reference"], "dtype"),
        (["--memory", "1KiB", "--max-model-len", "512"], "memory"),
        (["--logit-bias", '{"5000": 1}'], "logit_bias"),
        (["--draft-model", "no/such/model"], "model"),
    ],
)
def test_what_does_not_suit_the_model_is_named(
    surefoot: Run, tiny: Path, arguments: list[str], parameter: str
) -> None:
    assert surefoot("generate", tiny, "abc", *arguments).error.startswith(f"{parameter}: ")


def test_a_prompt_that_is_too_long_is_named(surefoot: Run, tiny: Path) -> None:
    assert surefoot("generate", tiny, "a" * 600).error.startswith("prompt: has 600 tokens")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Says how long runs have been repeated; as it stands still, they are as often as can be."""
    clock = FakeClock()
    monkeypatch.setattr("surefoot.cli.generate.perf_counter", clock)
    return clock


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("sampling", [[], ["--temperature", "1"]])
def test_compare_finds_the_same_tokens(
    surefoot: Run, tiny: Path, tiny_draft: Path, sampling: list[str]
) -> None:
    flags = ["--draft-model", tiny_draft, "--draft-tokens", 3, "--max-tokens", 12, *sampling]
    done = surefoot("generate", tiny, "abc", *flags, "--compare", "--json")
    assert done.status == 0
    assert done.json.keys() == {"results", "comparison"}
    comparison = done.json["comparison"]
    assert comparison["identical"] is True
    assert comparison["drafter"] == "draft-model"
    assert comparison["speedup"] == pytest.approx(
        comparison["tokens_per_s"] / comparison["plain_tokens_per_s"]
    )
    assert comparison["accept_length"] > 1
    assert comparison["times"] == 9
    assert done.json["results"][0]["speculation"]["accept_length"] > 1


@pytest.mark.usefixtures("clock")
def test_compare_tells_people_too(surefoot: Run, tiny: Path) -> None:
    done = surefoot("generate", tiny, "abcabc", "--max-tokens", 4, "--compare")
    assert done.status == 0
    plain, with_drafter = done.err.splitlines()[1], done.err.splitlines()[0]
    assert with_drafter.startswith("ngram ")
    assert plain.startswith("no drafter ")
    assert done.err.splitlines()[-1] == "output identical: yes"
    assert done.err.splitlines()[-2].endswith("x, medians of 9 runs in turn")


def test_long_runs_are_not_repeated_for_long(surefoot: Run, tiny: Path, clock: FakeClock) -> None:
    clock.tick = 3.0
    done = surefoot("generate", tiny, "abcabc", "--max-tokens", 4, "--compare", "--json")
    assert done.json["comparison"]["times"] == 2


def test_compare_finds_other_tokens(
    surefoot: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep_all(drafts: list[int], _chosen: list[int]) -> int:
        return len(drafts)

    monkeypatch.setattr("surefoot.engine.loop.accepted", keep_all)
    done = surefoot(
        *("generate", tiny, "abcabcabcabc", "--max-tokens", 40, "--compare"),
        *("--drafter", "ngram", "--draft-tokens", 4, "--ngram-min", 1),
    )
    assert done.status == 1
    assert done.err.splitlines()[-1] == "output identical: no"


def test_compare_needs_a_drafter(surefoot: Run, tiny: Path) -> None:
    done = surefoot("generate", tiny, "abc", "--drafter", "none", "--compare")
    assert done.error.startswith("compare: ")


def test_compare_has_a_prompt_of_its_own(surefoot: Run, tiny: Path) -> None:
    done = surefoot("generate", tiny, "--compare", "--max-tokens", 2, "--json")
    assert done.json["results"][0]["prompt_tokens"] > 100
    assert "class Reader" in done.err


def test_a_request_that_fails_is_named_and_counts(
    surefoot: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_chosen(logits: Tensor, *_: object) -> Tensor:
        return torch.full((len(logits),), -1)

    monkeypatch.setattr("surefoot.engine.runner.try_choose", nothing_chosen)
    done = surefoot("generate", tiny, "abc", "--max-tokens", 4, "--json")
    assert done.status == 1
    assert done.json["results"][0]["finish_reason"] == "error"
    assert done.err.startswith("surefoot: a request failed: ")


def result(*token_ids: int, drafts: int = 0, accepted: int = 0) -> Result:
    return Result(
        prompt=None,
        prompt_token_ids=(1, 2, 3),
        prompt_logprobs=None,
        outputs=(Completion(0, "", token_ids, "length", None, None),),
        cached_tokens=2,
        speculation=Speculation("ngram", drafts, 9, accepted, 9.0, ()),
        timing=Timing(1.0, 2.0),
    )


def test_accept_length_is_over_all_prompts() -> None:
    results = [result(5, drafts=1, accepted=3), result(6, 7, drafts=3, accepted=1)]
    line = "3 tokens, 4.0 tok/s, ngram, accept length 2.00, 4 of 6 prompt tokens from the cache"
    assert summary(results, 4.0) == line


def test_a_comparison_sees_a_single_token() -> None:
    drafted = SessionRun([result(5, 6, drafts=1, accepted=1)], 30.0)
    comparison = Comparison.of([drafted], [SessionRun([result(5, 7)], 10.0)])
    assert not comparison.identical
    assert comparison.speedup == 3.0
    assert Comparison.of([drafted], [drafted]).identical
    assert json.loads(json.dumps(comparison.entry())).keys() == {
        "drafter",
        "tokens_per_s",
        "plain_tokens_per_s",
        "accept_length",
        "identical",
        "speedup",
        "times",
    }


def test_a_comparison_takes_medians_and_sees_every_run() -> None:
    fast, slow = SessionRun([result(5)], 30.0), SessionRun([result(5)], 3.0)
    comparison = Comparison.of([fast, slow, fast], [slow, slow, fast])
    assert comparison.speedup == 10.0
    assert comparison.identical
    other = SessionRun([result(6)], 30.0)
    assert not Comparison.of([fast, other], [fast, fast]).identical
    assert not Comparison.of([fast, fast], [fast, other]).identical


def test_nothing_to_time_is_no_division_by_zero() -> None:
    run = SessionRun([result(5)], 0.0)
    assert Comparison.of([run], [run]).speedup == 0.0
