"""Puts an engine together from a loaded model and a config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from surefoot.backend.operands import CacheShape
from surefoot.capture import EAGER, Capture
from surefoot.config import AUTO_DRAFT_TOKENS, EngineConfig
from surefoot.draft.curve import CostCurve
from surefoot.draft.depth import AutoDepth, Depth, FixedDepth
from surefoot.draft.draft_model import ModelDrafter
from surefoot.draft.drafter import Drafter, NoDrafter
from surefoot.draft.guard import GuardedDrafter
from surefoot.draft.mtp import MtpDrafter, mtp_caches
from surefoot.draft.ngram import NgramDrafter
from surefoot.draft.plugins import DrafterSetting, make_plugin
from surefoot.engine.calibrate import measure_steps
from surefoot.engine.loop import Loop
from surefoot.engine.models import LoadedModel
from surefoot.engine.runner import Forward, ModelForward, ModelRunner
from surefoot.engine.scheduler import Scheduler, SchedulerLimits
from surefoot.errors import MemoryPlanError, SettingError
from surefoot.state.ledger import Ledger, LedgerLimits
from surefoot.state.plan import MemoryPlan, plan_memory
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec, Paged, Recurrent, page_unit, recurrent_block

_LEAST_CONTEXT = 256


@dataclass(frozen=True)
class Assembly:
    """The parts of a running engine.

    Attributes:
        loop: drives the requests.
        ledger: what is free, held and cached.
        plan: how the memory was divided.
        pools: the target's cache tensors.
        drafter: who guesses ahead.
        capture: owns what is recorded of steps.
        max_model_len: longest context served, in tokens.
    """

    loop: Loop
    ledger: Ledger
    scheduler: Scheduler
    plan: MemoryPlan
    pools: Pools
    drafter: Drafter
    capture: Capture
    max_model_len: int


def resolve_drafter(target: LoadedModel, config: EngineConfig) -> str:
    """The drafter that a config means for this model.

    Raises:
        SettingError: a draft head was asked for that the checkpoint does not have.
    """
    head = target.model.description.draft_head
    if config.drafter == "mtp" and head is None:
        raise SettingError(
            "drafter",
            f"'mtp' needs a draft head in the checkpoint, and {target.name!r} has none; "
            "use ngram, draft-model or none",
        )
    if config.drafter != "auto":
        return config.drafter
    if config.draft_model is not None:
        return "draft-model"
    return "ngram" if head is None else "mtp"


def make_plan(
    caches: Sequence[CacheSpec], config: EngineConfig, target: LoadedModel, depth: int
) -> tuple[MemoryPlan, int]:
    """Divide the memory; without a wanted context length, the longest that fits is taken.

    Returns:
        The plan and the longest context in tokens.
    """
    budget = config.memory if config.memory is not None else target.backend.free_memory() // 2
    page_tokens = page_tokens_of(config, target)
    length = config.max_model_len or target.model.description.max_positions
    while True:
        try:
            plan = plan_memory(
                caches,
                page_tokens=page_tokens,
                draft_tokens=depth,
                max_rows=config.max_rows,
                max_model_len=length,
                budget_bytes=budget,
                points=config.points,
                prefix_cache=config.prefix_cache,
            )
        except MemoryPlanError:
            if config.max_model_len is not None or length // 2 < _LEAST_CONTEXT:
                raise
            length //= 2
        else:
            return plan, length


def assemble(
    target: LoadedModel,
    config: EngineConfig,
    draft: LoadedModel | None,
    drafter: Drafter | None = None,
) -> Assembly:
    """Build pools, ledger, scheduler, drafter and loop.

    A `drafter` given here takes the place of the one that the config names.
    """
    name = resolve_drafter(target, config) if drafter is None else drafter.name
    depth = 0 if name == "none" else config.most_draft_tokens
    check_lengths(target, config, depth)
    caches = target.model.description.caches
    own = drafter_caches(name, config, target, draft)
    plan, length = make_plan([*caches, *own], config, target, depth)
    target.backend.check_caches(cache_shapes([*caches, *own]), plan.page_tokens)
    pools = Pools(caches, plan, target.backend.device)
    ledger = Ledger(
        LedgerLimits(
            pages=plan.pages,
            slots=plan.slots,
            points=plan.points,
            page_tokens=plan.page_tokens,
            bounded=plan.bounded,
            point_every=config.point_every,
            prefix_cache=config.prefix_cache,
        )
    )
    limits = SchedulerLimits(config.max_rows, config.max_step_tokens, config.prefill_chunk)
    scheduler = Scheduler(ledger, limits)
    vocab = target.model.description.vocab_size
    capture = _capture(name, config, target, plan, length)
    captured = config.capture_target
    if captured is None:
        # Where a step is recorded while it is computed, a fault in a draft costs time and no token.
        captured = target.backend.capabilities.padded_recordings
    forward = ModelForward(target.model, pools, target.backend, capture if captured else EAGER)
    if drafter is None:
        parts = _DrafterParts(target, draft, own, plan, capture)
        setting = DrafterSetting(vocab, plan.page_tokens, length)
        drafter = _drafter(name, config, setting, parts)
    guarded = drafter if isinstance(drafter, NoDrafter) else GuardedDrafter(drafter, vocab)
    block = recurrent_block(caches)
    runner = ModelRunner(forward, pools, target.backend, vocab, plan.page_tokens, block)
    policy = _depth(name, config, forward, plan)
    loop = Loop(ledger, scheduler, runner, guarded, policy)
    return Assembly(loop, ledger, scheduler, plan, pools, guarded, capture, length)


def cache_shapes(specs: Sequence[CacheSpec]) -> list[CacheShape]:
    """What the backend has to work on."""
    shapes: list[CacheShape] = []
    for spec in specs:
        ratio = spec.ratio if isinstance(spec, Paged) else 1
        kind = type(spec).__name__.lower()
        parts = spec.state if isinstance(spec, Recurrent) else spec.parts
        shapes += [CacheShape(kind, ratio, part.name, part.shape) for part in parts]
    return shapes


def _capture(
    name: str, config: EngineConfig, target: LoadedModel, plan: MemoryPlan, length: int
) -> Capture:
    """What may be captured; target and drafter share what the device can hold."""
    if not config.capture:
        return EAGER
    longest = -(-(length + plan.draft_tokens + 1) // plan.page_tokens)
    head = target.model.draft_head
    calls = _CALLS.get(name, 1) + (name == "mtp" and head is not None and head.deepens)
    most = target.backend.capabilities.recordings // calls
    return Capture(config.max_rows, plan.draft_tokens + 1, longest, most)


_CALLS = {"mtp": 3, "draft-model": 2}
"""Calls that are captured, the target's included, by drafter."""


def drafter_caches(
    name: str, config: EngineConfig, target: LoadedModel, draft: LoadedModel | None
) -> Sequence[CacheSpec]:
    """What the drafter called `name` keeps for a request beside the target's caches."""
    if draft is not None:
        return draft.model.description.caches
    if name == "mtp":
        return mtp_caches(target.model.description, target.dtype, page_tokens_of(config, target))
    return ()


def page_tokens_of(config: EngineConfig, target: LoadedModel) -> int:
    """P: what the config says, or what the backend likes, or the next that suits the model."""
    if config.page_tokens is not None:
        return config.page_tokens
    description = target.model.description
    unit = page_unit((*description.caches, *description.draft_caches))
    return -(-target.backend.capabilities.page_tokens // unit) * unit


@dataclass(frozen=True)
class _DrafterParts:
    """What drafters with weights are made of; `caches` are those of the drafter."""

    target: LoadedModel
    draft: LoadedModel | None
    caches: Sequence[CacheSpec]
    plan: MemoryPlan
    capture: Capture

    def mtp(self) -> MtpDrafter:
        model, backend = self.target.model, self.target.backend
        assert model.draft_head is not None, "a model describes a draft head only if it has one"
        pools = Pools(self.caches, self.plan, backend.device)
        head, description = model.draft_head, model.description
        return MtpDrafter(head, description, pools, backend, self.plan, self.capture)

    def draft_model(self) -> ModelDrafter:
        assert self.draft is not None, "a draft model is loaded before its engine is assembled"
        model, backend = self.draft.model, self.draft.backend
        pools = Pools(self.caches, self.plan, backend.device)
        return ModelDrafter(model, pools, backend, self.plan.page_tokens, self.capture)


def _drafter(
    name: str, config: EngineConfig, setting: DrafterSetting, parts: _DrafterParts
) -> Drafter:
    if name == "none":
        return NoDrafter()
    if name == "ngram":
        return NgramDrafter(config.ngram_max, config.ngram_min)
    if name == "mtp":
        return parts.mtp()
    if name == "draft-model":
        return parts.draft_model()
    return make_plugin(name, setting)


def _depth(name: str, config: EngineConfig, forward: Forward, plan: MemoryPlan) -> Depth:
    if name == "none":
        return FixedDepth(0)
    if config.draft_tokens is not None:
        return FixedDepth(config.draft_tokens)
    most = min(config.max_rows * (1 + AUTO_DRAFT_TOKENS), config.max_step_tokens)
    with torch.inference_mode():
        measured = measure_steps(forward, plan.page_tokens, most)
    return AutoDepth(CostCurve(measured), AUTO_DRAFT_TOKENS, suspends=name == "mtp")


def check_lengths(target: LoadedModel, config: EngineConfig, depth: int) -> None:
    """Refuse what the model or the backend was not made for.

    Raises:
        SettingError: the context is too long, or drafts of `depth` tokens are too deep.
    """
    most = target.model.description.max_positions
    if config.max_model_len is not None and config.max_model_len > most:
        raise SettingError(
            "max_model_len", f"{config.max_model_len} is more than the model was made for ({most})"
        )
    deepest = target.backend.capabilities.max_draft_tokens
    if depth > deepest:
        raise SettingError(
            "draft_tokens", f"{depth} is more than the backend can verify at once ({deepest})"
        )
