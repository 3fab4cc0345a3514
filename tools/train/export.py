"""Writes a trained model as an ordinary transformers-style folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.train.evaluate import NEW_TOKENS, PROMPT_TOKENS, PROMPTS, TEMPERATURE, choose_prompts
from tools.train.recipes import Recipe
from tools.train.text import END, END_ID, load

SUMS = "SHA256SUMS"
_COPIED = ("tokenizer.json", "sources.json", "LICENSE-python.txt", "NOTICES.txt")
# What a template writes after a turn begins as the next generation prompt ended, so that a chat's
# next turn starts with the tokens of the last one.
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':\\n' + message['content'] + '\\n\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)


def export_folder(run: Path, text: Path, to: Path, recipe: Recipe) -> None:
    """Write weights (bfloat16), configs, tokenizer, licences and prompts of a finished run.

    Raises:
        ValueError: the run is not finished.
    """
    content = torch.load(run / "checkpoint.pt", weights_only=True)
    if content["progress"]["phase"] <= len(content["schedule"]["steps"]):
        raise ValueError(f"the run in {run} is not finished; go on with `train` first")
    to.mkdir(parents=True, exist_ok=True)
    weights = {
        name: x.bfloat16() if x.is_floating_point() else x for name, x in content["network"].items()
    }
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    (to / "model.safetensors").chmod(0o644)
    settings = {
        "config.json": recipe.whole_config(content["sizes"]),
        "generation_config.json": {
            "bos_token_id": END_ID,
            "eos_token_id": END_ID,
            "do_sample": True,
            "temperature": TEMPERATURE,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
            "model_max_length": recipe.longest,
            "chat_template": _TEMPLATE,
        },
        "training.json": {name: content[name] for name in ("schedule", "progress")},
        "held_out.json": _held_out(text),
    }
    for name, value in settings.items():
        (to / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    for name in _COPIED:
        shutil.copyfile(text / name, to / name)


def _held_out(text: Path) -> list[dict[str, str]]:
    """Prompts that training never saw, and how their files go on."""
    tokenizer = Tokenizer.from_file(str(text / "tokenizer.json"))
    pieces = choose_prompts(load(text), PROMPTS, PROMPT_TOKENS + NEW_TOKENS).tolist()
    return [
        {
            "prompt": tokenizer.decode(ids[:PROMPT_TOKENS]),
            "continuation": tokenizer.decode(ids[PROMPT_TOKENS:]),
        }
        for ids in pieces
    ]


def write_sums(folder: Path) -> None:
    """Write the sha256 of every other file of a folder, in the form that sha256sum reads."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != SUMS
    ]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
