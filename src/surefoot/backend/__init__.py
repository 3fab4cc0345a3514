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


def _npu(bitwise: bool | None) -> Backend:
    from surefoot.backend.ascend.machine import ascend_backend

    return ascend_backend(emulate=False)


def _emulated(bitwise: bool | None) -> Backend:
    from surefoot.backend.ascend.machine import ascend_backend

    return ascend_backend(emulate=True)


BACKENDS: Mapping[str, Callable[[bool | None], Backend]] = {
    "cpu": _cpu,
    "cuda": _cuda,
    "npu": _npu,
    "reference": _reference,
}
EMULATIONS: Mapping[str, Callable[[bool | None], Backend]] = {"npu": _emulated}
"""Devices whose operators can be run on the CPU."""


def make_backend(device: str, bitwise: bool | None, *, emulate: bool = False) -> Backend:
    """The backend called `device`.

    Args:
        device: a key of BACKENDS, or "auto" for the fastest that is present.
        bitwise: True demands the bitwise mode, False forgoes it, None takes it where it exists.
        emulate: run the operators of a device on the CPU; see EMULATIONS.

    Raises:
        SettingError: the device is unknown or absent, or cannot do what is demanded.
    """
    name = _best() if device == "auto" else device
    if name not in BACKENDS:
        raise SettingError(
            "device", f"{device!r} is unknown; known are auto, {', '.join(BACKENDS)}"
        )
    if emulate and name not in EMULATIONS:
        raise SettingError("emulate", f"goes with device {', '.join(EMULATIONS)}, not {device!r}")
    backend = (EMULATIONS if emulate else BACKENDS)[name](bitwise)
    if bitwise and not backend.capabilities.bitwise:
        raise SettingError(
            "bitwise", f"the backend {name!r} cannot promise it; leave it out or use cpu"
        )
    return backend


def _best() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
