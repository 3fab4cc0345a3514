import json
from pathlib import Path

import pytest

from surefoot.cli.blueprint import locate_config
from surefoot.engine.models import silent
from surefoot.errors import ModelError
from surefoot.testing.tiny_models import TinySizes, make_tiny_config
from tests.unit.cli.commands import Run

KEYS = {
    "model",
    "parameters",
    "layers",
    "caches",
    "draft_head",
    "page_tokens",
    "pages",
    "slots",
    "bytes",
    "backend",
    "capabilities",
}


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    """A folder that holds nothing but the config of a model with windowed layers."""
    config = make_tiny_config("MistralForCausalLM", TinySizes(), mixed=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_json_from_a_config_alone(surefoot: Run, config_only: Path) -> None:
    flags = ("--memory", "8MiB", "--page-tokens", 16, "--max-rows", 4, "--draft-tokens", 3)
    done = surefoot("inspect", config_only, *flags, "--json")
    assert done.status == 0
    assert done.json.keys() == KEYS
    assert done.json["layers"] == ["full", "window 8"]
    # Two heads of eight numbers, keys and values, four bytes each, one layer of either kind.
    entry = 2 * 8 * 2 * 4
    assert done.json["caches"] == [
        {"name": "kv", "kind": "paged", "ratio": 1, "bytes_per_token": entry},
        {
            "name": "window",
            "kind": "ring",
            "window": 8,
            "bytes_per_request": entry * (8 + 3 + 1),
        },
    ]
    assert done.json["draft_head"] is None
    assert (done.json["page_tokens"], done.json["slots"]) == (16, 4)
    size = done.json["bytes"]
    assert size["weights"] == 4 * done.json["parameters"]
    assert size["pages"] == (1 + done.json["pages"]) * 16 * entry
    assert size["pages"] + size["slots"] <= 8 << 20
    assert done.json["capabilities"]["name"] == done.json["backend"] == "cpu"


def test_the_plan_is_the_one_an_engine_makes(surefoot: Run, tiny_ids: Path) -> None:
    from surefoot import LLM

    flags = ("--memory", "3MiB", "--draft-tokens", 5, "--max-rows", 3)
    seen = surefoot("inspect", tiny_ids, *flags, "--json").json
    with LLM(str(tiny_ids), memory=3 << 20, draft_tokens=5, max_rows=3, drafter="ngram") as llm:
        plan = llm.engine.parts.plan
        assert (seen["pages"], seen["slots"]) == (plan.pages, plan.slots)
        assert seen["bytes"]["pages"] + seen["bytes"]["slots"] == plan.total_bytes
        assert seen["bytes"]["weights"] == llm.engine.target.weight_bytes


def test_lists_plan_for_the_deepest_draft(surefoot: Run, tiny_ids: Path) -> None:
    def ring(*flags: str) -> int:
        done = surefoot("inspect", tiny_ids, *flags, "--json")
        size: int = done.json["caches"][1]["bytes_per_request"]
        return size

    assert ring("--drafter", "none,ngram", "--draft-tokens", "2,7,4") == ring(
        "--drafter", "ngram", "--draft-tokens", "7"
    )
    assert ring("--drafter", "none") < ring("--drafter", "ngram", "--draft-tokens", "1")


def test_a_draft_model_has_caches_too(surefoot: Run, tiny: Path, tiny_draft: Path) -> None:
    done = surefoot("inspect", tiny, "--draft-model", tiny_draft, "--json")
    assert [cache["name"] for cache in done.json["caches"]] == ["kv", "draft.kv"]
    assert done.json["bytes"]["weights"] == 2 * 4 * done.json["parameters"]


def test_the_tables(surefoot: Run, config_only: Path) -> None:
    done = surefoot("inspect", config_only, "--drafter", "none")
    assert done.status == 0
    for words in (
        "MistralForCausalLM",
        "full, window 8",
        "none, up to 0 tokens",
        "128 a token",
        "max draft tokens",
    ):
        assert words in done.out
    assert "\x1b" not in done.out
    assert done.err == ""


@pytest.mark.parametrize(
    ("flags", "parameter"),
    [
        (["--drafter", "mtp"], "drafter"),
        (["--max-model-len", "100000"], "max_model_len"),
        (["--memory", "1KiB", "--max-model-len", "512"], "memory"),
        (["--dtype", "bfloat16", "--device", "reference"], "dtype"),
        (["--device", "abacus"], "device"),
        (["--revision", "v1"], "revision"),
    ],
)
def test_what_an_engine_would_refuse_is_named(
    surefoot: Run, config_only: Path, flags: list[str], parameter: str
) -> None:
    assert surefoot("inspect", config_only, *flags).error.startswith(f"{parameter}: ")


def test_an_unknown_architecture_is_named(surefoot: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    assert "'MambaForCausalLM' is not supported" in surefoot("inspect", tmp_path).error


def test_of_a_hub_id_only_the_config_is_fetched(
    config_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(model: str, file: str, revision: str | None) -> str:
        asked.append((model, file, revision))
        return str(config_only / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert locate_config("org/name", "v1", silent) == config_only
    assert asked == [("org/name", "config.json", "v1")]


def test_a_hub_that_cannot_be_reached_is_explained() -> None:
    with pytest.raises(ModelError, match=r"'org/name' here.*could not be fetched"):
        locate_config("org/name", None, silent)


def test_a_folder_with_a_slash_is_no_hub_id(
    config_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config_only.parent)
    name = f"./{config_only.name}"
    assert locate_config(name, None, silent).resolve() == config_only.resolve()
