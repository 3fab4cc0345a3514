"""When two runs differ: where first, and whether the arithmetic left that choice open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from surefoot.backend.order import temper
from surefoot.backend.protocol import LEAST_TEMPERATURE
from surefoot.capture import EAGER
from surefoot.checking.report import Difference
from surefoot.engine.engine import Engine
from surefoot.engine.runner import ModelForward
from surefoot.params import SamplingParams
from surefoot.request import Request
from surefoot.sample.choose import scores
from surefoot.sample.context import Contexts
from surefoot.sample.processors import RowContext, process
from surefoot.step import Row, Step

EPSILONS = {"float32": 1e-3, "bfloat16": 2e-2}
"""Processed scores closer than this are a near tie, by element type."""


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that is not the same, or where one of the two ends early."""
    for place, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one != other:
            return place
    return None if len(expected) == len(got) else min(len(expected), len(got))


def difference_of(label: str, plain: Request, other: Request) -> Difference | None:
    """Where a finished request left its plain run, if it did; a failed plain run is a difference.

    Args:
        label: of the prompt.
        plain: the finished plain run.
        other: the finished run of the same prompt and params.
    """
    if plain.error is not None:
        end = len(plain.output)
        return Difference(label, end, None, None, f"the plain run failed: {plain.error}")
    place = first_difference(plain.output, other.output)
    if place is None:
        return None
    expected, got = plain.output[place : place + 1], other.output[place : place + 1]
    return Difference(
        prompt=label,
        position=place,
        expected=expected[0] if expected else None,
        got=got[0] if got else None,
        error=other.error,
    )


class NearTies:
    """Recomputes a choice with the plain engine's model and says which tokens it may fall on."""

    def __init__(self, engine: Engine) -> None:
        """Use an engine while it is idle; nothing of it is changed."""
        self._engine = engine
        self._epsilon = EPSILONS[engine.target.dtype]
        self._contexts = Contexts(engine.target.model.description.vocab_size)

    def holds(self, plain: Request, difference: Difference) -> bool:
        """Whether the two tokens of a difference from `plain`, a finished request, tie nearly."""
        if difference.expected is None or difference.got is None:
            return False
        length = plain.prompt_length + difference.position
        prefix = replace(plain, tokens=plain.tokens[:length])
        context = self._contexts.after(prefix, ())
        self._contexts.forget(plain.id)
        winners = possible_winners(self._logits(prefix.tokens), context, self._epsilon)
        return bool(winners[difference.expected] and winners[difference.got])

    @torch.inference_mode()
    def _logits(self, tokens: Sequence[int]) -> Tensor:
        """[V] float32 logits after `tokens`, computed in one row and brought to the host."""
        target, parts = self._engine.target, self._engine.parts
        lease = parts.ledger.admit(tokens, len(tokens), reuse=False)
        assert lease is not None, "the plain engine is idle and has room for one request"
        parts.pools.apply(parts.ledger.take_work())
        row = Row(tokens, 0, len(tokens), lease.pages, lease.slot, 0, 1, 0)
        forward = ModelForward(target.model, parts.pools, target.backend, EAGER)
        _, logits = forward(Step.of([row], parts.plan.page_tokens))
        parts.ledger.release(lease, tokens, publish=False)
        return logits[0].cpu()


def possible_winners(logits: Tensor, context: RowContext, epsilon: float) -> Tensor:
    """Which tokens `choose` may take if its scores are off by less than `epsilon`.

    A token may win if it may be among those that top_k, top_p and min_p keep, and no token that is
    surely kept scores higher by `epsilon`.

    Args:
        logits: [V] float32.
        context: what the choice depends on besides.
        epsilon: in the unit of processed scores, logits / temperature + noise.

    Returns:
        [V] bool.
    """
    totals = scores(logits[None], [context], cut=False)[0]
    surely, perhaps = _kept(logits, context, epsilon)
    best = totals[surely].amax() if surely.any() else torch.tensor(-math.inf)
    return perhaps & (totals > best - epsilon)


def _kept(logits: Tensor, context: RowContext, epsilon: float) -> tuple[Tensor, Tensor]:
    """[V] bool each: tokens that the cuts keep whatever the error, and those they may keep."""
    processed = process(logits, context)
    possible = processed.isfinite()
    if context.params.greedy:
        return possible, possible
    tempered = temper(
        processed[None],
        processed.amax()[None],
        [max(context.params.temperature, LEAST_TEMPERATURE)],
    )[0]
    surely = possible & _kept_at(tempered, context.params, -epsilon)
    return surely, possible & _kept_at(tempered, context.params, epsilon)


def _kept_at(tempered: Tensor, params: SamplingParams, favour: float) -> Tensor:
    """[V] bool: what the cuts keep if each token is judged with its score raised by `favour`.

    A token's own score counts `favour` more, so those within reach change places with it; the mass
    of probability before it may be off by as much.
    """
    ordered = tempered.sort(descending=True).values
    # How many tokens stand before each one, itself left out when its score is lowered.
    before = torch.searchsorted(-ordered, -(tempered + favour)) - int(favour < 0)
    kept = torch.ones_like(tempered, dtype=torch.bool)
    top_k = params.top_k or len(tempered)
    if top_k < len(tempered):
        kept &= before < top_k
    if params.top_p < 1:
        weights = ordered.double().exp()
        weights[top_k:] = 0
        reached = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
        mass = _mass_before(tempered, before, reached, favour) / reached[-1]
        kept &= (mass < params.top_p + favour) | (before <= 0)
    if params.min_p > 0:
        kept &= tempered + favour >= math.log(params.min_p)
    return kept


def _mass_before(tempered: Tensor, before: Tensor, reached: Tensor, favour: float) -> Tensor:
    """[V] float64 weight of the tokens that stand before each one."""
    if favour > 0:
        return reached[before]
    # All of them and the token itself, less the token itself.
    return (reached[before + 1] - tempered.double().exp()).clamp(min=0)
