import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.blueprint import locate_config
from surefoot.engine.models import silent
from surefoot.errors import ModelError
from surefoot.testing.tiny_models import TinySizes, make_tiny_config, write_tiny
from tests.unit.cli.commands import Run
from tests.unit.weights.compressed_files import to_compressed
from tests.unit.weights.modelslim_files import DYNAMIC, FLOAT, to_modelslim

KEYS = {
    "model",
    "parameters",
    "layers",
    "caches",
    "draft_head",
    "page_tokens",
    "pages",
    "slots",
    "points",
    "weight_form",
    "bytes",
    "per_token",
    "per_request",
    "plan",
    "longest_request",
    "request_state",
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
        {
            "name": "kv",
            "kind": "paged",
            "ratio": 1,
            "bytes_per_token": entry,
            "formula": "1 layer x (2 x 8 + 2 x 8) float32",
            "numbers": entry // 4,
        },
        {
            "name": "window",
            "kind": "ring",
            "window": 8,
            "bytes_per_request": entry * (8 + 3 + 1),
            "bytes_per_point": entry * 8,
            "columns": 8 + 3 + 1,
            "formula": "1 layer x (2 x 8 + 2 x 8) float32 x 12 columns",
            "numbers": entry // 4 * (8 + 3 + 1),
        },
    ]
    assert done.json["draft_head"] is None
    assert (done.json["page_tokens"], done.json["slots"]) == (16, 4)
    size = done.json["bytes"]
    assert size["weights"] == 4 * done.json["parameters"]
    assert size["pages"] == (1 + done.json["pages"]) * 16 * entry
    assert size["slots"] == (1 + 4) * entry * (8 + 3 + 1)
    assert size["points"] == done.json["points"] * entry * 8 > 0
    assert size["pages"] + size["slots"] + size["points"] <= 8 << 20
    assert done.json["capabilities"]["name"] == done.json["backend"] == "cpu"


def test_the_plan_is_the_one_an_engine_makes(surefoot: Run, tiny_ids: Path) -> None:
    from surefoot import LLM

    flags = ("--memory", "3MiB", "--draft-tokens", 5, "--max-rows", 3)
    seen = surefoot("inspect", tiny_ids, *flags, "--json").json
    with LLM(str(tiny_ids), memory=3 << 20, draft_tokens=5, max_rows=3, drafter="ngram") as llm:
        plan = llm.engine.parts.plan
        counts = seen["pages"], seen["slots"], seen["points"]
        assert counts == (plan.pages, plan.slots, plan.points)
        size = seen["bytes"]
        assert size["pages"] + size["slots"] + size["points"] == plan.total_bytes
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
        "1 layer x (2 x 8 + 2 x 8) float32",
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


def test_what_the_emulated_device_offers_and_no_device_takes(
    surefoot: Run, config_only: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = surefoot("inspect", config_only, "--device", "npu", "--emulate", "--json")
    assert done.json["backend"] == "npu (emulated)"
    assert "no device could run this model: attention heads" in caplog.text


def test_an_unknown_architecture_is_named(surefoot: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    assert "'MambaForCausalLM' is not supported" in surefoot("inspect", tmp_path).error


LARGE_HYBRID = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
    },
}


def inspect_large(surefoot: Run, folder: Path, depth: int) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(LARGE_HYBRID))
    flags = ("--draft-tokens", depth, "--memory", "16GiB", "--max-model-len", 4096)
    done = surefoot("inspect", folder, *flags, "--dtype", "bfloat16", "--max-rows", 4, "--json")
    assert done.status == 0, done.err
    content: dict[str, Any] = done.json
    return content


def test_state_is_small_and_its_checkpoint_does_not_depend_on_the_depth(
    surefoot: Run, tmp_path: Path
) -> None:
    """The published sizes of a model of 35 billion parameters, without its weights."""
    found = {depth: inspect_large(surefoot, tmp_path, depth) for depth in (1, 3, 8)}
    for depth, content in found.items():
        caches = {cache["name"]: cache for cache in content["caches"]}
        delta, conv, state = caches["delta"], caches["conv"], content["request_state"]
        # 30 layers of 32 heads of 128 x 128 numbers of four bytes.
        assert delta["checkpoint_bytes"] == state["checkpoint_bytes"] == 30 * 32 * 128 * 128 * 4
        assert delta["columns"] <= delta["block"] + depth
        assert conv["columns"] == conv["window"] + depth + 1
        assert state["ring_bytes"] == delta["ring_bytes"] + conv["bytes_per_request"]
        window = 30 * 8192 * 2 * 3
        assert state["states_bytes"] == (depth + 2) * (state["checkpoint_bytes"] + window)
    assert found[8]["request_state"]["ratio"] <= 0.17
    # What others keep at k = 3 is about 300 MiB.
    assert 300 < found[3]["request_state"]["states_bytes"] / 2**20 < 310
    assert found[8]["draft_head"] == "mtp"


def test_what_the_draft_head_keeps_of_a_request_is_counted(surefoot: Run, tmp_path: Path) -> None:
    found = inspect_large(surefoot, tmp_path, 3)
    caches = {cache["name"]: cache for cache in found["caches"]}
    recent = caches["draft.recent"]
    assert recent["bytes_per_request"] == recent["columns"] * 2048 * 2
    assert recent["columns"] > found["page_tokens"]
    row = sum(cache.get("bytes_per_request", 0) for cache in found["caches"])
    assert found["bytes"]["slots"] == (1 + found["slots"]) * row


def test_the_comparison_is_printed(surefoot: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE_HYBRID))
    flags = ("--draft-tokens", 8, "--memory", "16GiB", "--max-model-len", 4096, "--max-rows", 4)
    done = surefoot("inspect", tmp_path, *flags, "--dtype", "bfloat16")
    words = " ".join(done.out.split())
    assert "replay keeps" in words
    assert "k + 2 = 10 states would be" in words
    assert "mtp, up to 8 tokens" in words


def test_a_depth_beyond_the_block_is_refused(surefoot: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE_HYBRID))
    done = surefoot("inspect", tmp_path, "--draft-tokens", 16)
    assert done.error.startswith("draft_tokens: cache delta allows drafts of at most 15 tokens")


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


def test_the_form_of_weights_and_their_bytes(surefoot: Run, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "Qwen3ForCausalLM", hidden=64, inner=96, vocab=300)
    floats = surefoot("inspect", folder, "--json").json
    made = surefoot("inspect", folder, "--quantization", "w8a8", "--json").json
    assert (floats["weight_form"], made["weight_form"]) == ("floats", "w8a8")
    layer = 64 * (32 + 2 * 16 + 2 * 96) + 32 * 64 + 96 * 64
    numbers = 2 * layer + 300 * 64
    outputs = 2 * (32 + 2 * 16 + 2 * 96 + 2 * 64) + 300
    size = 4 * floats["parameters"] - 3 * numbers + 4 * outputs
    assert made["bytes"]["weights"] == size
    assert (
        " in int8 (w8a8) and float32" in surefoot("inspect", folder, "--quantization", "w8a8").out
    )
    to_modelslim(folder, lambda name: DYNAMIC if name.endswith("down_proj.weight") else FLOAT)
    stored = surefoot("inspect", folder, "--json").json
    assert stored["weight_form"] == "modelslim"
    down = 2 * 96 * 64
    assert stored["bytes"]["weights"] == 4 * floats["parameters"] - 3 * down + 4 * 2 * 64


def test_codes_of_four_bits_count_as_eight(surefoot: Run, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "Qwen3ForCausalLM", hidden=256, inner=512)
    eight, four = (
        surefoot("inspect", folder, "--quantization", form, "--json").json
        for form in ("w8a8", "w4a8")
    )
    scales = 2 * (2 * 512 * (256 // 128 - 1) + 256 * (512 // 128 - 1))
    assert four["bytes"]["weights"] - eight["bytes"]["weights"] == 4 * scales
    told = surefoot("inspect", folder, "--quantization", "w4a8").out
    assert "in int8 (w4a8, whose 4 bits are kept in 8) and float32" in told


def test_compressed_weights_are_counted_as_they_are_stored(surefoot: Run, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "Qwen3ForCausalLM", hidden=64, inner=96, vocab=300)
    floats = surefoot("inspect", folder, "--json").json
    to_compressed(folder, lambda name: name.endswith("down_proj.weight"))
    stored = surefoot("inspect", folder, "--json").json
    assert stored["weight_form"] == "compressed-tensors"
    down = 2 * 96 * 64
    assert stored["bytes"]["weights"] == 4 * floats["parameters"] - 3 * down + 4 * 2 * 64


def test_a_description_without_weights_beside_it_says_nothing(
    surefoot: Run, config_only: Path
) -> None:
    (config_only / "quant_model_description.json").write_text("{}")
    assert surefoot("inspect", config_only, "--json").json["weight_form"] == "floats"
