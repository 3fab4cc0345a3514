"""Checkpoints of compressed-tensors in 8 bits: the config says how, and what is left out.

Of what that format can say, one thing is read (`int-quantized`): weights in int8 with one scale an
output, inputs in int8 with scales that are found row by row. That is W8A8 as it is made here.

    weight        int8 [n, k]
    weight_scale  [n, 1]

`config_groups` names classes or modules that are quantised so, `ignore` modules that are not, by
name or by a pattern that begins with `re:`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping

from torch import Tensor

from surefoot.backend.operands import Int8Weight
from surefoot.errors import WeightsError
from surefoot.weights.checkpoint import EncodedCheckpoint
from surefoot.weights.counts import Linears
from surefoot.weights.names import listed
from surefoot.weights.stored_int8 import WEIGHT, beside, read_codes, read_vector

METHOD = "compressed-tensors"
_FORMAT = "int-quantized"
_SCALE = "weight_scale"
_INT8 = "I8"
_CLASS = "Linear"
_PATTERN = "re:"

_WEIGHTS: Mapping[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("channel",),
    "dynamic": (False, None),
    "group_size": (None, -1),
    "block_structure": (None,),
    "actorder": (None,),
}
_INPUTS: Mapping[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("token",),
    "dynamic": (True,),
    "group_size": (None,),
    "block_structure": (None,),
    "actorder": (None,),
}
_ABSENT = ("kv_cache_scheme", "sparsity_config", "transform_config")
_TOLD = frozenset({
    "quant_method", "format", "config_groups", "ignore", "quantization_status", "version",
    "global_compression_ratio", *_ABSENT,
})  # fmt: skip
_GROUP = frozenset({"weights", "input_activations", "output_activations", "targets", "format"})
_NO_NUMBERS = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})
"""What says how scales were found, and changes nothing about them."""


def scheme_of(config: Mapping[str, object]) -> Scheme | None:
    """What a config says of this format; None if it is of another one or of none.

    Raises:
        WeightsError: it says what is not supported; the message names it.
    """
    for key in ("quantization_config", "compression_config"):
        details = config.get(key)
        if isinstance(details, Mapping) and details.get("quant_method") == METHOD:
            return Scheme(details)
    return None


class Scheme:
    """What a config says: which modules are quantised, and that they are in the one known way."""

    def __init__(self, details: Mapping[str, object]) -> None:
        """Read `quantization_config`.

        Raises:
            WeightsError: it says something else; the message names it.
        """
        _require("format", details.get("format"), (_FORMAT,))
        for key in _ABSENT:
            _require(key, details.get(key) or None, (None,))
        if unknown := details.keys() - _TOLD:
            raise _refusal(min(unknown), details[min(unknown)], "nothing of the kind")
        groups = details.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise _refusal("config_groups", groups, "groups by name")
        self._targets = [target for name, group in groups.items() for target in _group(name, group)]
        self._ignored = _strings("ignore", details.get("ignore") or [])

    def wants(self, name: str) -> bool:
        """Whether the weight of this name is to be in int8, if it is that of a linear."""
        module = name.removesuffix(WEIGHT)
        if _matches(module, self._ignored):
            return False
        return _CLASS in self._targets or _matches(module, self._targets)


def _group(name: str, group: object) -> list[str]:
    """The targets of a group that is quantised in the known way."""
    where = f"config_groups.{name}"
    if not isinstance(group, Mapping):
        raise _refusal(where, group, "an object")
    for part, wanted in (("weights", _WEIGHTS), ("input_activations", _INPUTS)):
        said = group.get(part)
        if not isinstance(said, Mapping):
            raise _refusal(f"{where}.{part}", said, "an object")
        for key, allowed in wanted.items():
            _require(f"{where}.{part}.{key}", said.get(key), allowed)
        if unknown := said.keys() - wanted.keys() - _NO_NUMBERS:
            raise _refusal(f"{where}.{part}.{min(unknown)}", said[min(unknown)], "nothing")
    _require(f"{where}.output_activations", group.get("output_activations"), (None,))
    _require(f"{where}.format", group.get("format"), (None, _FORMAT))
    if unknown := group.keys() - _GROUP:
        raise _refusal(f"{where}.{min(unknown)}", group[min(unknown)], "nothing of the kind")
    return _strings(f"{where}.targets", group.get("targets"))


def _strings(where: str, said: object) -> list[str]:
    if not isinstance(said, list) or not all(isinstance(each, str) for each in said):
        raise _refusal(where, said, "a list of names")
    for each in said:
        if each.startswith(_PATTERN):
            try:
                re.compile(each.removeprefix(_PATTERN))
            except re.error as error:
                raise _refusal(where, each, "patterns") from error
    return said


def _matches(module: str, patterns: Iterable[str]) -> bool:
    """By whole name, or by a pattern that the name begins with, as the format has it."""
    return any(
        re.match(each.removeprefix(_PATTERN), module)
        if each.startswith(_PATTERN)
        else each == module
        for each in patterns
    )


def _require(where: str, said: object, allowed: tuple[object, ...]) -> None:
    # True is no 1 here.
    if not any(said == each and type(said) is type(each) for each in allowed):
        raise _refusal(where, said, " or ".join(map(repr, allowed)))


def _refusal(where: str, said: object, wanted: str) -> WeightsError:
    return WeightsError(
        f"quantization_config in config.json says {where} is {said!r}, which is not supported with "
        f"{METHOD}; known is {wanted}"
    )


class CompressedCheckpoint:
    """Such a checkpoint; scales of weights in int8 do not show.

    Attributes:
        config: see Checkpoint.
        generation: see Checkpoint.
        form: see Int8Checkpoint.
    """

    form = METHOD

    def __init__(
        self, stored: EncodedCheckpoint, scheme: Scheme, stored_name: Callable[[str], str] = str
    ) -> None:
        """Read `stored` as the config says.

        What a weight is stored as has the last word on whether it is a linear's.

        Args:
            stored: weights and scales.
            scheme: what the config says.
            stored_name: from a tensor's name to that in the files, which the config uses.

        Raises:
            WeightsError: a tensor is not stored as the config says; the message names it.
        """
        self.config: Mapping[str, object] = stored.config
        self.generation: Mapping[str, object] = stored.generation
        self._stored = stored
        everything = frozenset(stored.names())
        self._int8 = [name for name in sorted(everything) if stored.encoding(name) == _INT8]
        for name in self._int8:
            _check(stored, name, scheme.wants(stored_name(name)))
        scales = {beside(name, _SCALE) for name in self._int8}
        if absent := scales - everything:
            raise WeightsError(f"weights in int8 lack their scales: {listed(absent)}")
        self._names = everything - scales
        for name in sorted(self._names):
            if name.rpartition(".")[2].startswith("weight_"):
                raise WeightsError(
                    f"tensor {name!r} belongs to no weight in int8, the only form that is read of "
                    f"{METHOD}"
                )

    def names(self) -> Collection[str]:
        """All tensors but scales of weights in int8."""
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
            WeightsError: its scales have another shape.
        """
        if name not in self._int8:
            return None
        scales = read_vector(self._stored, name, _SCALE, self.shape(name)[0]).float()
        return Int8Weight(read_codes(self._stored, name), scales)

    @property
    def linears(self) -> Linears:
        """How much is in int8."""
        shapes = [self.shape(name) for name in self._int8]
        return Linears(sum(map(math.prod, shapes)), sum(shape[0] for shape in shapes))

    def close(self) -> None:
        """Let go of the files."""
        self._stored.close()
        self._names = frozenset()


def _check(stored: EncodedCheckpoint, name: str, wanted: bool) -> None:
    if not name.endswith(WEIGHT) or len(stored.shape(name)) != 2:
        raise WeightsError(f"tensor {name!r} is stored as {_INT8}, and it is no weight of a linear")
    if not wanted:
        raise WeightsError(
            f"tensor {name!r} is stored as {_INT8}, and quantization_config in config.json leaves "
            "it out"
        )
