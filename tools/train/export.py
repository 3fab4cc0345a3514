"""Writes a trained model as an ordinary transformers-style folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.train.evaluate import NEW_TOKENS, PROMPT_TOKENS, PROMPTS, TEMPERATURE, choose_prompts
from tools.train.network import Sizes
from tools.train.text import END, END_ID, load

LONGEST = 4096
SUMS = "SHA256SUMS"
_COPIED = ("tokenizer.json", "sources.json", "LICENSE-python.txt", "NOTICES.txt")
# What a template writes after a turn begins as the next generation prompt ended, so that a chat's
# next turn starts with the tokens of the last one.
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':\\n' + message['content'] + '\\n\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)


def config(sizes: Sizes) -> dict[str, object]:
    """The public config of the architecture."""
    kinds = {"L": "linear_attention", "F": "full_attention"}
    derived = ("layers", "rotary_dim", "rope_theta")
    plain = {name: value for name, value in asdict(sizes).items() if name not in derived}
    return plain | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": len(sizes.layers),
        "layer_types": [kinds[letter] for letter in sizes.layers],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": sizes.rope_theta,
            "partial_rotary_factor": sizes.rotary_dim / sizes.head_dim,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "tie_word_embeddings": True,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": LONGEST,
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
        "dtype": "bfloat16",
    }


def export_folder(run: Path, text: Path, to: Path) -> None:
    """Write weights (bfloat16), configs, tokenizer, licences and prompts of a finished run.

    Raises:
        ValueError: the run is not finished.
    """
    content = torch.load(run / "checkpoint.pt", weights_only=True)
    if content["progress"]["phase"] <= len(content["schedule"]["steps"]):
        raise ValueError(f"the run in {run} is not finished; go on with `train` first")
    to.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.bfloat16() for name, tensor in content["network"].items()}
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    (to / "model.safetensors").chmod(0o644)
    settings = {
        "config.json": config(Sizes(**content["sizes"])),
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
            "model_max_length": LONGEST,
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
