"""What the choice of a token must follow, written once more in plain Python floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import surefoot.sample.choose as choosing
from surefoot.backend.blockwise import choose as blockwise
from surefoot.backend.cpu import CpuBackend
from surefoot.backend.noise import NoiseKey
from surefoot.backend.protocol import Backend
from surefoot.backend.reference import ReferenceBackend
from surefoot.params import SamplingParams
from surefoot.sample.processors import RowContext

ALPHA = 1e-4
Chooser = Callable[[Tensor, Sequence[RowContext]], list[int]]


class Screened(ReferenceBackend):
    """Chooses as devices do that have no kernel for it."""

    def choose(
        self, scores: Tensor, temperatures: Sequence[float], keys: Sequence[NoiseKey]
    ) -> Tensor:
        return blockwise.choose(scores, temperatures, keys)


BACKENDS: tuple[Backend, ...] = (CpuBackend(), ReferenceBackend(), Screened())


def choose(logits: Tensor, rows: Sequence[RowContext]) -> list[int]:
    """The choice, on which all backends agree."""
    first, *others = (choosing.choose(logits, rows, backend) for backend in BACKENDS)
    assert all(other == first for other in others)
    return first


def try_choose(logits: Tensor, rows: Sequence[RowContext]) -> list[int]:
    """The same of `try_choose`."""
    first, *others = (
        backend.read(choosing.try_choose(logits, rows, backend)) for backend in BACKENDS
    )
    assert all(other == first for other in others)
    return first


def context(
    params: SamplingParams,
    history: Sequence[int] = (),
    *,
    prompt: int = 0,
    ends: frozenset[int] = frozenset(),
    bad: tuple[tuple[int, ...], ...] = (),
    seed: int = 1,
    position: int | None = None,
) -> RowContext:
    """A row; its position is the length of the history unless given."""
    at = len(history) if position is None else position
    return RowContext(params, history, prompt, ends, bad, seed, at)


def law(logits: Sequence[float], row: RowContext) -> list[float]:
    """Probability of each token at this row."""
    processed = _masked(_biased(_penalised(list(logits), row), row), row)
    tokens = range(len(processed))
    order = sorted(tokens, key=lambda token: (-processed[token], token))
    params = row.params
    if params.temperature == 0:
        return [float(token == order[0]) for token in tokens]
    peak = processed[order[0]]
    weight = [math.exp((score - peak) / params.temperature) for score in processed]
    kept = order[: params.top_k] if params.top_k else order
    kept = _prefix(kept, weight, params.top_p)
    kept = [token for token in kept if weight[token] >= params.min_p]
    total = sum(weight[token] for token in kept)
    return [weight[token] / total if token in kept else 0.0 for token in tokens]


def p_value(observed: Sequence[int], expected: Sequence[float]) -> float:
    """Chi-square test: how likely counts as far from the law as these are."""
    if any(count and not share for count, share in zip(observed, expected, strict=True)):
        return 0.0
    draws = sum(observed)
    pairs = [(o, draws * e) for o, e in zip(observed, expected, strict=True) if e]
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    freedom = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
    if freedom == 0:
        return 1.0
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, half))


def _penalised(scores: list[float], row: RowContext) -> list[float]:
    params, output = row.params, list(row.history[row.prompt_length :])
    for token in set(row.history):
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return scores


def _biased(scores: list[float], row: RowContext) -> list[float]:
    for token, bias in row.params.logit_bias.items():
        scores[token] += bias
    return scores


def _masked(scores: list[float], row: RowContext) -> list[float]:
    output = tuple(row.history[row.prompt_length :])
    words = {
        bad[-1] for bad in row.bad_sequences if output[len(output) - len(bad) + 1 :] == bad[:-1]
    }
    early = row.position - row.prompt_length < row.params.min_tokens
    allowed = row.params.allowed_token_ids
    for banned in (words | row.end_tokens if early else words, words, set[int]()):
        masked = [
            -math.inf if token in banned or (allowed and token not in allowed) else score
            for token, score in enumerate(scores)
        ]
        if max(masked) > -math.inf:
            return masked
    raise AssertionError("no token is left")


def _prefix(kept: list[int], weight: list[float], top_p: float) -> list[int]:
    total, reached = sum(weight[token] for token in kept), 0.0
    for count, token in enumerate(kept, start=1):
        reached += weight[token]
        if top_p < 1 and reached >= top_p * total:
            return kept[:count]
    return kept
