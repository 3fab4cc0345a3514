"""Models of transformers, each made and saved once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.parity.oracle import MODELS, save


@dataclass(frozen=True)
class Saved:
    """A model and the folder that holds it."""

    oracle: PreTrainedModel
    folder: Path


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    made: dict[str, Saved] = {}

    def by_name(name: str) -> Saved:
        if name not in made:
            oracle = MODELS[name]()
            made[name] = Saved(oracle, save(oracle, tmp_path_factory.mktemp("model")))
        return made[name]

    return by_name
