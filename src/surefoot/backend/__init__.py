"""Devices by name. A backend is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from surefoot.backend.protocol import Backend
from surefoot.errors import SettingError


def _reference(bitwise: bool | None) -> Backend:
    from surefoot.backend.reference import ReferenceBackend

    return ReferenceBackend()


def _cpu(bitwise: bool | None) -> Backend:
    from surefoot.backend.cpu import CpuBackend

    return CpuBackend(bitwise is not False)


def _cuda(bitwise: bool | None) -> Backend:
    from surefoot.backend.cuda.backend import CudaBackend

    return CudaBackend()


BACKENDS: Mapping[str, Callable[[bool | None], Backend]] = {
    "cpu": _cpu,
    "cuda": _cuda,
    "reference": _reference,
}


def make_backend(device: str, bitwise: bool | None) -> Backend:
    """The backend called `device`.

    Args:
        device: a key of BACKENDS, or "auto" for the fastest that is present.
        bitwise: True demands the bitwise mode, False forgoes it, None takes it where it exists.

    Raises:
        SettingError: the device is unknown or absent, or cannot be bitwise as demanded.
    """
    name = _best() if device == "auto" else device
    if name not in BACKENDS:
        raise SettingError(
            "device", f"{device!r} is unknown; known are auto, {', '.join(BACKENDS)}"
        )
    backend = BACKENDS[name](bitwise)
    if bitwise and not backend.capabilities.bitwise:
        raise SettingError(
            "bitwise", f"the backend {name!r} cannot promise it; leave it out or use cpu"
        )
    return backend


def _best() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
