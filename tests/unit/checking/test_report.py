import json

from surefoot.checking.cases import Case
from surefoot.checking.report import FULL_RUN, CaseReport, Difference, Report

CASE = Case(1, 0, 0, "ngram", None, "greedy", 4, True, 5, "calm")
KEYS = [
    "passed",
    "model",
    "tokens_compared",
    "differences",
    "near_ties",
    "longest_answer",
    "cases",
    "partial_accepts",
    "cache_hits",
    "preemptions",
    "bitwise",
    "seconds",
]
CASE_KEYS = [
    "name",
    "drafter",
    "draft_tokens",
    "sampling",
    "batch",
    "prefix_cache",
    "chunk",
    "tokens",
    "longest_answer",
    "differences",
    "first_difference",
]


def report(wanted: int | None = None, bitwise: bool = False, **changes: object) -> Report:
    values: dict[str, object] = {
        "case": CASE,
        "tokens": FULL_RUN,
        "differences": 0,
        "near_ties": 0,
        "first_difference": None,
        "partial_accepts": 100,
        "longest": 1536,
        "cache_hits": 100,
        "preemptions": 100,
    }
    case = CaseReport(**(values | changes))  # type: ignore[arg-type]
    return Report("tiny", bitwise, wanted, [case], 1.25)


def test_a_clean_full_run_passes() -> None:
    assert report(FULL_RUN).passed
    assert report(FULL_RUN).verdict() == (
        "PASS: 20,000 tokens compared in 1 case, 0 differences (0 near ties); "
        "100 partial accepts, 100 cache hits, 100 preemptions, answers of up to 1,536 tokens; 1 s"
    )


def test_one_difference_fails() -> None:
    assert report(differences=1).objections() == ["1 difference"]
    assert report(differences=1).verdict().startswith("FAIL: 1 difference. 20,000 tokens")


def test_nothing_compared_is_no_pass() -> None:
    assert report(tokens=0).objections() == ["no tokens were compared"]


def test_one_near_tie_in_a_thousand_tokens_passes_and_more_fails() -> None:
    assert report(near_ties=20).passed
    assert report(near_ties=21).objections() == ["more than 1 near tie in 1,000 tokens"]


def test_a_full_run_says_which_hard_cases_it_lacks() -> None:
    for name in ("partial_accepts", "cache_hits", "preemptions"):
        short = report(FULL_RUN, False, **{name: 99})
        words = name.replace("_", " ")
        assert short.objections() == [f"only 99 {words}, a full run needs 100"]
        assert not short.passed


def test_a_short_run_needs_no_hard_cases() -> None:
    assert report(FULL_RUN - 1, cache_hits=0, partial_accepts=0, preemptions=0).passed
    assert report(None, cache_hits=0).passed


def test_json_has_the_promised_keys() -> None:
    difference = Difference("prose", 3, 17, None, "it broke")
    entry = report(differences=1, first_difference=difference).as_json()
    assert list(entry) == KEYS
    content = json.loads(json.dumps(entry))
    assert list(content["cases"][0]) == CASE_KEYS
    assert content["cases"][0]["draft_tokens"] == "auto"
    assert content["cases"][0]["first_difference"] == {
        "prompt": "prose",
        "position": 3,
        "expected": 17,
        "got": None,
        "error": "it broke",
    }
    assert content["passed"] is False


def test_a_case_without_difference_has_none() -> None:
    assert report().cases[0].as_json()["first_difference"] is None


def test_differences_in_words() -> None:
    sentence = Difference("prose", 3, 17, None).sentence()
    assert sentence == "prose, new token 3: token 17 expected, the end came"
    assert Difference("", 0, None, None, "a page is lost").sentence() == "a page is lost"


def test_what_a_short_run_never_met_is_told() -> None:
    short = report(FULL_RUN - 1, cache_hits=0, preemptions=0)
    assert short.verdict().endswith(
        "; no cache hits and no preemptions came up: --tokens compares more"
    )
    assert "came up" not in report(FULL_RUN - 1).verdict()
