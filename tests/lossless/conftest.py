"""Models and plain answers, made once for all tests of this folder."""

import pytest

from tests.lossless.harness import Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("lossless"))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A drafter that is meant to fail is no news."""
    caplog.set_level("CRITICAL", logger="surefoot")
