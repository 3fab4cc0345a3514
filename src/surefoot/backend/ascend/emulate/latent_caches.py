"""Norm, rotation and store of latent keys in one."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import poison, rounded, wide
from surefoot.backend.ascend.emulate.contract import Contract, Operators, operator
from surefoot.backend.ascend.emulate.rotations import interleaved_rotation
from surefoot.backend.ascend.emulate.scatters import check_once, flat_places

MODES = ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")
PAGED = ("PA", "PA_BNSD")


class LatentCaches(Operators):
    """`npu_kv_rmsnorm_rope_cache`."""

    @operator
    def npu_kv_rmsnorm_rope_cache(
        self,
        kv: Tensor,
        gamma: Tensor,
        cos: Tensor,
        sin: Tensor,
        index: Tensor,
        k_cache: Tensor,
        ckv_cache: Tensor,
        *,
        k_rope_scale: Tensor | None = None,
        c_kv_scale: Tensor | None = None,
        k_rope_offset: Tensor | None = None,
        c_kv_offset: Tensor | None = None,
        v: Tensor | None = None,
        epsilon: float = 1e-5,
        cache_mode: str = "Norm",
        is_output_kv: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Store the norm of the first part of kv, and the rotated rest.

        Shapes, dtypes and modes are those of the operator's page for A2 and A3; emulated are the
        modes "Norm", "PA" and "PA_BNSD", without quantisation.

        Args:
            kv: [B, 1, S, 512 + 64]; float16 or bfloat16.
            gamma: [512]; dtype of kv, like all that follow but `index`.
            cos: [B, 1, S, 64].
            sin: like `cos`.
            index: int64. [B, S] places inside a row of "Norm"; [B * S] page * size + offset.
            k_cache: "Norm": [B, 1, L, 64], else [pages, size, 1, 64]; written in place with
                neighbours brought into halves, then rotated as halves.
            ckv_cache: "Norm": [B, 1, L, 512], else [pages, size, 1, 512]; written in place.
            k_rope_scale: not emulated, like the next four.
            c_kv_scale: see there.
            k_rope_offset: see there.
            c_kv_offset: see there.
            v: see there.
            epsilon: added to the mean.
            cache_mode: form of the caches.
            is_output_kv: whether the stored values are returned; with pages only.

        Returns:
            Both caches; the rotated part [B, 1, S, 64] and the norm [B, 1, S, 512], undefined
            unless asked for.
        """
        contract = Contract("npu_kv_rmsnorm_rope_cache", "aclnnKvRmsNormRopeCache", self.profile)
        contract.unused(
            k_rope_scale=k_rope_scale,
            c_kv_scale=c_kv_scale,
            k_rope_offset=k_rope_offset,
            c_kv_offset=c_kv_offset,
            v=v,
        )
        contract.require(cache_mode in MODES, "cache_mode", str(MODES), cache_mode)
        paged = cache_mode in PAGED
        contract.emulated(paged or cache_mode == "Norm", "cache_mode", "Norm, PA", cache_mode)
        _check_parts(contract, kv, gamma, cos, sin)
        _check_caches(contract, kv, index, (k_cache, ckv_cache), (cos, gamma), paged)
        latents, rest = kv.split([gamma.shape[0], cos.shape[3]], -1)
        rotated = interleaved_rotation(wide(rest), wide(cos), wide(sin))
        rows = wide(latents)
        normed = rows * (rows.square().mean(-1, keepdim=True) + epsilon).rsqrt() * wide(gamma)
        stored = rounded(rotated, kv.dtype), rounded(normed, kv.dtype)
        for cache, values in zip((k_cache, ckv_cache), stored, strict=True):
            if paged:
                cache.view(-1, cache.shape[3])[index] = values.flatten(0, 2)
            else:
                row = torch.arange(len(cache))[:, None]
                cache[row, 0, index] = values[:, 0]
        if not (is_output_kv and paged):
            stored = poison(stored[0].shape, kv.dtype), poison(stored[1].shape, kv.dtype)
        return k_cache, ckv_cache, *stored


def _check_parts(contract: Contract, kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor) -> None:
    contract.dtype("kv", kv, torch.float16, torch.bfloat16)
    contract.dims("kv", kv, 4)
    contract.dims("gamma", gamma, 1)
    contract.dims("cos", cos, 4)
    batch, _, length, _ = kv.shape
    rotated, normed = cos.shape[3], gamma.shape[0]
    contract.shape("kv", kv, batch, 1, length, rotated + normed)
    contract.require(rotated % 2 == 0, "rotated size", "an even size", rotated)
    contract.require_size(rotated == 64, "rotated size", "64", rotated)
    contract.require_size(normed == 512, "normed size", "512", normed)
    for name, tensor in (("gamma", gamma), ("cos", cos), ("sin", sin)):
        contract.dtype(name, tensor, kv.dtype)
    for name, tensor in (("cos", cos), ("sin", sin)):
        contract.shape(name, tensor, batch, 1, length, rotated)
    contract.contiguous(kv=kv, gamma=gamma, cos=cos, sin=sin)


def _check_caches(
    contract: Contract,
    kv: Tensor,
    index: Tensor,
    caches: tuple[Tensor, Tensor],
    parts: tuple[Tensor, Tensor],
    paged: bool,
) -> None:
    batch, _, length, _ = kv.shape
    contract.dtype("index", index, torch.int64)
    contract.dims("k_cache", caches[0], 4)
    lead = caches[0].shape[:3]
    if paged:
        contract.shape("k_cache", caches[0], *lead[:2], 1, parts[0].shape[-1])
        contract.shape("index", index, batch * length)
        least = -(-length // lead[1]) * batch
        contract.require(lead[0] >= least, "pages", f"at least ceil(S / size) * B = {least}", lead)
    else:
        contract.shape("k_cache", caches[0], batch, 1, lead[2], parts[0].shape[-1])
        contract.shape("index", index, batch, length)
        contract.require(lead[2] >= length, "L of k_cache", f"at least {length}", lead)
    contract.shape("ckv_cache", caches[1], *lead, parts[1].shape[-1])
    for name, cache in zip(("k_cache", "ckv_cache"), caches, strict=True):
        contract.dtype(name, cache, kv.dtype)
    contract.contiguous(index=index, k_cache=caches[0], ckv_cache=caches[1])
    if paged:
        flat = flat_places(contract, "index", index[:, None], (lead[0] * lead[1],))
        check_once(contract, "index", flat, index < lead[1])
    else:
        rows = torch.arange(batch)[:, None].expand(batch, length)
        places = torch.stack([rows, index], -1).view(-1, 2)
        flat = flat_places(contract, "index", places, (batch, lead[2]))
        check_once(contract, "index", flat, torch.zeros_like(flat, dtype=torch.bool))
