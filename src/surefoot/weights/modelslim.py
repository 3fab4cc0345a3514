"""ModelSlim's checkpoints: linears in int8, tensor by tensor as a file beside the weights says.

`quant_model_description.json` has for each stored tensor one of

    FLOAT          stored as it is
    W8A8_DYNAMIC   weight int8 [n, k], weight_scale [n, 1], weight_offset [n, 1] of zeros; the scale
                   of an input is found row by row
    W8A8           weight int8 [n, k], input_scale [1], input_offset [1], quant_bias int32 [n],
                   deq_scale [n]: y = (q(x) . weight + quant_bias) * deq_scale, with
                   q(x) = round(x / input_scale) + input_offset; the bias is in quant_bias

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
from surefoot.weights.checkpoint import EncodedCheckpoint
from surefoot.weights.counts import Linears
from surefoot.weights.names import listed

_FLOAT, _DYNAMIC, _STATIC = "FLOAT", "W8A8_DYNAMIC", "W8A8"
_PARTS = {
    _DYNAMIC: ("weight_scale", "weight_offset"),
    _STATIC: ("input_scale", "input_offset", "quant_bias", "deq_scale"),
}
COMPANIONS = tuple(part for parts in _PARTS.values() for part in parts)
"""What may stand beside the weight of a linear."""

_DESCRIPTIONS = "quant_model_description*.json"
_INT8 = "I8"
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
_WEIGHT, _BIAS = ".weight", ".bias"


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
    """What a description says of each tensor, asked by the names that the model knows."""

    def __init__(self, path: Path, said: Mapping[str, object], stored: Callable[[str], str]):
        """Look up what was `said` at `path` under the name that `stored` gives of a tensor."""
        self._path, self._said, self._stored = path, said, stored

    def of(self, name: str) -> str:
        """The decision for a tensor; what stands beside a weight may leave it to the weight.

        Raises:
            WeightsError: there is none, or one that is not supported.
        """
        module, _, last = name.rpartition(".")
        said = self._said.get(self._stored(name))
        if said is None and last in COMPANIONS:
            return self.of(module + _WEIGHT)
        if said is None:
            raise WeightsError(f"{self._path.name} says nothing of tensor {self._stored(name)!r}")
        if said not in (_FLOAT, *_PARTS):
            known = ", ".join((_FLOAT, *_PARTS))
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
    """

    def __init__(self, stored: EncodedCheckpoint, decisions: Decisions) -> None:
        """Read `stored` as it was decided.

        Raises:
            WeightsError: a tensor has no decision, or is not stored as it says; the message names
                it.
        """
        self.config: Mapping[str, object] = stored.config
        self.generation: Mapping[str, object] = stored.generation
        self._stored = stored
        everything = frozenset(stored.names())
        decided = {name: decisions.of(name) for name in sorted(everything)}
        for name, decision in decided.items():
            self._check(name, decision)
        self._int8 = {
            name: decision
            for name, decision in decided.items()
            if decision != _FLOAT and name.endswith(_WEIGHT)
        }
        hidden = {
            _beside(name, part)
            for name, decision in self._int8.items()
            for part in _PARTS[decision]
        }
        if absent := hidden - everything:
            raise WeightsError(
                f"linears in int8 lack tensors that belong to them: {listed(absent)}"
            )
        self._names = everything - hidden

    def names(self) -> Collection[str]:
        """All tensors but those that belong to a weight in int8."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        return self._stored.shape(name)

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
        return self._dynamic(name) if decision == _DYNAMIC else self._static(name)

    @property
    def linears(self) -> Linears:
        """How much is in int8."""
        shapes = [self.shape(name) for name in self._int8]
        return Linears(sum(map(math.prod, shapes)), sum(shape[0] for shape in shapes))

    def close(self) -> None:
        """Let go of the files."""
        self._stored.close()
        self._names = frozenset()

    def _check(self, name: str, decision: str) -> None:
        """The stored type has the last word; one that contradicts the description is an error."""
        encoding = self._stored.encoding(name)
        wanted = decision != _FLOAT and name.endswith(_WEIGHT)
        part = name.rpartition(".")[2]
        belongs = wanted or part in COMPANIONS or part == _BIAS[1:]
        if (encoding == _INT8) != wanted and (wanted or part != "input_offset"):
            raise WeightsError(
                f"tensor {name!r} is decided to be {decision}, and it is stored as {encoding}"
            )
        if (decision != _FLOAT and not belongs) or (wanted and len(self.shape(name)) != 2):
            raise WeightsError(
                f"tensor {name!r} is decided to be {decision}, and it is no weight of a linear"
            )

    def _dynamic(self, name: str) -> Int8Weight:
        scales = self._vector(name, "weight_scale", _FLOATS).float()
        if self._vector(name, "weight_offset", _FLOATS).any():
            raise WeightsError(f"tensor {_beside(name, 'weight_offset')!r} must be zero throughout")
        return Int8Weight(self._values(name), scales)

    def _static(self, name: str) -> Int8Weight:
        scale, offset = (self._number(name, part) for part in ("input_scale", "input_offset"))
        if not (math.isfinite(scale) and scale > 0):
            raise WeightsError(f"tensor {_beside(name, 'input_scale')!r} must be above 0: {scale}")
        if offset not in range(-128, 128):
            raise WeightsError(
                f"tensor {_beside(name, 'input_offset')!r} must be a whole number in int8: {offset}"
            )
        added = self._vector(name, "quant_bias", {torch.int32})
        scales = _as_floats(self._vector(name, "deq_scale", {*_FLOATS, torch.int64}))
        return Int8Weight(self._values(name), scales, FixedInput(scale, int(offset), added))

    def _values(self, name: str) -> Tensor:
        return self._stored.read(name).clone(memory_format=torch.contiguous_format)

    def _vector(self, name: str, part: str, dtypes: Collection[torch.dtype]) -> Tensor:
        """One number for each output; in memory of its own."""
        own, outputs = _beside(name, part), self.shape(name)[0]
        tensor = self._stored.read(own)
        if tuple(tensor.shape) not in ((outputs,), (outputs, 1)) or tensor.dtype not in dtypes:
            wanted = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise WeightsError(
                f"tensor {own!r} has shape {list(tensor.shape)} in {tensor.dtype}, and {outputs} "
                f"outputs need one number each in {wanted}"
            )
        return tensor.flatten().clone()

    def _number(self, name: str, part: str) -> float:
        tensor = self._stored.read(_beside(name, part))
        if tensor.numel() != 1:
            raise WeightsError(f"tensor {_beside(name, part)!r} must be a single number")
        return float(tensor)


def _beside(weight: str, part: str) -> str:
    return f"{weight.removesuffix(_WEIGHT)}.{part}"


def _as_floats(scale: Tensor) -> Tensor:
    """Scales that may be stored as the bits of float32 in int64."""
    if scale.is_floating_point():
        return scale.float()
    return (scale & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
