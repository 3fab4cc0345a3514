"""Rotary embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.backend.ascend.emulate.arithmetic import rounded, wide
from surefoot.backend.ascend.emulate.contract import Contract, Operators, operator

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Rotations(Operators):
    """`npu_rotary_mul`, `npu_interleave_rope`."""

    @operator
    def npu_rotary_mul(
        self,
        input: Tensor,
        r1: Tensor,
        r2: Tensor,
        rotary_mode: str = "half",
        rotate: Tensor | None = None,
    ) -> Tensor:
        """Rotate pairs: input * r1 + turned * r2, where turned is (-second, first) of each pair.

        A pair is an entry of the first half with its counterpart in the second ("half"), or two
        neighbours ("interleave"). Shapes are those of the operator's page for A2 and A3.

        Args:
            input: [T, N, D], or 4 dimensions in any order that ends with D, D even and below 896.
            r1: the cosines; D as in input, every other dimension as in input or 1. With "half"
                the first dimension, or the one of the sequence, must be whole; with "interleave"
                all but one must be 1.
            r2: the sines, like `r1`.
            rotary_mode: which entries are a pair.
            rotate: not emulated.

        Returns:
            As `input`.
        """
        contract = Contract("npu_rotary_mul", "aclnnRotaryPositionEmbedding", self.profile)
        contract.unused(rotate=rotate)
        contract.dtype("input", input, *FLOATS)
        contract.dims("input", input, 3, 4)
        size = input.shape[-1]
        contract.require(size % 2 == 0, "D of input", "an even size", size)
        contract.require_size(size < 896, "D of input", "a size below 896", size)
        contract.require(
            rotary_mode in ("half", "interleave"),
            "rotary_mode",
            "'half' or 'interleave'",
            rotary_mode,
        )
        for name, angles in (("r1", r1), ("r2", r2)):
            contract.dtype(name, angles, input.dtype)
            _check_angles(contract, name, input, angles, rotary_mode)
        contract.shape("r2", r2, *r1.shape)
        for name, angles in (("r1", r1), ("r2", r2)):
            most = angles.abs().amax().item() if angles.numel() else 0.0
            contract.trust(most <= 1, f"values of {name}", "cosines or sines in [-1, 1]", most)
        x = wide(input)
        turned = _turn_halves(x) if rotary_mode == "half" else _turn_neighbours(x)
        return rounded(x * wide(r1) + turned * wide(r2), input.dtype)

    @operator
    def npu_interleave_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Neighbours brought into halves, then rotated as halves.

        Shapes and dtypes are those of the operator's page for A2 and A3.

        Args:
            x: [B, N, S, 64], contiguous; float16 or bfloat16.
            cos: [B, 1, S or 1, 64], contiguous; dtype of x.
            sin: like `cos`.

        Returns:
            As `x`; the pairs stay apart in halves.
        """
        contract = Contract("npu_interleave_rope", "aclnnInterleaveRope", self.profile)
        contract.dtype("x", x, torch.float16, torch.bfloat16)
        contract.dims("x", x, 4)
        contract.contiguous(x=x, cos=cos, sin=sin)
        batch, _, length, size = x.shape
        contract.require(size % 2 == 0, "D of x", "an even size", size)
        contract.require_size(size == 64, "D of x", "64", size)
        for name, angles in (("cos", cos), ("sin", sin)):
            contract.dtype(name, angles, x.dtype)
            contract.dims(name, angles, 4)
            lengths = (1, length)
            contract.require(
                angles.shape[2] in lengths, f"S of {name}", f"one of {lengths}", angles
            )
            contract.shape(name, angles, batch, 1, angles.shape[2], size)
        contract.shape("sin", sin, *cos.shape)
        return rounded(interleaved_rotation(wide(x), wide(cos), wide(sin)), x.dtype)


def interleaved_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours brought into halves, then rotated as halves."""
    halves = torch.cat([x[..., ::2], x[..., 1::2]], -1)
    return halves * cos + _turn_halves(halves) * sin


def _check_angles(
    contract: Contract, name: str, x: Tensor, angles: Tensor, rotary_mode: str
) -> None:
    """Angles spread over x as one of the published layouts has it."""
    contract.dims(name, angles, x.dim())
    contract.require(angles.shape[-1] == x.shape[-1], f"D of {name}", str(x.shape[-1]), angles)
    if rotary_mode == "half":
        layouts = ["T1D", "TND"] if x.dim() == 3 else ["11SD", "B1SD", "1S1D", "BS1D", "SB1D"]
        layouts += [] if x.dim() == 3 else ["S11D", "BNSD"]
    else:
        layouts = ["T1D"] if x.dim() == 3 else ["11SD", "1S1D", "S11D"]
    fits = any(
        all(
            came == (1 if letter == "1" else full)
            for letter, came, full in zip(layout, angles.shape, x.shape, strict=True)
        )
        for layout in layouts
    )
    wanted = f"{list(x.shape)} with dimensions of 1 as in one of {', '.join(layouts)}"
    contract.require(fits, f"shape of {name}", wanted, angles)


def _turn_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _turn_neighbours(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
