"""What the backend runs on: a device, or the emulation of its operators."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from surefoot.backend.ascend.backend import AscendBackend, Machine
from surefoot.backend.ascend.vendor import Vendor, installed_vendor
from surefoot.backend.protocol import Capabilities
from surefoot.errors import SettingError

if TYPE_CHECKING:
    from surefoot.backend.ascend.emulate import EmulatedVendor

log = logging.getLogger(__name__)

_DEVICE_RECORDINGS = 48
"""A device has streams for so many graphs at least, whatever else runs on it."""

_COMPOSED = (
    "causal_conv",
    "rotary",
    "compress",
    "attend_latents",
    "window_attention",
    "choose",
    "choose_experts",
    "enter_streams",
    "write_streams",
    "gated_norm",
    "int8 with scales by groups",
)


def ascend_backend(emulate: bool) -> AscendBackend:
    """The backend on the device of this machine, or emulated.

    Raises:
        SettingError: there is no device.
    """
    if not emulate:
        return AscendBackend(_installed())
    from surefoot.backend.ascend.emulate import STRICT, EmulatedVendor

    return emulated_backend(EmulatedVendor(STRICT))


def _installed() -> Machine:
    capabilities = _capabilities("npu", bitwise=False, recordings=_DEVICE_RECORDINGS)
    return Machine(installed_vendor(), torch.device("npu"), capabilities, _refuse)


def _refuse(reasons: Sequence[str]) -> None:
    raise SettingError("device", f"'npu' cannot run this model: {'; '.join(reasons)}")


def emulated_backend(vendor: EmulatedVendor) -> AscendBackend:
    """The backend on emulated operators, whose limits on sizes may be lifted."""

    def relax(reasons: Sequence[str]) -> None:
        if vendor.profile.size_limits:
            log.warning(
                "no device could run this model: %s; the emulation lifts limits on sizes for it, "
                "and nothing else",
                "; ".join(reasons),
            )
        vendor.profile = replace(vendor.profile, size_limits=False)

    most = vendor.profile.most_graphs
    capabilities = _capabilities("npu (emulated)", bitwise=True, recordings=most)
    # Its own types of graph are narrower than what any vendor may have.
    mine = cast("Vendor", vendor)
    return AscendBackend(Machine(mine, torch.device("cpu"), capabilities, relax))


def _capabilities(name: str, *, bitwise: bool, recordings: int) -> Capabilities:
    return Capabilities(
        name=name,
        bitwise=bitwise,
        dtypes=("bfloat16",),
        page_tokens=128,
        max_draft_tokens=15,
        recordings=recordings,
        int8=True,
        host_lengths=True,
        ordered_entries=False,
        composed=_COMPOSED,
    )
