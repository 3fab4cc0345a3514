"""What is measured: on held-out text during training, and on the finished model's own text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train.network import Network
from tools.train.text import Ids

DEPTHS = 3
SLICE_ROWS = 64


@dataclass(frozen=True)
class Slice:
    """Held-out token ids [rows, window] that every measurement of a run uses."""

    ids: Tensor


def held_out_slice(files: Sequence[Ids], window: int, rows: int = SLICE_ROWS) -> Slice:
    """Cut the held-out files, one after the other, into at most `rows` windows."""
    joined = np.concatenate(list(files)).astype(np.int64)
    rows = min(rows, len(joined) // window)
    if rows == 0:
        raise ValueError(f"the held-out text has {len(joined)} tokens; a window takes {window}")
    return Slice(torch.from_numpy(joined[: rows * window]).view(rows, window))


@torch.no_grad()
def measure_slice(network: Network, part: Slice, bytes_per_token: float) -> dict[str, object]:
    """Cross-entropy, bits per byte, and how often drafts name the trunk's likeliest token."""
    loss, tokens = 0.0, 0
    agreed, drafted = [0] * DEPTHS, 0
    for ids in part.ids.split(16):
        hidden = network.hidden(ids)
        logits = network.logits(hidden)
        wanted = ids[:, 1:].flatten()
        loss += F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted, reduction="sum").item()
        tokens += wanted.numel()
        likeliest = logits.argmax(-1)
        states = network.drafts(ids, hidden, DEPTHS)
        drafted += states[0].shape[0] * states[0].shape[1]
        for depth, state in enumerate(states, 1):
            target = likeliest[:, depth : depth + state.shape[1]]
            agreed[depth - 1] += int((network.draft_logits(state).argmax(-1) == target).sum())
    return {
        "loss": round(loss / tokens, 4),
        "bits_per_byte": round(loss / tokens / math.log(2) / bytes_per_token, 4),
        "agreement": [round(count / drafted, 4) for count in agreed],
    }
