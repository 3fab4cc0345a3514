"""`surefoot check` as it is typed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.main import main
from surefoot.testing.faults import planted
from surefoot.testing.tiny_models import write_tiny_llama

Run = Callable[..., tuple[int, str, str]]

QUICK = ("--new-tokens", 4, "--prompt-tokens", 9, "--batch", 2, "--page-tokens", 4, "--tokens", 40)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], folder: Path) -> Run:
    """Checks the tiny target with some flags; gives status, stdout and stderr."""

    def check(*flags: object) -> tuple[int, str, str]:
        status = main(["check", str(folder / "target"), *map(str, flags)])
        out, err = capsys.readouterr()
        return status, out, err

    return check


def error(run: Run, *flags: object) -> str:
    status, out, err = run(*flags)
    assert (status, out) == (2, ""), err
    assert err.count("\n") == 1
    return err.removeprefix("surefoot: error: ").rstrip("\n")


def test_a_table_and_a_last_line(run: Run) -> None:
    status, out, err = run(*QUICK)
    assert status == 0
    lines = out.splitlines()
    assert lines[-1].startswith("PASS: ")
    assert any("batch=2" in line for line in lines[:-1])
    assert "PASS" not in err


def test_json_is_one_object(run: Run, folder: Path) -> None:
    status, out, _ = run(*QUICK, "--json", "--drafter", "ngram,replay", "--draft-tokens", "2")
    content: Any = json.loads(out)
    assert status == 0
    assert content["passed"] is True
    assert content["bitwise"] is True
    assert content["model"] == str(folder / "target")
    assert content["tokens_compared"] >= 40
    assert {case["drafter"] for case in content["cases"]} <= {"ngram", "replay"}
    assert {(case["draft_tokens"], case["batch"]) for case in content["cases"]} == {(2, 2)}


def test_a_difference_is_shown_and_ends_with_status_1(run: Run) -> None:
    with planted("wrong draft kept"):
        status, out, err = run(*QUICK, "--drafter", "wrong", "--draft-tokens", "3")
    assert status == 1
    assert out.splitlines()[-1].startswith("FAIL: ")
    assert " expected, " in out
    assert "differences" in err


def test_the_mode_without_bitwise(run: Run) -> None:
    _, out, _ = run(*QUICK, "--no-bitwise", "--json")
    assert json.loads(out)["bitwise"] is False


def test_a_draft_model_is_checked(run: Run, folder: Path) -> None:
    flags = ("--draft-model", folder / "draft", "--drafter", "draft-model", "--json")
    _, out, _ = run(*QUICK, *flags)
    assert {case["drafter"] for case in json.loads(out)["cases"]} == {"draft-model"}


def test_cache_and_chunk_can_be_held_fast(run: Run) -> None:
    _, out, _ = run(*QUICK, "--no-prefix-cache", "--prefill-chunk", 7, "--json")
    cases = json.loads(out)["cases"]
    assert {(case["prefix_cache"], case["chunk"]) for case in cases} == {(False, 7)}


def test_prompts_from_a_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('[1, 2, 3, 4, 5, 6]\n{"prompt": [1, 2, 3, 4, 9]}\n')
    status, out, _ = run("--prompts", file, "--new-tokens", 3, "--tokens", 10, "--json")
    assert status == 0
    assert json.loads(out)["tokens_compared"] >= 10


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drafter", "oracle"], "drafter: 'oracle' is unknown"),
        (["--drafter", "ngram,,wrong"], "drafter: must be a value or several"),
        (["--drafter", "draft-model"], "draft_model: the drafter 'draft-model' needs one"),
        (["--drafter", "mtp"], "drafter: 'mtp' needs a draft head"),
        (["--draft-model", "x", "--drafter", "ngram"], "draft_model: has no use"),
        (["--draft-tokens", "99"], "draft_tokens: must be a whole number"),
        (["--draft-tokens", "some"], "draft_tokens: must be a whole number or auto"),
        (["--batch", "0"], "batch: must be a whole number of at least 1"),
        (["--batch", "1,x"], "batch: must be a whole number of at least 1"),
        (["--tokens", "0"], "tokens: must be at least 1, not 0"),
        (["--new-tokens", "-3"], "new_tokens: must be at least 1, not -3"),
        (["--long-tokens", "9999"], "long_tokens: 9999 of them do not fit a context of"),
        (["--long-tokens", "-1"], "long_tokens: must be at least 0, not -1"),
        (["--new-tokens", "600"], "new_tokens: 600 of them leave no room"),
        (["--prompt-tokens", "0"], "prompt_tokens: must be at least 1, not 0"),
        (["--seed", "-1"], "seed: must be from 0 to"),
        (["--max-rows", "4"], "max_rows: has no use in a check: use batch"),
        (["--max-step-tokens", "64"], "max_step_tokens: has no use in a check"),
        (["--memory", "100"], "memory: "),
        (["--prompts", "/nowhere.jsonl"], "prompts: /nowhere.jsonl cannot be read"),
    ],
)
def test_a_mistake_is_one_line(run: Run, flags: list[str], message: str) -> None:
    assert error(run, *flags).startswith(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"some text"', "prompt: is text, but the checkpoint has no tokenizer"),
        ("[]", "prompt: is empty"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "prompts: "),
        ('{"prompt": [1], "temperature": 1}', "prompts: "),
        ("[1, 99]", "prompt: token id 99 is outside the vocabulary"),
        (json.dumps([1] * 600), "prompt: has 600 tokens"),
    ],
)
def test_a_bad_prompt_is_one_line(run: Run, tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    assert error(run, "--prompts", file).startswith(message)


def test_built_in_prompts_are_cut_to_a_small_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_llama(tmp_path / "small", positions=32)
    assert main(["check", str(folder), "--tokens", "10", "--new-tokens", "8"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASS")
