"""Settings of this folder."""

import pytest


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A simulated failure is no news."""
    caplog.set_level("CRITICAL", logger="surefoot")
