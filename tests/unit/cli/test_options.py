import inspect
from dataclasses import fields
from typing import Any

import pytest
from cyclopts import App

from surefoot.cli.options import (
    ENGINE_DEFAULTS,
    SAMPLING_DEFAULTS,
    EngineOptions,
    SamplingOptions,
    TheirOptions,
    comma_list,
    read_depth,
    whole_list,
    without_drafter,
)
from surefoot.config import LOSSY, EngineConfig
from surefoot.errors import SettingError
from surefoot.params import SamplingParams


def parse(*arguments: str) -> tuple[EngineOptions, SamplingOptions]:
    app = App()

    @app.default
    def command(
        engine: EngineOptions = ENGINE_DEFAULTS, sampling: SamplingOptions = SAMPLING_DEFAULTS
    ) -> tuple[EngineOptions, SamplingOptions]:
        return engine, sampling

    parsed: tuple[EngineOptions, SamplingOptions] = app(
        list(arguments), exit_on_error=False, print_error=False, result_action="return_value"
    )
    return parsed


def config(*arguments: str) -> EngineConfig:
    return parse(*arguments)[0].single()


def test_every_setting_is_a_flag() -> None:
    ours = {field.name for field in fields(EngineOptions)}
    assert {field.name for field in fields(EngineConfig)} <= ours
    assert ours - {field.name for field in fields(EngineConfig)} == {"config", "theirs"}


def test_every_refused_setting_is_a_flag() -> None:
    assert LOSSY.keys() <= {field.name for field in fields(TheirOptions)}


def test_sampling_flags_are_sampling_params() -> None:
    known = {field.name for field in fields(SamplingParams)}
    assert {field.name for field in fields(SamplingOptions)} <= known


def test_no_flags_mean_the_defaults() -> None:
    assert config() == EngineConfig()
    assert SAMPLING_DEFAULTS.over(SamplingParams()) == SamplingParams()


@pytest.mark.parametrize(
    ("arguments", "field", "expected"),
    [
        ("--drafter ngram", "drafter", "ngram"),
        ("--draft-tokens 0", "draft_tokens", 0),
        ("--draft-tokens auto", "draft_tokens", None),
        ("--dtype bfloat16", "dtype", "bfloat16"),
        ("--device reference", "device", "reference"),
        ("--bitwise", "bitwise", True),
        ("--no-bitwise", "bitwise", False),
        ("--memory 512MiB", "memory", 512 << 20),
        ("--max-model-len 99", "max_model_len", 99),
        ("--context-length 99", "max_model_len", 99),
        ("--page-tokens 8", "page_tokens", 8),
        ("--page-size 8", "page_tokens", 8),
        ("--block-size 8", "page_tokens", 8),
        ("--max-rows 3", "max_rows", 3),
        ("--max-num-seqs 3", "max_rows", 3),
        ("--max-running-requests 3", "max_rows", 3),
        ("--max-step-tokens 77", "max_step_tokens", 77),
        ("--max-num-batched-tokens 77", "max_step_tokens", 77),
        ("--prefill-chunk 16", "prefill_chunk", 16),
        ("--chunked-prefill-size 16", "prefill_chunk", 16),
        ("--prefix-cache", "prefix_cache", True),
        ("--no-prefix-cache", "prefix_cache", False),
        ("--enable-prefix-caching", "prefix_cache", True),
        ("--no-enable-prefix-caching", "prefix_cache", False),
        ("--disable-radix-cache", "prefix_cache", False),
        ("--points 6", "points", 6),
        ("--point-every 24", "point_every", 24),
        ("--ngram-max 7", "ngram_max", 7),
        ("--ngram-min 1", "ngram_min", 1),
        ("--max-waiting 5", "max_waiting", 5),
        ("--threads 2", "threads", 2),
        ("--revision v1", "revision", "v1"),
        ("--speculative-algorithm NGRAM", "drafter", "ngram"),
        ("--speculative-algorithm NEXTN", "drafter", "mtp"),
        (
            "--speculative-algorithm STANDALONE --speculative-draft-model-path d",
            "draft_model",
            "d",
        ),
        (
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 5",
            "draft_tokens",
            4,
        ),
        (
            "--speculative-algorithm NGRAM --speculative-num-steps 4 --speculative-eagle-topk 1",
            "draft_tokens",
            4,
        ),
        (
            '--speculative-config {"method":"ngram","num_speculative_tokens":3}',
            "draft_tokens",
            3,
        ),
        (
            "--draft-tokens 4 --speculative-algorithm NGRAM --speculative-num-draft-tokens 5",
            "draft_tokens",
            4,
        ),
    ],
)
def test_a_flag_sets_its_setting(arguments: str, field: str, expected: object) -> None:
    assert getattr(config(*arguments.split()), field) == expected


@pytest.mark.parametrize(
    ("arguments", "parameter", "reason"),
    [
        ("--speculative-accept-threshold-single 0.5", None, "not offered"),
        ("--speculative-accept-threshold-acc 0.5", None, "not offered"),
        ("--rejection-sample-method standard", None, "not offered"),
        ("--posterior-threshold 0.1", None, "not offered"),
        ("--posterior-alpha 0.1", None, "not offered"),
        ("--trust-remote-code", None, "never run"),
        ("--speculative-algorithm NGRAM --speculative-eagle-topk 4", "speculative_eagle_topk", "1"),
        ("--speculative-algorithm EAGLE", "speculative_algorithm", "'EAGLE' is unknown"),
        (
            "--draft-tokens 5 --speculative-algorithm NGRAM --speculative-num-draft-tokens 5",
            "draft_tokens",
            "contradicts",
        ),
        ("--drafter bogus", "drafter", "'bogus' is unknown"),
        ("--drafter none,ngram", "drafter", "unknown"),
        ("--drafter draft-model", "draft_model", "needs one"),
        ("--drafter ngram --draft-model d", "draft_model", "no use"),
        ("--draft-tokens many", "draft_tokens", "must be a whole number or auto"),
        ("--draft-tokens -1", "draft_tokens", "must be a whole number or auto"),
        ("--point-every 0", "point_every", "must be a whole number from 1 to 1048576, not 0"),
        ("--draft-tokens 17", "draft_tokens", "from 0 to 16"),
        ("--max-rows 0", "max_rows", "at least 1|from 1"),
        ("--max-rows 64 --max-step-tokens 8", "max_step_tokens", "less than max_rows"),
    ],
)
def test_an_impossible_setting_is_named(arguments: str, parameter: str | None, reason: str) -> None:
    named = parameter or arguments.split()[0].lstrip("-").replace("-", "_")
    with pytest.raises(SettingError, match=reason) as caught:
        config(*arguments.split())
    assert caught.value.parameter == named


def kinds(options: EngineOptions, **defaults: object) -> list[tuple[str, int | None]]:
    found = options.several("none,auto", "auto", **defaults)
    return [(config.drafter, config.draft_tokens) for config in found]


def test_lists_make_a_config_for_each_kind() -> None:
    options, _ = parse("--drafter", "none,ngram", "--draft-tokens", "2,auto,2")
    assert kinds(options) == [("none", None), ("ngram", 2), ("ngram", None)]


def test_without_lists_the_commands_own_hold() -> None:
    assert kinds(ENGINE_DEFAULTS) == [("none", None), ("auto", None)]


def test_only_drafters_that_need_a_draft_model_get_it() -> None:
    options, _ = parse("--drafter", "none,ngram,draft-model,auto", "--draft-model", "d")
    found = {config.drafter: config.draft_model for config in options.several("none", "auto")}
    assert found == {"none": None, "ngram": None, "draft-model": "d", "auto": "d"}


def test_the_commands_own_settings_give_way_to_flags() -> None:
    options, _ = parse("--max-rows", "5")
    found = options.several("none", "auto", max_rows=9, prefix_cache=False)
    assert [(config.max_rows, config.prefix_cache) for config in found] == [(5, False)]
    assert options.single(max_rows=9).max_rows == 5


def test_other_spellings_work_in_lists_too() -> None:
    options, _ = parse("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "3")
    assert kinds(options) == [("ngram", 2)]


def test_an_unknown_drafter_in_a_list_is_named() -> None:
    options, _ = parse("--drafter", "none,bogus")
    with pytest.raises(SettingError, match="'bogus' is unknown"):
        options.several("none", "auto")


def test_without_drafter_the_rest_stays() -> None:
    found = without_drafter(EngineConfig(drafter="draft-model", draft_model="d", max_rows=3))
    assert found == EngineConfig(drafter="none", max_rows=3)


@pytest.mark.parametrize("text", ["", ",", "1,,2", "1,"])
def test_a_list_has_no_empty_entries(text: str) -> None:
    with pytest.raises(SettingError, match="several with commas"):
        comma_list("batch", text)


def test_lists_of_whole_numbers() -> None:
    assert whole_list("batch", "1, 8,1") == [1, 8]
    with pytest.raises(SettingError, match="at least 1, not '0'") as caught:
        whole_list("batch", "1,0")
    assert caught.value.parameter == "batch"


def test_depths() -> None:
    assert (read_depth("auto"), read_depth("0"), read_depth("12")) == (None, 0, 12)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--max-tokens", "5", "--min-tokens", "2"], {"max_tokens": 5, "min_tokens": 2}),
        (["--temperature", "0.5", "--top-p", "0.9"], {"temperature": 0.5, "top_p": 0.9}),
        (["--top-k", "4", "--min-p", "0.1"], {"top_k": 4, "min_p": 0.1}),
        (["--seed", "3", "--n", "2"], {"seed": 3, "n": 2}),
        (["--stop", "a b", "--stop=-c"], {"stop": ("a b", "-c")}),
        (["--stop-token-ids", "1", "--stop-token-ids", "2"], {"stop_token_ids": (1, 2)}),
        (["--ignore-eos"], {"ignore_eos": True}),
        (["--presence-penalty", "-1"], {"presence_penalty": -1.0}),
        (["--frequency-penalty", "1.5"], {"frequency_penalty": 1.5}),
        (["--repetition-penalty", "1.1"], {"repetition_penalty": 1.1}),
        (["--logit-bias", '{"7": -1.5}'], {"logit_bias": {7: -1.5}}),
        (["--bad-words", "x", "--bad-words", "y"], {"bad_words": ("x", "y")}),
        (["--logprobs", "0"], {"logprobs": 0}),
    ],
)
def test_sampling_flags(arguments: list[str], expected: dict[str, Any]) -> None:
    params = parse(*arguments)[1].over(SamplingParams())
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        (["--seed", "-1"], "seed"),
        (["--top-p", "0"], "top_p"),
        (["--temperature", "nan"], "temperature"),
        (["--n", "0"], "n"),
        (["--logit-bias", '{"x": 1}'], "logit_bias"),
        (["--logit-bias", "[1]"], "logit_bias"),
        (["--logit-bias", "{"], "logit_bias"),
        (["--stop", ""], "stop"),
        (["--max-tokens", "0"], "max_tokens"),
    ],
)
def test_a_sampling_value_out_of_range_is_named(arguments: list[str], parameter: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse(*arguments)[1].over(SamplingParams())
    assert caught.value.parameter == parameter


def test_flags_are_kept_apart_from_defaults_of_the_model() -> None:
    model = SamplingParams(temperature=0.6, top_p=0.9)
    params = parse("--top-p", "1")[1].over(model)
    assert (params.temperature, params.top_p) == (0.6, 1.0)


def test_option_classes_document_themselves() -> None:
    for options in (EngineOptions, SamplingOptions, TheirOptions):
        assert inspect.getdoc(options)
