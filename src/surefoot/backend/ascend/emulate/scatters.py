"""Writes into caches.

Page 0 of a pool is the sink: several padded tokens may write to one place there. Anywhere else
the publications leave the order of two writes open, and whoever makes them made a mistake.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.contract import Contract, Operators, operator

WRITABLE = (
    torch.float32,
    torch.float16,
    torch.bool,
    torch.bfloat16,
    torch.int64,
    torch.int8,
)


class Scatters(Operators):
    """`npu_scatter_nd_update_`, `npu_scatter_pa_kv_cache`."""

    @operator
    def npu_scatter_nd_update_(self, input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        """Put updates[...] at input[indices[..., 0], ..., indices[..., a - 1]].

        Shapes and dtypes are those of the operator's own page.

        Args:
            input: 1 to 8 dimensions; written in place.
            indices: [..., a], at least 2 dimensions; int32 or int64.
            updates: [..., *input.shape[a:]]; dtype of input.

        Returns:
            `input`.
        """
        contract = Contract("npu_scatter_nd_update_", "aclnnScatterNdUpdate", self.profile)
        contract.dtype("input", input, *WRITABLE)
        contract.dims("input", input, *range(1, 9))
        contract.dtype("indices", indices, torch.int32, torch.int64)
        contract.require(indices.dim() >= 2, "dimensions of indices", "at least 2", indices)
        depth = indices.shape[-1]
        wanted = f"a last dimension of 1 to {input.dim()}"
        contract.require(1 <= depth <= input.dim(), "shape of indices", wanted, indices)
        contract.dtype("updates", updates, input.dtype)
        contract.shape("updates", updates, *indices.shape[:-1], *input.shape[depth:])
        places = indices.reshape(-1, depth).long()
        flat = flat_places(contract, "indices", places, input.shape[:depth])
        check_once(contract, "indices", flat, places[:, 0] == 0)
        input[tuple(places.unbind(1))] = updates.reshape(-1, *input.shape[depth:])
        return input

    @operator
    def npu_scatter_pa_kv_cache(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        *,
        compress_lens: Tensor | None = None,
        compress_seq_offsets: Tensor | None = None,
        seq_lens: Tensor | None = None,
        cache_mode: str | None = "PA_NZ",
    ) -> None:
        """Put each token's key and value into its slot.

        Shapes, dtypes and the default mode are those of the operator's own page; only the mode
        "Norm" (or None) is emulated.

        Args:
            key: [T, N, Dk].
            value: [T, N, Dv].
            key_cache: [pages, size, N, Dk]; written in place.
            value_cache: [pages, size, N, Dv]; written in place.
            slot_mapping: [T], page * size + offset; int32 or int64.
            compress_lens: not emulated, like `compress_seq_offsets` and `seq_lens`.
            compress_seq_offsets: see there.
            seq_lens: see there.
            cache_mode: the layout of the caches.
        """
        contract = Contract("npu_scatter_pa_kv_cache", "aclnnScatterPaKvCache", self.profile)
        contract.unused(
            compress_lens=compress_lens,
            compress_seq_offsets=compress_seq_offsets,
            seq_lens=seq_lens,
        )
        contract.emulated(cache_mode in (None, "Norm"), "cache_mode", "'Norm' or None", cache_mode)
        _check_kv(contract, key, value, key_cache, value_cache, slot_mapping)
        slots = slot_mapping.long()
        pages, size = key_cache.shape[:2]
        flat_places(contract, "slot_mapping", slots[:, None], (pages * size,))
        check_once(contract, "slot_mapping", slots, slots < size)
        key_cache.view(pages * size, *key.shape[1:])[slots] = key
        value_cache.view(pages * size, *value.shape[1:])[slots] = value


def _check_kv(
    contract: Contract,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    contract.dtype("key", key, torch.float16, torch.float32, torch.bfloat16, torch.int8)
    contract.dims("key", key, 3)
    contract.dims("value", value, 3)
    contract.shape("value", value, *key.shape[:2], value.shape[2])
    contract.dims("key_cache", key_cache, 4)
    pages, size = key_cache.shape[:2]
    contract.shape("key_cache", key_cache, pages, size, *key.shape[1:])
    contract.shape("value_cache", value_cache, pages, size, *value.shape[1:])
    for name, tensor in (("value", value), ("key_cache", key_cache), ("value_cache", value_cache)):
        contract.dtype(name, tensor, key.dtype)
    contract.contiguous(
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
    )
    contract.dtype("slot_mapping", slot_mapping, torch.int32, torch.int64)
    contract.shape("slot_mapping", slot_mapping, key.shape[0])


def flat_places(
    contract: Contract, name: str, places: Tensor, shape: tuple[int, ...] | torch.Size
) -> Tensor:
    """Row-major numbers of places [count, a] inside `shape`, all of which must exist."""
    bounds = torch.tensor(shape)
    outside = ((places < 0) | (places >= bounds)).any(1)
    if outside.any():
        came = places[outside][0].tolist()
        contract.trust(False, f"range of {name}", f"places inside {list(shape)}", came)
    flat = torch.zeros(len(places), dtype=torch.int64)
    for column, bound in enumerate(shape):
        flat = flat * bound + places[:, column]
    return flat


def check_once(contract: Contract, name: str, flat: Tensor, sink: Tensor) -> None:
    """No place outside the sink is written twice."""
    kept = flat[~sink]
    unique, counts = kept.unique(return_counts=True)
    if len(unique) != len(kept):
        twice = int(unique[counts > 1][0])
        wanted = "each place outside page 0 once"
        contract.trust(False, f"repeats in {name}", wanted, f"place {twice} more than once")
