"""A contract emulation of the vendor's public operators, stricter than the device.

`EmulatedVendor` stands where the vendor's module stands: `vendor.npu_rms_norm(x, gamma)` reads
the same with both. What it cannot show: the device's rounding and order of sums, its order among
equal scores, further limits of a given release, timing, and races between streams.
"""

from __future__ import annotations

from surefoot.backend.ascend.emulate.activations import Activations
from surefoot.backend.ascend.emulate.contract import (
    RELAXED,
    STRICT,
    ContractError,
    NotEmulatedError,
    Profile,
    RefusedError,
    SilentError,
)
from surefoot.backend.ascend.emulate.fused_attention import FusedAttention
from surefoot.backend.ascend.emulate.indexers import Indexers
from surefoot.backend.ascend.emulate.latent_caches import LatentCaches
from surefoot.backend.ascend.emulate.linears import Linears
from surefoot.backend.ascend.emulate.merges import Merges
from surefoot.backend.ascend.emulate.norms import Norms
from surefoot.backend.ascend.emulate.rotations import Rotations
from surefoot.backend.ascend.emulate.scatters import Scatters
from surefoot.backend.ascend.emulate.sparse_attention import SparseAttention

__all__ = [
    "RELAXED",
    "STRICT",
    "ContractError",
    "EmulatedVendor",
    "NotEmulatedError",
    "Profile",
    "RefusedError",
    "SilentError",
]


class EmulatedVendor(
    Activations,
    FusedAttention,
    Indexers,
    LatentCaches,
    Linears,
    Merges,
    Norms,
    Rotations,
    Scatters,
    SparseAttention,
):
    """All emulated operators under one profile."""
