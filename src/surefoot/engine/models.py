"""Loads a model by name: its files, its weights on a backend, its tokenizer and its defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from surefoot.backend import make_backend
from surefoot.backend.protocol import Backend
from surefoot.config import W8A8, EngineConfig
from surefoot.engine.forms import FLOATS, WeightForm, told, weight_form
from surefoot.errors import MemoryPlanError, SettingError
from surefoot.model.model import Description, Model
from surefoot.model.registry import family_of
from surefoot.state.pool import DTYPES
from surefoot.text.gguf_vocab import tokenizer_from_gguf
from surefoot.text.messages import ChatFormat
from surefoot.text.template import ChatTemplate
from surefoot.text.tokenizer import Tokenizer, load_tokenizer
from surefoot.weights.gguf import GgufCheckpoint
from surefoot.weights.load import Checkpoint, TensorTaker, open_checkpoint
from surefoot.weights.locate import locate

Progress = Callable[[str], None]


@dataclass(frozen=True)
class LoadedModel:
    """A model that engines can share.

    Attributes:
        name: as the user gave it.
        model: weights, packed for `backend`.
        backend: where it runs.
        dtype: element type of weights and caches, e.g. "float32".
        tokenizer: None if the checkpoint brings none; then only token ids are served.
        generation: the checkpoint's own sampling defaults.
        weight_bytes: what the parameters take.
        family_format: how conversations are written if the tokenizer has no chat template.
        form: how the weights of linears are kept.
    """

    name: str
    model: Model
    backend: Backend
    dtype: str
    tokenizer: Tokenizer | None
    generation: Mapping[str, object]
    weight_bytes: int
    family_format: ChatFormat | None = None
    form: str = FLOATS

    @cached_property
    def chat_format(self) -> ChatFormat | None:
        """How conversations are written, if that is known; a template takes a while to compile.

        Raises:
            TokenizerError: the template is invalid.
        """
        if self.tokenizer is None:
            return None
        if self.tokenizer.chat_template is None:
            return self.family_format
        return ChatTemplate(self.tokenizer.chat_template, self.tokenizer.special_tokens)


def silent(line: str) -> None:
    """A progress callback that says nothing."""


def load(name: str, config: EngineConfig, progress: Progress = silent) -> LoadedModel:
    """Load the target model of an engine.

    Raises:
        ModelError: not found, damaged, or not supported; the message says which.
        SettingError: device or dtype cannot be had.
    """
    backend = make_backend(config.device, config.bitwise, emulate=config.emulate)
    backend.prepare(progress)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    path = locate(name, revision=config.revision, progress=progress)
    return load_on(name, path, backend, config.dtype, progress, quantization=config.quantization)


def load_on(
    name: str,
    path: Path,
    backend: Backend,
    dtype: str,
    progress: Progress,
    prefix: str = "",
    quantization: str | None = None,
) -> LoadedModel:
    """Load the model at `path` onto a backend; its cache names start with `prefix`."""
    kind = dtype_for(backend, dtype)
    checkpoint = open_checkpoint(path)
    try:
        family = family_of(checkpoint.config)
        described = family.describe(checkpoint.config, kind, prefix)
        form = weight_form(checkpoint, family, described, quantization, backend)
        _require_memory(described, form, name, backend, kind)
        take = TensorTaker(checkpoint, DTYPES[kind], progress, form.int8)
        model = family.load(take, checkpoint.config, backend, prefix)
        take.finish()
        tokenizer = _tokenizer(checkpoint, path)
        generation = dict(checkpoint.generation)
        chat = family.chat_format(path) if family.chat_format is not None else None
    finally:
        checkpoint.close()
    size = form.bytes(model.description, DTYPES[kind].itemsize)
    return LoadedModel(name, model, backend, kind, tokenizer, generation, size, chat, form.name)


def _require_memory(
    description: Description, form: WeightForm, name: str, backend: Backend, dtype: str
) -> None:
    """Refuse before anything is read.

    Raises:
        MemoryPlanError: the weights do not fit into what is free.
    """
    needed, free = form.bytes(description, DTYPES[dtype].itemsize), backend.free_memory()
    if needed > free:
        others = [other for other in backend.capabilities.dtypes if other != dtype]
        smaller = [
            f"--dtype {other} ({_gib(form.bytes(description, DTYPES[other].itemsize))})"
            for other in others
            if DTYPES[other].itemsize < DTYPES[dtype].itemsize
        ]
        if form.name == FLOATS and description.linears.numbers and backend.capabilities.int8:
            size = replace(form, linears=description.linears).bytes(
                description, DTYPES[dtype].itemsize
            )
            smaller.append(f"--quantization {W8A8} ({_gib(size)})")
        raise MemoryPlanError(
            f"the {description.parameters:,} weights of {name} need {_gib(needed)} in "
            f"{told(form.name, dtype)}, and {_gib(free)} are free; "
            f"take {' or '.join([*smaller, 'a smaller model'])}"
        )


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"


def load_draft(
    target: LoadedModel, config: EngineConfig, progress: Progress = silent
) -> LoadedModel:
    """Load the draft model beside its target.

    Raises:
        SettingError: its vocabulary is not the target's.
    """
    assert config.draft_model is not None, "config was checked"
    path = locate(config.draft_model, revision=None, progress=progress)
    draft = load_on(
        config.draft_model,
        path,
        target.backend,
        target.dtype,
        progress,
        "draft.",
        config.quantization,
    )
    ours, theirs = target.model.description.vocab_size, draft.model.description.vocab_size
    if ours != theirs:
        raise SettingError(
            "draft_model",
            f"{config.draft_model!r} has {theirs} tokens in its vocabulary and the model {ours}; "
            "they must share one",
        )
    return draft


def _tokenizer(checkpoint: Checkpoint, path: Path) -> Tokenizer | None:
    if isinstance(checkpoint, GgufCheckpoint):
        return tokenizer_from_gguf(checkpoint.metadata())
    return load_tokenizer(path)


def dtype_for(backend: Backend, dtype: str) -> str:
    """The element type that `dtype` means on a backend; "auto" is its best.

    Raises:
        SettingError: the backend does not take it.
    """
    known = backend.capabilities.dtypes
    if dtype == "auto":
        return known[0]
    if dtype not in known:
        raise SettingError(
            "dtype",
            f"{backend.capabilities.name} does not offer {dtype!r}; known are {', '.join(known)}",
        )
    return dtype
