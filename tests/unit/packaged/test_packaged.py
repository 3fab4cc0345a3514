"""The packaged models are whole, small, licensed, and load as what they say they are."""

import hashlib
import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend

from surefoot.text.template import ChatTemplate
from surefoot.text.tokenizer import load_tokenizer
from surefoot.weights.locate import locate
from tools.train.evaluate import load_network
from tools.train.recipes import RECIPES
from tools.train.schedule import Schedule


@pytest.fixture(scope="module", params=RECIPES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str) -> Path:
    return locate(name, revision=None, progress=lambda _line: None)


def test_it_comes_with_surefoot(name: str, folder: Path) -> None:
    assert folder == Path(__file__).parents[3] / "src/surefoot/packaged" / name


def test_every_file_has_its_recorded_checksum(folder: Path) -> None:
    recorded = {}
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        recorded[name] = digest
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.name != "SHA256SUMS"
    }
    assert found == recorded


def test_its_recipe_is_the_one_it_was_made_by(name: str, folder: Path) -> None:
    recipe = RECIPES[name]
    training = json.loads((folder / "training.json").read_text())
    assert Schedule.of(training["schedule"]) == recipe.schedule
    config = json.loads((folder / "config.json").read_text())
    assert recipe.whole_config(asdict(recipe.remake(config).sizes)) == config


def test_weights_are_small_and_stored_in_bfloat16(folder: Path) -> None:
    assert (folder / "model.safetensors").stat().st_size <= 15e6
    weights = load_file(folder / "model.safetensors")
    tables = {name for name, tensor in weights.items() if tensor.dtype == torch.int64}
    assert all(name.endswith("tid2eid") for name in tables)
    numbers = [tensor for name, tensor in weights.items() if name not in tables]
    assert {tensor.dtype for tensor in numbers} == {torch.bfloat16}
    assert all(bool(tensor.isfinite().all()) for tensor in numbers)
    assert any(name.startswith("mtp.") for name in weights)
    assert 5e6 <= sum(tensor.numel() for tensor in numbers) <= 12e6


def test_licences_and_sources_are_there(folder: Path) -> None:
    licence = (folder / "LICENSE-python.txt").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    assert "CNRI LICENSE AGREEMENT" in licence
    notices = (folder / "NOTICES.txt").read_text()
    sources = json.loads((folder / "sources.json").read_text())["sources"]
    assert len(sources) > 500
    assert all(len(source["sha256"]) == 64 for source in sources)
    held_out = sum(source["size"] for source in sources if source["held_out"])
    assert 0.02 < held_out / sum(source["size"] for source in sources) < 0.05
    # A file under terms of its own, written by somebody else.
    assert "==== xmlrpc/client.py" in notices
    assert "Secret Labs AB" in notices


def test_the_card_says_what_was_measured(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    measured = json.loads((folder / "measured.json").read_text())
    sampled = measured["temperature_0.7"]
    for drafts in "123":
        assert f"{sampled['accept_length'][drafts]:.2f}" in card
    assert f"{measured['greedy']['repetition_share']:.1%}" in card
    assert f"{sampled['recitation_share']['50']:.2%}" in card
    assert "$" not in card


def test_prompts_kept_back_are_text(folder: Path) -> None:
    prompts = json.loads((folder / "held_out.json").read_text())
    assert len(prompts) == json.loads((folder / "measured.json").read_text())["prompts"]["count"]
    assert all(entry["prompt"] and entry["continuation"] for entry in prompts)


def test_any_text_comes_back_from_the_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    assert tokenizer is not None
    assert tokenizer.end_ids == {0}
    generator = random.Random(0)
    texts = [
        "",
        " ",
        "\n\t x  ",
        "def f(x):\n    return x\n",
        "naïve 東京 🙂\u200d\x00\x7f",
        "\r\n\r",
    ]
    for length in (1, 7, 100, 500):
        points = [generator.randrange(0xD7FF) for _ in range(length)]
        texts.append("".join(map(chr, points)))
    for text in texts:
        assert backend.decode(tokenizer.encode(text)) == text


def test_a_chat_goes_on_where_the_last_turn_ended(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    first = [{"role": "user", "content": "import os"}]
    prompt = template.render(first)
    assert prompt == "user:\nimport os\n\nassistant:\n"
    second = [*first, {"role": "assistant", "content": "x = 1"}, {"role": "user", "content": "y"}]
    assert template.render(second).startswith(prompt + "x = 1")


def test_transformers_computes_the_same_logits(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    network = load_network(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    losses = []
    for entry in json.loads((folder / "held_out.json").read_text())[:8]:
        ids = torch.tensor([tokenizer(entry["prompt"] + entry["continuation"])["input_ids"]])
        with torch.no_grad():
            theirs = model(ids).logits
            ours = network.logits(network.hidden(ids))
        assert float((theirs - ours).abs().max() / theirs.abs().max()) < 1e-3
        losses.append(torch.nn.functional.cross_entropy(ours[0, :-1], ids[0, 1:]).item())
    # Trained: held-out text is far likelier than by chance (log 4096 = 8.3).
    assert sum(losses) / len(losses) < 5.0
