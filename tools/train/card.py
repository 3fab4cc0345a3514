"""Writes the model card of an exported folder from what was measured, and the checksums."""

from __future__ import annotations

import json
from pathlib import Path
from string import Template
from textwrap import fill
from typing import Any

from safetensors.torch import load_file

from tools.train.evaluate import LONG_WINDOW, SHORT_WINDOW, TEMPERATURE
from tools.train.export import write_sums
from tools.train.recipes import find_recipe

_WIDTH = 100
_ABOUT = Template(
    "A language model of $parameters million parameters in the $structure, with a "
    "multi-token-prediction (MTP) head. It was trained from random weights on Python source text, "
    "on two CPU cores, to try speculative decoding on $kind without a download. It writes text "
    "that looks like Python and means nothing. It answers no questions and is no help with code."
)
_CARD = Template("""\
---
license: psf-2.0
library_name: surefoot
tags: [$tags, multi-token-prediction, speculative-decoding]
---

# $name

$about

`tools/train_tiny.py` of the surefoot repository made every file here, this card included.
All numbers below are its measurements (`measured.json`, `training.json`).

## Data

$text, without tests, `encodings`, `lib2to3` and bundled wheels:
$files files, $train_bytes bytes to train on; $held_files whole files, $held_bytes bytes, were kept
back. `sources.json` lists every file with its sha256. The tokenizer is a byte-level byte-pair one
of $vocabulary tokens, trained on the same files; held-out text has $bytes_per_token bytes a token.

The text is under the Python Software Foundation licence (`LICENSE-python.txt`). Some files carry
notices of their own; `NOTICES.txt` repeats them. The weights come under the same terms.

## Training

| phase | what learns | steps | tokens | minutes |
|---|---|---|---|---|
$phases

Windows of $window tokens, $batch per step, float32; weights are stored in bfloat16. Texts longer
than a window were never seen in training. Minutes passed on a machine that did other work, too.

| on one slice of held-out text | loss | bits per byte | head agrees with trunk, depth 1 / 2 / 3 |
|---|---|---|---|
$trace

## What was measured on the stored weights

| | loss | bits per byte | head agrees with trunk, depth 1 / 2 / 3 |
|---|---|---|---|
| all held-out text ($held_tokens tokens) | $held_loss | $held_bits | $held_agreement |
| a part of the training text | $train_loss | $train_bits | $train_agreement |

$prompts held-out prompts of $prompt_tokens tokens (`held_out.json`), continued by $new_tokens:

| | greedy | temperature $temperature |
|---|---|---|
| tokens per target pass, 1 draft | $greedy_1 | $sampled_1 |
| tokens per target pass, 2 drafts | $greedy_2 | $sampled_2 |
| tokens per target pass, 3 drafts | $greedy_3 | $sampled_3 |
| the same, lowest and highest of a prompt | $greedy_range | $sampled_range |
| share of $short-token windows that repeat earlier text | $greedy_repeats | $sampled_repeats |
| share of $short-token windows found in the training text | $greedy_short | $sampled_short |
| share of $long-token windows found in the training text | $greedy_long | $sampled_long |

Tokens per target pass count the accepted drafts and the token after them. They were computed from
the written text and the head's choices at every place; draft and target take the same noise.
Greedy text runs into loops, which are easy to foretell: read the greedy numbers together with the
share that repeats, and prefer those at temperature $temperature.
""")


def write_card(folder: Path) -> None:
    """Write README.md and SHA256SUMS into an exported and measured folder."""
    names = ("config", "training", "measured", "sources")
    config, training, measured, sources = (
        json.loads((folder / f"{name}.json").read_text("utf-8")) for name in names
    )
    values = (
        _about_model(folder, config)
        | _about_text(sources)
        | _about_training(training)
        | _about_loss(measured)
        | _about_writing("greedy", measured["greedy"])
        | _about_writing("sampled", measured[f"temperature_{TEMPERATURE}"])
        | {key: str(measured["prompts"][name]) for key, name in _PROMPTS.items()}
    )
    values["bytes_per_token"] = f"{measured['held_out']['bytes_per_token']:.2f}"
    (folder / "README.md").write_text(_CARD.substitute(values), encoding="utf-8")
    write_sums(folder)


def count_parameters(folder: Path) -> int:
    """Numbers that were trained: tables of integers are no parameters."""
    weights = load_file(folder / "model.safetensors").values()
    return sum(tensor.numel() for tensor in weights if tensor.is_floating_point())


_LEARNS = {
    1: "trunk and head, on the text",
    2: "the head alone, on the trunk's distribution 1, 2 and 3 tokens ahead",
}
_PROMPTS = {"prompts": "count", "prompt_tokens": "tokens", "new_tokens": "new_tokens"}


def _about_model(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    told = find_recipe(config).about(config)
    millions = count_parameters(folder) / 1e6
    return told | {
        "about": fill(_ABOUT.substitute(told, parameters=f"{millions:.1f}"), _WIDTH),
        "vocabulary": str(config["vocab_size"]),
        "temperature": str(TEMPERATURE),
        "short": str(SHORT_WINDOW),
        "long": str(LONG_WINDOW),
    }


def _about_text(listing: dict[str, Any]) -> dict[str, str]:
    held = [source["size"] for source in listing["sources"] if source["held_out"]]
    sizes = [source["size"] for source in listing["sources"] if not source["held_out"]]
    return {
        "text": listing["text"],
        "files": str(len(sizes)),
        "train_bytes": f"{sum(sizes):,}",
        "held_files": str(len(held)),
        "held_bytes": f"{sum(held):,}",
    }


def _about_training(training: dict[str, Any]) -> dict[str, str]:
    schedule = training["schedule"]
    phases = [
        f"| {phase} | {_LEARNS[min(phase, 2)]} | {steps} "
        f"| {steps * schedule['batch'] * schedule['window']:,} | {seconds / 60:.0f} |"
        for phase, (steps, seconds) in enumerate(
            zip(schedule["steps"], training["progress"]["seconds"], strict=True), 1
        )
    ]
    rows = [
        f"| phase {entry['phase']}, step {entry['step']} " + _loss_cells(entry)
        for entry in training["progress"]["trace"]
    ]
    return {
        "phases": "\n".join(phases),
        "window": str(schedule["window"]),
        "batch": str(schedule["batch"]),
        "trace": "\n".join(rows),
    }


def _loss_cells(entry: dict[str, Any]) -> str:
    return f"| {entry['loss']} | {entry['bits_per_byte']} | {_agreement(entry)} |"


def _agreement(entry: dict[str, Any]) -> str:
    return " / ".join(f"{share:.3f}" for share in entry["agreement"])


def _about_loss(measured: dict[str, Any]) -> dict[str, str]:
    values = {"held_tokens": f"{measured['held_out']['tokens']:,}"}
    for key, name in (("held", "held_out"), ("train", "training_text")):
        entry = measured[name]
        values[f"{key}_loss"] = str(entry["loss"])
        values[f"{key}_bits"] = str(entry["bits_per_byte"])
        values[f"{key}_agreement"] = _agreement(entry)
    return values


def _about_writing(key: str, entry: dict[str, Any]) -> dict[str, str]:
    lengths, low_high = entry["accept_length"], entry["accept_length_range"]
    recited = entry["recitation_share"]
    return {
        **{f"{key}_{drafts}": f"{length:.2f}" for drafts, length in lengths.items()},
        f"{key}_range": " to ".join(f"{length:.2f}" for length in low_high),
        f"{key}_repeats": f"{entry['repetition_share']:.1%}",
        f"{key}_short": f"{recited[str(SHORT_WINDOW)]:.2%}",
        f"{key}_long": f"{recited[str(LONG_WINDOW)]:.2%}",
    }
