"""Copies in int8: they answer as their source does with a flag, to the last bit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from surefoot.errors import ModelError
from surefoot.testing.tiny_hybrids import write_tiny_hybrid
from surefoot.testing.tiny_latents import TinyLatentSizes, write_tiny_latents
from surefoot.testing.tiny_models import write_tiny
from surefoot.weights.load import INDEX_NAME, open_checkpoint
from tests.unit.model.edits import edit_config, edit_weights
from tests.unit.model.test_int8_models import _release_names, _renamed, loaded, said
from tests.unit.model.test_qwen3_5_layouts import one_by_one
from tests.unit.model.test_stored_forms import in_blocks
from tools.quantising.agreement import agreement
from tools.quantising.folder import DESCRIPTION, Written, kind_of, quantise_folder
from tools.quantising.shards import ShardWriter
from tools.quantize import build_parser, run

FORMS = ("w8a8", "w4a8")
Write = Callable[[Path], Path]


def sharded(folder: Path) -> Path:
    """The same in two files, halves in one of them and floats of 16 bits in the other."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, own in files.items():
        kind = torch.float16 if file == "model-1.safetensors" else torch.bfloat16
        save_file({name: tensors[name].to(kind) for name in own}, folder / file)
    index = {name: file for file, own in files.items() for name in own}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": index}))
    return folder


def in_eight_bit_floats(folder: Path) -> Path:
    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name], tensors[name + "_scale_inv"], _ = in_blocks(tensors[name])

    edit_weights(folder, narrow)
    block = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    edit_config(folder, quantization_config=block)
    return folder


def under_release_names(folder: Path) -> Path:
    write_tiny_latents(folder, TinyLatentSizes(hidden=64))
    edit_weights(folder, one_by_one)
    names = _release_names(folder)

    def renamed(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[_renamed(name, names)] = tensors.pop(name)

    edit_weights(folder, renamed)
    return folder


MODELS: dict[str, Write] = {
    "tied": lambda folder: write_tiny(folder, "LlamaForCausalLM", tied=True, hidden=96, inner=256),
    "odd, in two files": lambda folder: sharded(
        write_tiny(folder, "Qwen2ForCausalLM", hidden=64, inner=51)
    ),
    "8-bit floats": lambda folder: in_eight_bit_floats(
        write_tiny(folder, "Qwen3ForCausalLM", inner=192)
    ),
    "experts": lambda folder: write_tiny_hybrid(
        folder, "Qwen3_5MoeForConditionalGeneration", hidden=96
    ),
    "next": lambda folder: write_tiny_hybrid(folder, "Qwen3NextForCausalLM"),
    "latents": lambda folder: write_tiny_latents(folder, TinyLatentSizes(inner=96)),
    "release": under_release_names,
}


def copied(source: Path, target: Path, form: str) -> Written:
    return quantise_folder(source, target, form, lambda *_: None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_says_what_its_source_says_with_a_flag(name: str, form: str, tmp_path: Path) -> None:
    source = MODELS[name](tmp_path / "source")
    written = copied(source, tmp_path / "copy", form)
    want, stored = said(loaded(source, form)), loaded(tmp_path / "copy")
    assert stored.form == "modelslim"
    for ours, theirs in zip(said(stored), want, strict=True):
        assert torch.equal(ours, theirs)
    assert all(0 < error < 0.15 for error in written.errors.relative().values())
    assert "quantization_config" not in json.loads((tmp_path / "copy/config.json").read_text())
    floats = said(loaded(source))[0]
    assert not torch.equal(floats, want[0])


def test_files_are_as_many_as_the_source_has(tmp_path: Path) -> None:
    source = MODELS["odd, in two files"](tmp_path / "source")
    copied(source, tmp_path / "copy", "w4a8")
    files = sorted(file.name for file in (tmp_path / "copy").glob("*.safetensors"))
    assert files == [f"quant_model_weights-0000{n}-of-00002.safetensors" for n in (1, 2)]
    description = json.loads((tmp_path / "copy" / DESCRIPTION).read_text())
    assert description["version"] == "0", "51 outputs make no pairs"
    held: set[str] = set()
    for file in files:
        with safe_open(tmp_path / "copy" / file, framework="pt") as shard:
            held |= set(shard.keys())
    assert held == description.keys() - {"model_quant_type", "version", "group_size"}


def test_four_bits_take_half_a_byte(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "LlamaForCausalLM", hidden=256, inner=512)
    eight = copied(source, tmp_path / "eight", "w8a8")
    four = copied(source, tmp_path / "four", "w4a8")
    numbers = 2 * 3 * 256 * 512
    # Instead of two numbers in float32 an output has three and two for each group.
    outputs, scales = 2 * (2 * 512 + 256), 2 * (2 * 512 * 2 + 256 * 4)
    assert eight.bytes - four.bytes == numbers // 2 - 4 * (outputs + 2 * scales)
    assert eight.linears == four.linears == 2 * 7 + 1


def test_scale_bias_is_what_the_vendor_s_kernel_wants(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "LlamaForCausalLM", hidden=256, inner=512)
    copied(source, tmp_path / "copy", "w4a8")
    tensors = load_file(next((tmp_path / "copy").glob("*.safetensors")))
    module = "model.layers.0.mlp.down_proj."
    both = tensors[module + "weight"]
    codes = torch.stack(((both << 4) >> 4, both >> 4), 1).flatten(0, 1).float()
    scales = tensors[module + "weight_scale"] * tensors[module + "weight_scale_second"]
    weight = codes.unflatten(1, (4, -1)) * scales[..., None]
    torch.testing.assert_close(tensors[module + "scale_bias"][:, 0], 8 * weight.sum((1, 2)))


def test_tokenizer_and_settings_come_along(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "LlamaForCausalLM", tokenizer=True)
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    (source / "encoding").mkdir()
    (source / "encoding/encoding_dsv4.py").write_text("REASONING_EFFORT_PROMPTS = 1")
    (source / "notes.txt").write_text("of the owner")
    copied(source, tmp_path / "copy", "w8a8")
    for file in ("tokenizer.json", "generation_config.json", "encoding/encoding_dsv4.py"):
        assert (tmp_path / "copy" / file).read_bytes() == (source / file).read_bytes()
    assert not (tmp_path / "copy/notes.txt").exists()
    assert open_checkpoint(tmp_path / "copy").generation == {"temperature": 0.5}


def test_what_cannot_be_copied_is_said(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "LlamaForCausalLM")
    copied(source, tmp_path / "copy", "w8a8")
    for folder, target, message in (
        (source, tmp_path / "copy", "there already, and not empty"),
        (tmp_path / "copy", tmp_path / "other", "a copy of ModelSlim's already"),
        (source / "config.json", tmp_path / "other", "is no folder; of a GGUF"),
    ):
        with pytest.raises(ModelError, match=message):
            copied(folder, target, "w8a8")

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = torch.nan

    edit_weights(source, damage)
    for form in FORMS:
        with pytest.raises(ModelError, match=r"'model.layers.0.mlp.up_proj.weight' holds numbers"):
            copied(source, tmp_path / form, form)


def test_kinds_of_tensors_do_not_count_layers() -> None:
    assert kind_of("model.layers.12.mlp.experts.3.up_proj.weight") == "mlp.experts.*.up_proj"
    assert kind_of("model.language_model.layers.0.mlp.up_proj.weight") == "mlp.up_proj"
    assert kind_of("mtp.layers.0.mlp.experts.gate_up_proj") == "mtp: mlp.experts.gate_up_proj"
    assert kind_of("lm_head.weight") == "lm_head"


def test_files_are_made_tensor_by_tensor(tmp_path: Path) -> None:
    """Of all widths, none of them even."""
    tensors = {
        "a": torch.arange(3, dtype=torch.int8),
        "b": torch.randn(3, 5),
        "c": torch.randn(7).bfloat16(),
        "d": torch.arange(5),
        "e": torch.randn(0, 4),
        "f": torch.tensor(2.5),
    }
    writer = ShardWriter(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    assert set(writer.finish()) == set(tensors)
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
    raw = (tmp_path / "x.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    places = json.loads(raw[8 : 8 + size])
    assert size % 8 == 0
    for name, tensor in tensors.items():
        assert places[name]["data_offsets"][0] % tensor.element_size() == 0


def test_two_models_agree_as_often_as_they_do(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", "LlamaForCausalLM", tokenizer=True)
    copied(source, tmp_path / "copy", "w8a8")
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 5)
    assert agreement(source, source, text, 64) == (1.0, 63)
    assert 0.3 < agreement(source, tmp_path / "copy", text, 64)[0] <= 1
    text.write_text("")
    with pytest.raises(ModelError, match="fewer than two tokens"):
        agreement(source, source, text, 64)


def test_the_command_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_tiny(tmp_path / "source", "LlamaForCausalLM", tokenizer=True)
    text = tmp_path / "text"
    text.write_text("The quick brown fox")
    command = [str(source), str(tmp_path / "copy"), "--form", "w4a8", "--text", str(text)]
    run(build_parser().parse_args(command))
    out = capsys.readouterr().out
    assert re.search(r"15 weights in int8; [\d.]+ MiB became [\d.]+ MiB \(\d+%\)", out)
    assert re.search(r"0\.0\d+  self_attn.q_proj\n", out)
    assert re.search(r"0\.[01]\d+  mlp.up_proj\n", out)
    assert re.search(r"the same best token at [\d.]+% of 18 places of", out)


def test_help_needs_no_torch() -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-X", "importtime", str(root / "tools/quantize.py"), "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--form w4a8" in told.stdout
    assert "torch" not in told.stderr
