"""Settings and models of this folder."""

from collections.abc import Callable

import pytest

from surefoot.config import make_config
from surefoot.engine.models import LoadedModel, load, load_draft
from surefoot.testing.tiny_models import write_tiny

Pair = tuple[LoadedModel, LoadedModel]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A failure that a test plants is no news."""
    caplog.set_level("CRITICAL", logger="surefoot")


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, float], Pair]:
    """(architecture, drift) to a target and a draft model that is off by that much."""
    found: dict[tuple[str, float], Pair] = {}

    def make(architecture: str, drift: float) -> Pair:
        if (architecture, drift) not in found:
            folder = tmp_path_factory.mktemp("pair")
            target = write_tiny(folder / "target", architecture, mixed=True)
            draft = write_tiny(folder / "draft", architecture, mixed=True, drift=drift)
            loaded = load(str(target), make_config(device="cpu"))
            config = make_config(device="cpu", drafter="draft-model", draft_model=str(draft))
            found[architecture, drift] = loaded, load_draft(loaded, config)
        return found[architecture, drift]

    return make
