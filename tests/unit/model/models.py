"""Small loaded models, as something that the machine of `cuts` can compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from surefoot.backend.protocol import Backend
from surefoot.engine.models import load_on, silent
from surefoot.model.model import Model
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec
from surefoot.step import Batch


@dataclass(frozen=True)
class Logits:
    """A model whose output for a token is the logits after it."""

    model: Model

    @property
    def caches(self) -> Sequence[CacheSpec]:
        return self.model.description.caches

    def compute(self, batch: Batch, pools: Pools) -> Tensor:
        return self.model.logits(self.model.forward(batch, pools))


def load_logits(folder: Path, backend: Backend, dtype: str = "float32") -> Logits:
    return Logits(load_on(folder.name, folder, backend, dtype, silent).model)
