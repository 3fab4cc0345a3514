"""A hybrid whose weights are worked out by hand: it recites lists, and the answer is known.

A list is a circle of tokens. The prompt says it once; the model goes on round the circle for as
long as it is asked to. A change is a full stop and the circle in its new order.

Tokens are of two kinds, and each kind is remembered by another layer:

    changing  what follows such a token is stored in the recurrent state of layer 0: its key is the
              token before (the convolution looks one back), its value the token itself. Writing to
              the same key again replaces what was there, so the latest order holds.
    lasting   what follows such a token is found by the attention of layer 1: the key is the token
              before, which a second head of layer 0 hands on, the value the token itself. What
              followed most often holds, so only changing tokens may get another successor.

The stream has three parts of one number per token: which token this is, which lasting token came
before, and which token comes next. Only the last is read by the head. The draft head looks up
everything by attention: it is right until a list changes, and wrong at changed places after that.
So a lost or damaged state, a lost page, a convolution that forgets: all end in wrong answers.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from surefoot.testing.tiny_hybrids import DENSE, TinyHybridSizes, make_hybrid_config

VOCAB = 64
STOP = 0
CHANGING = range(1, 33)
LASTING = range(33, VOCAB)
_TOKEN, _BEFORE, _NEXT = (slice(part * VOCAB, (part + 1) * VOCAB) for part in range(3))
_HIDDEN = 3 * VOCAB
_KEYS = len(CHANGING)
_TAPS = 4
_ROTATED = 16
_HEAD = _ROTATED + VOCAB
_INNER = 16
_CERTAINTY = 1.2
"""Factor on the logits: greedy decoding has a wide margin, sampling errs now and then."""


def write_reciter(folder: Path) -> Path:
    """Write config.json and model.safetensors, in float32, under transformers' names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(make_hybrid_config(DENSE, _SIZES), indent=1))
    save_file(_tensors(), folder / "model.safetensors")
    return folder


_SIZES = TinyHybridSizes(
    vocab=VOCAB,
    hidden=_HIDDEN,
    inner=_INNER,
    layers=2,
    interval=2,
    heads=1,
    key_heads=1,
    head_dim=_HEAD,
    rotary=_ROTATED / _HEAD,
    linear_key_heads=2,
    linear_value_heads=2,
    linear_key_size=_KEYS,
    linear_value_size=VOCAB,
    taps=_TAPS,
    positions=4096,
)


def _tensors() -> dict[str, Tensor]:
    tensors = {
        "model.embed_tokens.weight": _put(VOCAB, _HIDDEN, slice(None), _TOKEN),
        "model.norm.weight": torch.zeros(_HIDDEN),
        "lm_head.weight": _CERTAINTY * _put(VOCAB, _HIDDEN, slice(None), _NEXT),
        "mtp.fc.weight": _join(),
    }
    for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{part}.weight"] = torch.zeros(_HIDDEN)
    layers = {
        "model.layers.0.": _memory(),
        "model.layers.1.": _attention(LASTING),
        "mtp.layers.0.": _attention(range(VOCAB)),
    }
    for name, own in layers.items():
        tensors |= {name + part: tensor for part, tensor in (own | _rest()).items()}
    return tensors


def _rest() -> dict[str, Tensor]:
    """Norms that change nothing, and a feed-forward that adds nothing."""
    return {
        "input_layernorm.weight": torch.zeros(_HIDDEN),
        "post_attention_layernorm.weight": torch.zeros(_HIDDEN),
        "mlp.gate_proj.weight": torch.ones(_INNER, _HIDDEN),
        "mlp.up_proj.weight": torch.ones(_INNER, _HIDDEN),
        "mlp.down_proj.weight": torch.zeros(_HIDDEN, _INNER),
    }


def _put(outputs: int, inputs: int, rows: slice, columns: slice) -> Tensor:
    """[outputs, inputs] zeros, but ones on the diagonal of the part that is given."""
    matrix = torch.zeros(outputs, inputs)
    part = matrix[rows, columns]
    part.copy_(torch.eye(*part.shape))
    return matrix


def _memory() -> dict[str, Tensor]:
    """The recurrent layer: head 0 knows what follows, head 1 knows the token before."""
    queries, keys = (torch.zeros(2, _KEYS, _HIDDEN) for _ in range(2))
    queries[0] = keys[0] = _put(VOCAB, _HIDDEN, slice(None), _TOKEN)[CHANGING.start : CHANGING.stop]
    # One and the same key for every token, which nothing outlives.
    queries[1, 0, _TOKEN] = keys[1, 0, _TOKEN] = 1
    values = _put(VOCAB, _HIDDEN, slice(None), _TOKEN).repeat(2, 1, 1)
    values[1, : LASTING.start] = 0
    lags = torch.tensor([0, 0, 1, 0, 0, 1]).repeat_interleave(
        torch.tensor([_KEYS, _KEYS, _KEYS, _KEYS, VOCAB, VOCAB])
    )
    taps = torch.zeros(len(lags), 1, _TAPS)
    taps[torch.arange(len(lags)), 0, _TAPS - 1 - lags] = 1
    everything = torch.zeros(_HIDDEN)
    everything[_TOKEN] = 1
    output = torch.zeros(_HIDDEN, 2, VOCAB)
    output[_NEXT, 0] = output[_BEFORE, 1] = torch.eye(VOCAB) / 8
    return {
        "linear_attn.in_proj_qkv.weight": torch.cat(
            [part.flatten(0, 1) for part in (queries, keys, values)]
        ),
        "linear_attn.in_proj_z.weight": 0.1 * everything.repeat(2 * VOCAB, 1),
        "linear_attn.in_proj_b.weight": everything.repeat(2, 1),
        "linear_attn.in_proj_a.weight": torch.zeros(2, _HIDDEN),
        "linear_attn.conv1d.weight": taps,
        # Head 0 forgets nothing, head 1 everything.
        "linear_attn.A_log": torch.tensor([-10.0, 3.0]),
        "linear_attn.dt_bias": torch.tensor([-20.0, 10.0]),
        "linear_attn.norm.weight": torch.ones(VOCAB),
        "linear_attn.out_proj.weight": output.flatten(1),
    }


def _attention(known: range) -> dict[str, Tensor]:
    """What followed the `known` tokens before: looks for those that came after the same token."""
    query, key = torch.zeros(2 * _HEAD, _HIDDEN), torch.zeros(_HEAD, _HIDDEN)
    places = slice(_ROTATED + known.start, _ROTATED + known.stop)
    for matrix, part in ((query, _TOKEN), (key, _BEFORE)):
        columns = slice(part.start + known.start, part.start + known.stop)
        matrix[places, columns] = torch.eye(len(known))
    value = _put(_HEAD, _HIDDEN, slice(VOCAB), _TOKEN)
    return {
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": key,
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": _put(_HIDDEN, _HEAD, _NEXT, slice(VOCAB)) / 4,
        "self_attn.q_norm.weight": torch.full((_HEAD,), 0.5),
        "self_attn.k_norm.weight": torch.full((_HEAD,), 0.5),
    }


def _join() -> Tensor:
    """The draft head sees the next token, and as the one before it the token of the state.

    Both come in large, so they are made small: what attention adds then counts as much as in the
    model, and sampled drafts are as certain as sampled tokens.
    """
    matrix = torch.zeros(_HIDDEN, 2 * _HIDDEN)
    matrix[_TOKEN, _TOKEN] = torch.eye(VOCAB) / 12
    matrix[_BEFORE, _HIDDEN : _HIDDEN + VOCAB] = torch.eye(VOCAB) / 12
    return matrix
