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
from surefoot.backend.ascend.emulate.convolutions import Convolutions
from surefoot.backend.ascend.emulate.fused_attention import FusedAttention
from surefoot.backend.ascend.emulate.graph import Graphs
from surefoot.backend.ascend.emulate.indexers import Indexers
from surefoot.backend.ascend.emulate.latent_caches import LatentCaches
from surefoot.backend.ascend.emulate.linears import Linears
from surefoot.backend.ascend.emulate.merges import Merges
from surefoot.backend.ascend.emulate.norms import Norms
from surefoot.backend.ascend.emulate.permuting import Permuting
from surefoot.backend.ascend.emulate.products import Products
from surefoot.backend.ascend.emulate.quantising import Quantising
from surefoot.backend.ascend.emulate.recurrences import Recurrences
from surefoot.backend.ascend.emulate.rotations import Rotations
from surefoot.backend.ascend.emulate.routing import Routing
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
    Convolutions,
    FusedAttention,
    Graphs,
    Indexers,
    LatentCaches,
    Linears,
    Merges,
    Norms,
    Permuting,
    Products,
    Quantising,
    Recurrences,
    Rotations,
    Routing,
    Scatters,
    SparseAttention,
):
    """All emulated operators under one profile."""
