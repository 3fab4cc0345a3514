"""A model as its config describes it: layers, caches, and the memory plan of an engine on it.

Loads torch, so commands import this module when they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from torch import Tensor

from surefoot.backend import make_backend
from surefoot.backend.protocol import Backend
from surefoot.cli.show import bytes_text
from surefoot.config import EngineConfig
from surefoot.engine.assemble import check_lengths, make_plan, resolve_drafter
from surefoot.engine.models import LoadedModel, Progress, dtype_for
from surefoot.errors import ModelError
from surefoot.model.model import Description
from surefoot.model.registry import family_of
from surefoot.state.plan import MemoryPlan
from surefoot.state.pool import Pools
from surefoot.state.spec import DTYPE_BYTES, CacheSpec, Paged, Ring
from surefoot.step import Batch
from surefoot.weights.load import read_config
from surefoot.weights.locate import PACKAGED, locate

TableRows = tuple[str, Sequence[str], Sequence[Sequence[object]]]


@dataclass(frozen=True)
class Blueprint:
    """What is known of a model and of an engine on it before anything is loaded.

    Attributes:
        model: as the user named it.
        description: what its config tells.
        caches: those of the model and of its draft model.
        plan: how memory would be divided.
        max_model_len: longest context that fits, in tokens.
        drafter: who would guess ahead.
        weight_bytes: what the parameters take, those of the draft model included.
        backend: where it would run.
        dtype: element type of weights and caches.
    """

    model: str
    description: Description
    caches: Sequence[CacheSpec]
    plan: MemoryPlan
    max_model_len: int
    drafter: str
    weight_bytes: int
    backend: Backend
    dtype: str

    def entry(self) -> dict[str, object]:
        """As a JSON object."""
        return {
            "model": self.model,
            "parameters": self.description.parameters,
            "layers": list(self.description.layers),
            "caches": [self._cache_entry(spec) for spec in self.caches],
            "draft_head": self.description.draft_head,
            "page_tokens": self.plan.page_tokens,
            "pages": self.plan.pages,
            "slots": self.plan.slots,
            "bytes": self._bytes(),
            "backend": self.backend.capabilities.name,
            "capabilities": asdict(self.backend.capabilities),
        }

    def _bytes(self) -> dict[str, int]:
        """Pools with their sinks; resume points count as slots."""
        plan = self.plan
        return {
            "weights": self.weight_bytes,
            "pages": (1 + plan.pages) * plan.page_bytes,
            "slots": (1 + plan.slots + plan.points) * plan.slot_bytes,
        }

    def _cache_entry(self, spec: CacheSpec) -> dict[str, object]:
        """One cache, its bytes summed over layers."""
        if isinstance(spec, Paged):
            per_page, tokens = spec.page_bytes(self.plan.page_tokens), self.plan.page_tokens
            per_token = per_page / tokens if per_page % tokens else per_page // tokens
            kind = {"kind": "paged", "ratio": spec.ratio, "bytes_per_token": per_token}
        else:
            per_request = spec.slot_bytes(self.plan.draft_tokens)
            reach = {"window": spec.window} if isinstance(spec, Ring) else {"block": spec.block}
            name = "ring" if isinstance(spec, Ring) else "recurrent"
            kind = {"kind": name, **reach, "bytes_per_request": per_request}
        return {"name": spec.name, **kind}

    def tables(self) -> list[TableRows]:
        """For people: title, heads and rows of each table."""
        return [
            ("", ("model", self.model), self._summary()),
            ("Caches of a request", ("cache", "kind", "layers", "reach", "bytes"), self._caches()),
            ("Backend", ("capability", ""), self._capabilities()),
        ]

    def _summary(self) -> list[tuple[str, object]]:
        size, plan = self._bytes(), self.plan
        return [
            ("architecture", self.description.architecture),
            ("parameters", f"{self.description.parameters:,}"),
            ("layers", _runs(self.description.layers)),
            ("draft head", self.description.draft_head or "none"),
            ("drafter", f"{self.drafter}, up to {plan.draft_tokens} tokens"),
            ("longest context", f"{self.max_model_len:,} tokens"),
            ("weights", f"{bytes_text(size['weights'])} in {self.dtype}"),
            ("pages", f"{plan.pages:,} of {plan.page_tokens} tokens, {bytes_text(size['pages'])}"),
            (
                "slots",
                f"{plan.slots:,} and {plan.points:,} resume points, {bytes_text(size['slots'])}",
            ),
        ]

    def _caches(self) -> list[tuple[str, str, int, str, str]]:
        rows = []
        for spec in self.caches:
            entry = self._cache_entry(spec)
            if isinstance(spec, Paged):
                reach, size = f"ratio {spec.ratio}", f"{entry['bytes_per_token']:,} a token"
            else:
                reach = f"window {spec.window}" if isinstance(spec, Ring) else f"block {spec.block}"
                size = f"{entry['bytes_per_request']:,} a request"
            rows.append((spec.name, str(entry["kind"]), spec.layers, reach, size))
        return rows

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
    backend = make_backend(first.device, first.bitwise)
    dtype = dtype_for(backend, first.dtype)
    target = _unloaded(model, first.revision, backend, dtype, progress)
    drafters = {config: resolve_drafter(target, config) for config in configs}
    depths = {
        config: 0 if drafter == "none" else config.most_draft_tokens
        for config, drafter in drafters.items()
    }
    config = max(configs, key=lambda config: depths[config])
    check_lengths(target, config, depths[config])
    models = [target]
    named = next((each.draft_model for each in configs if each.draft_model is not None), None)
    if named is not None:
        models.append(_unloaded(named, None, backend, dtype, progress, "draft."))
    caches = [spec for each in models for spec in each.model.description.caches]
    plan, longest = make_plan(caches, config, target, depths[config])
    return Blueprint(
        model=model,
        description=target.model.description,
        caches=caches,
        plan=plan,
        max_model_len=longest,
        drafter=drafters[config],
        weight_bytes=sum(each.weight_bytes for each in models),
        backend=backend,
        dtype=dtype,
    )


@dataclass(frozen=True)
class _ConfigOnly:
    """A model of which only the config is known; it computes nothing."""

    description: Description

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        raise AssertionError("only described, never run")

    def logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("only described, never run")


def _unloaded(
    name: str,
    revision: str | None,
    backend: Backend,
    dtype: str,
    progress: Progress,
    prefix: str = "",
) -> LoadedModel:
    """What the engine's planning needs to know of a model, from its config."""
    config = read_config(locate_config(name, revision, progress))
    description = family_of(config).describe(config, dtype, prefix)
    size = description.parameters * DTYPE_BYTES[dtype]
    return LoadedModel(name, _ConfigOnly(description), backend, dtype, None, {}, size)


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


def _runs(layers: Sequence[str]) -> str:
    """Layers for people: "30 x full", "full, window 128, full, window 128"."""
    runs = [(kind, len(list(same))) for kind, same in groupby(layers)]
    return ", ".join(kind if count == 1 else f"{count} x {kind}" for kind, count in runs)
