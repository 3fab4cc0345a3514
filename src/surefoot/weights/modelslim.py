"""ModelSlim's checkpoints: linears in int8, tensor by tensor as a file beside the weights says.

`quant_model_description.json` has for each stored tensor one of

    FLOAT          stored as it is
    W8A8_DYNAMIC   weight int8 [n, k], weight_scale [n, 1], weight_offset [n, 1] of zeros; the scale
                   of an input is found row by row
    W8A8           weight int8 [n, k], input_scale [1], input_offset [1], quant_bias int32 [n],
                   deq_scale [n]: y = (q(x) . weight + quant_bias) * deq_scale, with
                   q(x) = round(x / input_scale) + input_offset; the bias is in quant_bias
    W4A8_DYNAMIC   weight in 4 bits, see `four_bits`; `version` and `group_size` in the same file
                   say how they are packed and scaled

and others that are not supported. A weight and what belongs to it share the decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from surefoot.backend.operands import FixedInput, Int8Weight
from surefoot.errors import WeightsError
from surefoot.weights import four_bits
from surefoot.weights.checkpoint import EncodedCheckpoint
from surefoot.weights.counts import Linears
from surefoot.weights.names import listed
from surefoot.weights.stored_int8 import (
    FLOATS,
    WEIGHT,
    beside,
    read_codes,
    read_number,
    read_vector,
    require_zeros,
)

FLOAT, W8A8_DYNAMIC, W8A8, W4A8_DYNAMIC = "FLOAT", "W8A8_DYNAMIC", "W8A8", "W4A8_DYNAMIC"
PACKED_VERSION = "1.0.0"
_PARTS = {
    W8A8_DYNAMIC: ("weight_scale", "weight_offset"),
    W8A8: ("input_scale", "input_offset", "quant_bias", "deq_scale"),
    W4A8_DYNAMIC: four_bits.PARTS,
}
_MAY_HAVE = {W4A8_DYNAMIC: (*four_bits.GROUPS, four_bits.ADDED)}
COMPANIONS = tuple(
    dict.fromkeys(
        part for table in (_PARTS, _MAY_HAVE) for parts in table.values() for part in parts
    )
)
"""What may stand beside the weight of a linear."""

_DESCRIPTIONS = "quant_model_description*.json"
_INT8 = "I8"
_BIAS = ".bias"


def find_description(folder: Path) -> Path | None:
    """The file that makes a folder one of ModelSlim's.

    Raises:
        WeightsError: there are several.
    """
    found = sorted(folder.glob(_DESCRIPTIONS))
    if len(found) > 1:
        names = listed([file.name for file in found])
        raise WeightsError(f"{folder} has more than one description of its weights: {names}")
    return found[0] if found else None


class Decisions:
    """What a description says of each tensor, asked by the names that the model knows.

    Attributes:
        is_packed: two codes of 4 bits share a byte.
        group_size: inputs that share a scale in 4 bits; 0 if the description does not say.
    """

    def __init__(self, path: Path, said: Mapping[str, object], stored: Callable[[str], str]):
        """Look up what was `said` at `path` under the name that `stored` gives of a tensor."""
        self._path, self._said, self._stored = path, said, stored
        self.is_packed = said.get("version") == PACKED_VERSION
        size = said.get("group_size", 0)
        self.group_size = size if isinstance(size, int) and size > 0 else 0

    def of(self, name: str) -> str:
        """The decision for a tensor; what stands beside a weight may leave it to the weight.

        Raises:
            WeightsError: there is none, or one that is not supported.
        """
        module, _, last = name.rpartition(".")
        said = self._said.get(self._stored(name))
        if said is None and last in COMPANIONS:
            return self.of(module + WEIGHT)
        if said is None:
            raise WeightsError(f"{self._path.name} says nothing of tensor {self._stored(name)!r}")
        if said not in (FLOAT, *_PARTS):
            known = ", ".join((FLOAT, *_PARTS))
            raise WeightsError(
                f"{self._path.name} says {said!r} of tensor {self._stored(name)!r}, which is not "
                f"supported; known are {known}"
            )
        return str(said)


def read_decisions(
    content: Mapping[str, object], path: Path, stored_name: Callable[[str], str] = str
) -> Decisions:
    """Read the description at `path`.

    Args:
        content: what is in it.
        path: for messages.
        stored_name: from a tensor's name to that in the files, which the description uses.

    Raises:
        WeightsError: the model needs more than its tensors, as inputs are rotated on the way.
    """
    metadata = content.get("metadata")
    if isinstance(metadata, Mapping) and metadata.get("quarot"):
        raise WeightsError(
            f"{path.name} asks for rotations while the model runs (metadata.quarot), which are not "
            "supported; export the model without online rotations"
        )
    return Decisions(path, content, stored_name)


class ModelSlimCheckpoint:
    """A checkpoint some of whose linears are int8; what belongs to their weights does not show.

    Attributes:
        config: see Checkpoint.
        generation: see Checkpoint.
        form: see Int8Checkpoint.
    """

    form = "modelslim"

    def __init__(self, stored: EncodedCheckpoint, decisions: Decisions) -> None:
        """Read `stored` as it was decided.

        Raises:
            WeightsError: a tensor has no decision, or is not stored as it says; the message names
                it.
        """
        self.config: Mapping[str, object] = stored.config
        self.generation: Mapping[str, object] = stored.generation
        self._stored, self._decisions = stored, decisions
        everything = frozenset(stored.names())
        decided = {name: decisions.of(name) for name in sorted(everything)}
        for name, decision in decided.items():
            self._check(name, decision)
        self._int8 = {
            name: decision
            for name, decision in decided.items()
            if decision != FLOAT and name.endswith(WEIGHT)
        }
        wanted = {part for name in self._int8 for part in self._parts(name)}
        if absent := wanted - everything:
            raise WeightsError(
                f"linears in int8 lack tensors that belong to them: {listed(absent)}"
            )
        allowed = {
            beside(name, part)
            for name, decision in self._int8.items()
            for part in _MAY_HAVE.get(decision, ())
        }
        self._names = everything - wanted - allowed

    def names(self) -> Collection[str]:
        """All tensors but those that belong to a weight in int8."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        shape = self._stored.shape(name)
        if self._decisions.is_packed and self._int8.get(name) == W4A8_DYNAMIC:
            return 2 * shape[0], shape[1]
        return shape

    def read(self, name: str) -> Tensor:
        """One tensor in its stored dtype; a weight in int8 as codes, which mean nothing alone."""
        return self._stored.read(name)

    def int8(self, name: str, _: Callable[[], Tensor]) -> Int8Weight | None:
        """The weight of this name if it is stored in int8; see taker.Int8Form.

        Raises:
            WeightsError: what belongs to it has another shape, or is of no use.
        """
        decision = self._int8.get(name)
        if decision is None:
            return None
        if decision == W4A8_DYNAMIC:
            is_packed, size = self._decisions.is_packed, self._decisions.group_size
            return four_bits.read_four_bits(self._stored, name, is_packed, size)
        return self._dynamic(name) if decision == W8A8_DYNAMIC else self._static(name)

    @property
    def linears(self) -> Linears:
        """How much is in int8."""
        numbers = sum(math.prod(self.shape(name)) for name in self._int8)
        return Linears(numbers, sum(map(self._scales, self._int8)))

    def close(self) -> None:
        """Let go of the files."""
        self._stored.close()
        self._names = frozenset()

    def _parts(self, name: str) -> list[str]:
        """What must stand beside a weight in int8."""
        decision = self._int8[name]
        parts = [beside(name, part) for part in _PARTS[decision]]
        groups = [beside(name, part) for part in four_bits.GROUPS]
        grouped = self._decisions.group_size or any(part in self._stored.names() for part in groups)
        return parts + (groups if decision == W4A8_DYNAMIC and grouped else [])

    def _scales(self, name: str) -> int:
        """How many scales a weight in int8 has."""
        second = beside(name, four_bits.GROUPS[0])
        grouped = self._int8[name] == W4A8_DYNAMIC and second in self._stored.names()
        return math.prod(self._stored.shape(second)) if grouped else self.shape(name)[0]

    def _check(self, name: str, decision: str) -> None:
        """The stored type has the last word; one that contradicts the description is an error."""
        encoding = self._stored.encoding(name)
        wanted = decision != FLOAT and name.endswith(WEIGHT)
        part = name.rpartition(".")[2]
        belongs = wanted or part in COMPANIONS or part == _BIAS[1:]
        if (encoding == _INT8) != wanted and (wanted or part != "input_offset"):
            raise WeightsError(
                f"tensor {name!r} is decided to be {decision}, and it is stored as {encoding}"
            )
        flat = len(self._stored.shape(name)) == 2
        if (decision != FLOAT and not belongs) or (wanted and not flat):
            raise WeightsError(
                f"tensor {name!r} is decided to be {decision}, and it is no weight of a linear"
            )

    def _dynamic(self, name: str) -> Int8Weight:
        scales = self._vector(name, "weight_scale").float()
        require_zeros(name, "weight_offset", self._vector(name, "weight_offset"))
        return Int8Weight(read_codes(self._stored, name), scales)

    def _static(self, name: str) -> Int8Weight:
        scale, offset = (
            read_number(self._stored, name, part) for part in ("input_scale", "input_offset")
        )
        if not (math.isfinite(scale) and scale > 0):
            raise WeightsError(f"tensor {beside(name, 'input_scale')!r} must be above 0: {scale}")
        if offset not in range(-128, 128):
            raise WeightsError(
                f"tensor {beside(name, 'input_offset')!r} must be a whole number in int8: {offset}"
            )
        added = self._vector(name, "quant_bias", {torch.int32})
        scales = _as_floats(self._vector(name, "deq_scale", {*FLOATS, torch.int64}))
        fixed = FixedInput(scale, int(offset), added)
        return Int8Weight(read_codes(self._stored, name), scales, fixed)

    def _vector(self, name: str, part: str, dtypes: Collection[torch.dtype] = FLOATS) -> Tensor:
        return read_vector(self._stored, name, part, self._stored.shape(name)[0], dtypes)


def _as_floats(scale: Tensor) -> Tensor:
    """Scales that may be stored as the bits of float32 in int64."""
    if scale.is_floating_point():
        return scale.float()
    return (scale & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
