"""A model as its config describes it: layers, caches, and the memory plan of an engine on it.

Loads torch, so commands import this module when they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from surefoot.backend import make_backend
from surefoot.backend.operands import Fold
from surefoot.backend.protocol import Backend
from surefoot.cli.footprint import Footprint, Kept, TableRows, layers_text
from surefoot.cli.show import bytes_text
from surefoot.config import EngineConfig
from surefoot.engine.assemble import (
    cache_shapes,
    check_lengths,
    drafter_caches,
    make_plan,
    resolve_drafter,
)
from surefoot.engine.forms import told, weight_form
from surefoot.engine.models import LoadedModel, Progress, dtype_for
from surefoot.errors import ModelError
from surefoot.model.model import Description, DraftHead
from surefoot.model.registry import family_of
from surefoot.state.plan import MemoryPlan
from surefoot.state.pool import Pools
from surefoot.state.spec import DTYPE_BYTES, CacheSpec, Paged, Recurrent, Ring
from surefoot.step import Batch
from surefoot.weights.load import is_stored_in_int8, open_checkpoint, read_config
from surefoot.weights.locate import PACKAGED, locate


@dataclass(frozen=True)
class StateSize:
    """What one request keeps besides pages, against one whole state for each drafted token.

    Attributes:
        checkpoint: bytes of recurrent checkpoints; they do not depend on the depth.
        rings: bytes of rings: windows, and inputs since the checkpoint.
        states: how many states other engines keep: one for each drafted token, one for the bonus
            token, and the one they start from.
        states_bytes: what that many take: recurrent state and windows.
    """

    checkpoint: int
    rings: int
    states: int
    states_bytes: int

    @staticmethod
    def of(caches: Sequence[CacheSpec], draft_tokens: int) -> StateSize:
        """Add up the bounded caches of a model for drafts of up to `draft_tokens` tokens."""
        bounded = [spec for spec in caches if not isinstance(spec, Paged)]
        checkpoint = sum(spec.checkpoint_bytes for spec in bounded if isinstance(spec, Recurrent))
        windows = sum(spec.window_bytes for spec in bounded if isinstance(spec, Ring))
        total = sum(spec.slot_bytes(draft_tokens) for spec in bounded)
        states = draft_tokens + 2
        return StateSize(checkpoint, total - checkpoint, states, states * (checkpoint + windows))

    @property
    def total(self) -> int:
        """Checkpoints and rings together."""
        return self.checkpoint + self.rings

    @property
    def ratio(self) -> float:
        """What is kept here, as a fraction of the states others keep."""
        return self.total / self.states_bytes

    def entry(self) -> dict[str, int | float]:
        """As a JSON object."""
        return {
            "checkpoint_bytes": self.checkpoint,
            "ring_bytes": self.rings,
            "states": self.states,
            "states_bytes": self.states_bytes,
            "ratio": round(self.ratio, 4),
        }

    def sentence(self) -> str:
        """The comparison in words."""
        return (
            f"replay keeps {bytes_text(self.total)} (checkpoints {bytes_text(self.checkpoint)}, "
            f"rings {bytes_text(self.rings)}), k + 2 = {self.states} states would be "
            f"{bytes_text(self.states_bytes)}: {self.ratio:.2f} x"
        )


@dataclass(frozen=True)
class Blueprint:
    """What is known of a model and of an engine on it before anything is loaded.

    Attributes:
        model: as the user named it.
        description: what its config tells.
        more: caches of its drafter, or of several that may be used.
        plan: how memory would be divided.
        memory: bytes that were given for the caches, if any were.
        max_model_len: longest context that fits, in tokens.
        drafter: who would guess ahead.
        weight_bytes: what the parameters take, those of the draft model included.
        form: how weights are kept; see WeightForm.
        backend: where it would run.
        dtype: element type of weights and caches.
    """

    model: str
    description: Description
    more: Sequence[CacheSpec]
    plan: MemoryPlan
    memory: int | None
    max_model_len: int
    drafter: str
    weight_bytes: int
    form: str
    backend: Backend
    dtype: str

    def entry(self) -> dict[str, object]:
        """As a JSON object."""
        return {
            "model": self.model,
            "parameters": self.description.parameters,
            "layers": list(self.description.layers),
            "caches": [self._cache_entry(spec) for spec in self._caches],
            "draft_head": self.description.draft_head,
            "page_tokens": self.plan.page_tokens,
            "pages": self.plan.pages,
            "slots": self.plan.slots,
            "points": self.plan.points,
            "weight_form": self.form,
            "bytes": self._bytes(),
            **self._footprint.entry(),
            "request_state": None if self.state is None else self.state.entry(),
            "backend": self.backend.capabilities.name,
            "capabilities": asdict(self.backend.capabilities),
        }

    @property
    def state(self) -> StateSize | None:
        """What a request of the model keeps besides pages, if it has recurrent layers."""
        own = self.description.caches
        if not any(isinstance(spec, Recurrent) for spec in own):
            return None
        return StateSize.of(own, self.plan.draft_tokens)

    @property
    def _caches(self) -> Sequence[CacheSpec]:
        return [*self.description.caches, *self.more]

    @property
    def _footprint(self) -> Footprint:
        own = self.description.caches
        return Footprint(own, self.more, self.plan, self.max_model_len, self.memory)

    def _bytes(self) -> dict[str, int]:
        """Pools with their sinks."""
        plan = self.plan
        return {
            "weights": self.weight_bytes,
            "pages": (1 + plan.pages) * plan.page_bytes,
            "slots": (1 + plan.slots) * plan.slot_bytes,
            "points": plan.points * plan.point_bytes,
        }

    def _cache_entry(self, spec: CacheSpec) -> dict[str, object]:
        """One cache, its bytes summed over layers."""
        kept = Kept.of(spec, self.plan.draft_tokens)
        if isinstance(spec, Paged):
            kind = {"kind": "paged", "ratio": spec.ratio, "bytes_per_token": kept.bytes}
        else:
            kind = {**self._bounded_entry(spec), "columns": self.plan.capacities[spec.name]}
        return {"name": spec.name, **kind, "formula": kept.formula, "numbers": kept.numbers}

    def _bounded_entry(self, spec: Ring | Recurrent) -> dict[str, object]:
        depth = self.plan.draft_tokens
        size = {"bytes_per_request": spec.slot_bytes(depth), "bytes_per_point": spec.point_bytes}
        if isinstance(spec, Ring):
            return {"kind": "ring", "window": spec.window, **size}
        parts = {"checkpoint_bytes": spec.checkpoint_bytes, "ring_bytes": spec.ring_bytes(depth)}
        return {"kind": "recurrent", "block": spec.block, **size, **parts}

    def tables(self) -> list[TableRows]:
        """For people: title, heads and rows of each table."""
        return [
            ("", ("model", self.model), self._summary()),
            *self._footprint.tables(),
            ("Backend", ("capability", ""), self._capabilities()),
        ]

    def _summary(self) -> list[tuple[str, object]]:
        size, plan = self._bytes(), self.plan
        state = [] if self.state is None else [("state of a request", self.state.sentence())]
        return [
            ("architecture", self.description.architecture),
            ("parameters", f"{self.description.parameters:,}"),
            ("layers", layers_text(self.description.layers)),
            ("draft head", self.description.draft_head or "none"),
            ("drafter", f"{self.drafter}, up to {plan.draft_tokens} tokens"),
            ("longest context", f"{self.max_model_len:,} tokens"),
            ("weights", f"{bytes_text(size['weights'])} in {told(self.form, self.dtype)}"),
            ("pages", f"{plan.pages:,} of {plan.page_tokens} tokens, {bytes_text(size['pages'])}"),
            ("slots", f"{plan.slots:,}, {bytes_text(size['slots'])}"),
            ("resume points", f"{plan.points:,}, {bytes_text(size['points'])}"),
            *state,
        ]

    def _capabilities(self) -> list[tuple[str, object]]:
        known = asdict(self.backend.capabilities)
        return [
            (name.replace("_", " "), ", ".join(value) if isinstance(value, tuple) else value)
            for name, value in known.items()
        ]


def draw(model: str, configs: Sequence[EngineConfig], progress: Progress) -> Blueprint:
    """Describe `model` and plan memory for the config with the deepest draft.

    Args:
        model: what to look at; of a hub id only config.json is fetched.
        configs: at least one; they differ in drafter and depth.
        progress: called with a line of text while a file is fetched.

    Raises:
        SettingError: the model is not found or not supported, or the settings do not suit it.
    """
    first = configs[0]
    backend = make_backend(first.device, first.bitwise, emulate=first.emulate)
    dtype = dtype_for(backend, first.dtype)
    target = _unloaded(model, first, backend, dtype, progress)
    drafters = {config: resolve_drafter(target, config) for config in configs}
    depths = {
        config: 0 if drafter == "none" else config.most_draft_tokens
        for config, drafter in drafters.items()
    }
    config = max(configs, key=lambda config: depths[config])
    check_lengths(target, config, depths[config])
    named = next((each.draft_model for each in configs if each.draft_model is not None), None)
    draft = None
    if named is not None:
        own = replace(first, revision=None)
        draft = _unloaded(named, own, backend, dtype, progress, "draft.")
    models = [target] if draft is None else [target, draft]
    more: list[CacheSpec] = []
    for name in dict.fromkeys(drafters.values()):
        more += drafter_caches(name, config, target, draft if name == "draft-model" else None)
    caches = [*target.model.description.caches, *more]
    plan, longest = make_plan(caches, config, target, depths[config])
    backend.check_caches(cache_shapes(caches), plan.page_tokens)
    return Blueprint(
        model=model,
        description=target.model.description,
        more=more,
        plan=plan,
        memory=config.memory,
        max_model_len=longest,
        drafter=drafters[config],
        weight_bytes=sum(each.weight_bytes for each in models),
        form=target.form,
        backend=backend,
        dtype=dtype,
    )


@dataclass(frozen=True)
class _ConfigOnly:
    """A model of which only the config is known; it computes nothing."""

    description: Description
    draft_head: DraftHead | None = None

    def fold(self, folds: Sequence[Fold], pools: Pools) -> None:
        raise AssertionError("only described, never run")

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        raise AssertionError("only described, never run")

    def logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("only described, never run")


def _unloaded(
    name: str,
    config: EngineConfig,
    backend: Backend,
    dtype: str,
    progress: Progress,
    prefix: str = "",
) -> LoadedModel:
    """What the engine's planning needs to know of a model, from its config.

    Only folders in int8 are opened, as their configs do not say what is.
    """
    path = locate_config(name, config.revision, progress)
    opened = open_checkpoint(path) if is_stored_in_int8(path) else None
    try:
        known = read_config(path) if opened is None else opened.config
        family = family_of(known)
        described = family.describe(known, dtype, prefix)
        form = weight_form(opened, family, described, config.quantization, backend)
    finally:
        if opened is not None:
            opened.close()
    size = form.bytes(described, DTYPE_BYTES[dtype])
    model = _ConfigOnly(described)
    return LoadedModel(name, model, backend, dtype, None, {}, size, form=form.name)


def locate_config(model: str, revision: str | None, progress: Progress) -> Path:
    """Like `locate`, but of a model on the hub only config.json is fetched.

    Raises:
        ModelError: nothing was found.
    """
    on_hub = model.count("/") == 1 and not model.endswith(".gguf") and model not in PACKAGED
    if Path(model).expanduser().exists() or not on_hub:
        return locate(model, revision=revision, progress=progress)
    from huggingface_hub import hf_hub_download

    progress("config.json from the hub")
    try:
        return Path(hf_hub_download(model, "config.json", revision=revision)).parent
    # The network stack below raises errors of many libraries, and all of them mean the same here.
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ModelError(
            f"there is no folder {model!r} here, and its config.json (revision "
            f"{revision or 'main'}) could not be fetched from the hub: "
            f"{type(error).__name__}: {reason}"
        ) from None
