"""What holds for every test: one thread, no network, repeatable examples."""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# Read when the libraries are first imported, hence before anything else here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

# No deadline and no complaint about slow data: a busy machine is not a fault of the code.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("usual", _PATIENT, derandomize=True, max_examples=60)
settings.register_profile("deep", _PATIENT, max_examples=2000)
settings.load_profile("usual")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the kernels before the first test: on a busy machine they would use up its time."""
    # Whatever runs a model has loaded torch by now; the others need not wait for it.
    if "torch" in sys.modules and not session.config.option.collectonly:
        from surefoot.backend.cpu.kernels import prepare_kernels

        prepare_kernels(lambda _: None)
