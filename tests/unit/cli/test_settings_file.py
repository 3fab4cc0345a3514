import json
from pathlib import Path

import pytest
from cyclopts import App

from surefoot.cli.bench import LOAD_DEFAULTS, LoadOptions
from surefoot.cli.options import (
    ENGINE_DEFAULTS,
    SAMPLING_DEFAULTS,
    EngineOptions,
    SamplingOptions,
)
from surefoot.cli.settings_file import apply_settings_file
from surefoot.config import EngineConfig
from surefoot.errors import SettingError
from surefoot.params import SamplingParams
from tests.unit.cli.commands import Run

Parsed = tuple[EngineConfig, SamplingParams, str]


def parse(folder: Path, yaml: str, *arguments: str) -> Parsed:
    file = folder / "settings.yaml"
    file.write_text(yaml)
    app = App(config=apply_settings_file)

    @app.default
    def command(
        engine: EngineOptions = ENGINE_DEFAULTS,
        sampling: SamplingOptions = SAMPLING_DEFAULTS,
        load: LoadOptions = LOAD_DEFAULTS,
    ) -> Parsed:
        return engine.single(), sampling.over(SamplingParams()), load.batch

    parsed: Parsed = app(
        ["--config", str(file), *arguments],
        exit_on_error=False,
        print_error=False,
        result_action="return_value",
    )
    return parsed


def test_every_kind_of_value(tmp_path: Path) -> None:
    yaml = """
    max_num_seqs: 5
    memory: 512MiB
    max-model-len: 99
    bitwise: false
    draft_tokens: auto
    temperature: 0.5
    stop: [a, "b,c"]
    stop_token_ids: [3, 4]
    logit_bias: {"5": 1.5}
    batch: [1, 8]
    """
    config, params, batch = parse(tmp_path, yaml)
    assert config == EngineConfig(max_rows=5, memory=512 << 20, max_model_len=99, bitwise=False)
    assert params.temperature == 0.5
    assert params.stop == ("a", "b,c")
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == {5: 1.5}
    assert batch == "1,8"


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("disable_radix_cache: true", False),
        ("disable_radix_cache: false", True),
        ("no-prefix-cache: true", False),
        ("prefix_cache: off", False),
        ("enable_prefix_caching: yes", True),
    ],
)
def test_switches_under_each_of_their_names(tmp_path: Path, yaml: str, expected: bool) -> None:
    assert parse(tmp_path, yaml)[0].prefix_cache is expected


def test_the_command_line_wins(tmp_path: Path) -> None:
    yaml = "max_rows: 5\nmax_waiting: 7\nstop: [a]\nno_bitwise: true"
    config, params, _ = parse(tmp_path, yaml, "--max-num-seqs", "6", "--stop", "b", "--bitwise")
    assert (config.max_rows, config.max_waiting, config.bitwise) == (6, 7, True)
    assert params.stop == ("b",)


def test_speculation_in_other_words(tmp_path: Path) -> None:
    yaml = "speculative_config: {method: ngram, num_speculative_tokens: 3}"
    config, _, _ = parse(tmp_path, yaml)
    assert (config.drafter, config.draft_tokens) == ("ngram", 3)


@pytest.mark.parametrize("yaml", ["", "# nothing\n", "max_rows:\n"])
def test_a_file_may_say_nothing(tmp_path: Path, yaml: str) -> None:
    assert parse(tmp_path, yaml)[0] == EngineConfig()


@pytest.mark.parametrize(
    ("yaml", "parameter", "reason"),
    [
        ("bogus: 1", "bogus", "unknown key in .*settings.yaml"),
        ("max_rows: 1\nmaxrows: 2", "maxrows", "unknown key"),
        ("config: other.yaml", "config", "cannot name another file"),
        ("[1, 2]", "config", "must map flag names to values"),
        ("1: 2", "config", "must map flag names to values"),
        ("max_rows: [1", "config", "line 1 is not YAML|line 2 is not YAML"),
        ("max_rows: !!python/object:os.system {}", "config", "not YAML"),
        ("max_rows: 2020-01-01", "max_rows", "must be a text, a number"),
        ("\0", "config", "not YAML"),
    ],
)
def test_a_mistake_in_the_file_is_named(
    tmp_path: Path, yaml: str, parameter: str, reason: str
) -> None:
    with pytest.raises(SettingError, match=reason) as caught:
        parse(tmp_path, yaml)
    assert caught.value.parameter == parameter


def test_bad_values_are_named_like_flags(surefoot: Run, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_rows: many")
    done = surefoot("generate", "m", "x", "--config", file)
    assert done.error == "max_rows: must be a whole number, not 'many'"
    assert surefoot("inspect", "--config", tmp_path / "none.yaml").error.startswith("config: ")
    assert surefoot("inspect", "--config", tmp_path).error.startswith("config: ")


def test_a_command_runs_from_a_file(surefoot: Run, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    wanted = {"model": str(tiny), "prompt": ["abc"], "max_tokens": 3, "json": True, "page_size": 8}
    file.write_text(json.dumps(wanted))
    done = surefoot("generate", "--config", file)
    assert [entry["completion_tokens"] for entry in done.json["results"]] == [3]
