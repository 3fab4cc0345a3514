"""Measures an exported folder: held-out loss, accept lengths, repetition and recitation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

from tools.train.loop import Report
from tools.train.measure import DEPTHS, Slice, held_out_slice, measure_slice
from tools.train.network import Network
from tools.train.recipes import find_recipe
from tools.train.schedule import Schedule
from tools.train.text import Corpus, Ids, load, read_sources

PROMPTS = 40
PROMPT_TOKENS = 64
NEW_TOKENS = 128
TEMPERATURE = 0.7
SHORT_WINDOW, LONG_WINDOW = 20, 50
# Tokens of the windows that losses are measured on, the same for every model.
LOSS_WINDOW = 256
ALL_ROWS = 10**6


@dataclass(frozen=True)
class Written:
    """Text the model wrote after held-out prompts.

    Attributes:
        ids: [PROMPTS, PROMPT_TOKENS + NEW_TOKENS], prompts included.
        noise: [PROMPTS, NEW_TOKENS, vocabulary], what was added to the scores of each new
            token before the best was taken; zeros for greedy.
        temperature: divides the scores first; 1 for greedy.
    """

    ids: Tensor
    noise: Tensor
    temperature: float


def load_network(folder: Path) -> Network:
    """Load an exported folder in float32."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    network = find_recipe(config).remake(config)
    weights = load_file(folder / "model.safetensors")
    network.load_state_dict(
        {name: x.float() if x.is_floating_point() else x for name, x in weights.items()}
    )
    return network


def choose_prompts(corpus: Corpus, count: int, tokens: int) -> Tensor:
    """Take `count` pieces [count, tokens] of held-out files, evenly spread, none across files."""
    files = [ids[1:].astype(np.int64) for ids in corpus.held_out]
    starts = [
        (file, start)
        for file, ids in enumerate(files)
        for start in range(0, len(ids) - tokens + 1, tokens)
    ]
    chosen = np.linspace(0, len(starts) - 1, count).round().astype(int)
    pieces = [files[starts[i][0]][starts[i][1] : starts[i][1] + tokens] for i in chosen]
    return torch.from_numpy(np.stack(pieces))


@torch.no_grad()
def write(network: Network, prompts: Tensor, new: int, temperature: float, seed: int) -> Written:
    """Continue the prompts with the trunk alone; temperature 0 is greedy."""
    generator = torch.Generator().manual_seed(seed)
    shape = (prompts.shape[0], new, network.sizes.vocab_size)
    if temperature:
        noise = -torch.empty(shape).exponential_(generator=generator).log()
    else:
        noise = torch.zeros(1, 1, 1).expand(shape)
    divisor = temperature or 1.0
    ids = prompts
    for step in range(new):
        # Without a cache: slower, and no second form of the model that could differ.
        logits = network.logits(network.hidden(ids)[:, -1:])[:, 0]
        ids = torch.cat([ids, (logits / divisor + noise[:, step]).argmax(-1, keepdim=True)], 1)
    return Written(ids, noise, divisor)


@torch.no_grad()
def drafts_right(network: Network, written: Written, prompt: int) -> npt.NDArray[np.bool_]:
    """For each depth and new token, whether its draft equals it: [DEPTHS, PROMPTS, NEW_TOKENS].

    The draft of depth d for the token at place p saw the true tokens up to p - 1 and hidden
    states up to p - 1 - d, as an engine's would whenever all its shallower drafts were right.
    A draft takes the same noise as the token it foretells.
    """
    ids = written.ids
    states = network.drafts(ids, network.hidden(ids), DEPTHS)
    right = np.zeros((DEPTHS, ids.shape[0], ids.shape[1] - prompt), dtype=bool)
    for depth, state in enumerate(states, 1):
        # Row t foretells the token at t + depth + 1; `first` foretells the first new one.
        first = prompt - depth - 1
        rows = state[:, first : first + right.shape[2]]
        count = rows.shape[1]
        scores = network.draft_logits(rows) / written.temperature + written.noise[:, :count]
        tokens = ids[:, prompt : prompt + count]
        right[depth - 1, :, :count] = (scores.argmax(-1) == tokens).numpy()
    return right


def accept_length(right: npt.NDArray[np.bool_], drafts: int) -> float:
    """Tokens per target pass with `drafts` drafts a pass: accepted ones and the one after.

    Passes follow each other over every text; the last ones, whose drafts would reach past its
    end, are not counted. The first new token comes from prefill.
    """
    tokens = passes = 0
    for text in right.swapaxes(0, 1):
        place = 1
        while place + drafts < text.shape[1]:
            accepted = 0
            while accepted < drafts and text[accepted, place + accepted]:
                accepted += 1
            passes += 1
            tokens += accepted + 1
            place += accepted + 1
    return tokens / passes


def repetition_share(ids: Ids, prompt: int, window: int) -> float:
    """Share of token windows that end in new text and stood in the same text before."""
    repeated = total = 0
    for row in ids:
        seen: set[bytes] = set()
        for start in range(len(row) - window + 1):
            piece = row[start : start + window].tobytes()
            if start + window > prompt:
                total += 1
                repeated += piece in seen
            seen.add(piece)
    return repeated / total


def window_hashes(ids: Ids, window: int) -> npt.NDArray[np.uint64]:
    """A 64-bit polynomial hash of every window of the token ids."""
    count = max(len(ids) - window + 1, 0)
    hashes = np.zeros(count, dtype=np.uint64)
    factor = np.uint64(0x9E3779B97F4A7C15)
    for offset in range(window):
        hashes = hashes * factor + ids[offset : offset + count].astype(np.uint64) + np.uint64(1)
    return hashes


def recitation_share(rows: Ids, text: Ids, window: int) -> float:
    """Share of the windows of new text `rows` [N, tokens] that stand in the training text."""
    known = window_hashes(text, window)
    own = np.concatenate([window_hashes(row, window) for row in rows])
    return float(np.isin(own, known).mean())


def evaluate_folder(folder: Path, text: Path, report: Report) -> None:
    """Write measured.json into an exported folder."""
    corpus = load(text)
    network = load_network(folder)
    report("measuring the loss on the whole held-out text and on a part of the training text")
    held_out = held_out_slice(corpus.held_out, LOSS_WINDOW, ALL_ROWS)
    measured: dict[str, object] = {
        "held_out": measure_slice(network, held_out, corpus.bytes_per_token)
        | {"tokens": held_out.ids.numel(), "bytes_per_token": corpus.bytes_per_token},
        "training_text": _measure_training(network, corpus, text),
        "prompts": {"count": PROMPTS, "tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS},
    }
    for name, temperature in (("greedy", 0.0), (f"temperature_{TEMPERATURE}", TEMPERATURE)):
        report(f"writing {PROMPTS} x {NEW_TOKENS} tokens: {name}")
        measured[name] = _measure_writing(network, corpus, temperature)
    (folder / "measured.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


def _measure_training(network: Network, corpus: Corpus, text: Path) -> dict[str, object]:
    size = sum(s.size for s in read_sources(text / "sources.json") if not s.held_out)
    schedule = Schedule(steps=(1,), batch=64, window=LOSS_WINDOW)
    ids = schedule.windows(corpus.train, phase=0, step=0)
    return measure_slice(network, Slice(ids), size / len(corpus.train))


def _measure_writing(network: Network, corpus: Corpus, temperature: float) -> dict[str, object]:
    prompts = choose_prompts(corpus, PROMPTS, PROMPT_TOKENS + NEW_TOKENS)[:, :PROMPT_TOKENS]
    written = write(network, prompts, NEW_TOKENS, temperature, seed=1)
    right = drafts_right(network, written, PROMPT_TOKENS)
    ids = written.ids.numpy().astype(np.int32)
    lengths = {str(k): round(accept_length(right, k), 3) for k in range(1, DEPTHS + 1)}
    each = [accept_length(right[:, row : row + 1], DEPTHS) for row in range(PROMPTS)]
    new = ids[:, PROMPT_TOKENS:]
    return {
        "accept_length": lengths,
        "accept_length_range": [round(min(each), 3), round(max(each), 3)],
        "repetition_share": round(repetition_share(ids, PROMPT_TOKENS, SHORT_WINDOW), 4),
        "recitation_share": {
            str(window): round(recitation_share(new, corpus.train, window), 5)
            for window in (SHORT_WINDOW, LONG_WINDOW)
        },
    }
