"""What holds for every test: one thread, no network, repeatable examples."""

import os

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
