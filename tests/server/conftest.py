"""Tiny models that the server tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.config import make_config
from surefoot.engine.models import LoadedModel, load
from surefoot.testing.tiny_models import write_tiny


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """With tokenizer, chat template, and a context of 256 tokens."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(folder, "LlamaForCausalLM", tokenizer=True, positions=256)
    return load(str(folder), make_config(device="cpu"))


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Without tokenizer."""
    folder: Path = tmp_path_factory.mktemp("models") / "bare"
    write_tiny(folder, "LlamaForCausalLM", positions=256)
    return load(str(folder), make_config(device="cpu"))
