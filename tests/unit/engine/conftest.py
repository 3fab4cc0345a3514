"""Settings and models of this folder."""

from pathlib import Path

import pytest

from surefoot.config import make_config
from surefoot.engine.models import LoadedModel, load
from surefoot.testing.tiny_models import write_tiny_llama


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A failure that a test plants is no news."""
    caplog.set_level("CRITICAL", logger="surefoot")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A plain model without a tokenizer."""
    folder: Path = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return load(str(folder), make_config(device="cpu"))
