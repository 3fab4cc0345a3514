"""Writes a copy of a folder of floats in int8, as ModelSlim would, tensor by tensor."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from surefoot.backend.operands import Int8Weight
from surefoot.config import W4A8
from surefoot.errors import ModelError
from surefoot.model.registry import family_of
from surefoot.weights.checkpoint import Checkpoint
from surefoot.weights.deepseek_v4 import is_deepseek_v4, transformers_name
from surefoot.weights.four_bits import packed
from surefoot.weights.int8 import FOUR_BITS, made_int4, made_int8
from surefoot.weights.load import FolderCheckpoint, open_checkpoint
from surefoot.weights.modelslim import (
    FLOAT,
    PACKED_VERSION,
    W4A8_DYNAMIC,
    W8A8_DYNAMIC,
    find_description,
)
from surefoot.weights.stored_int8 import Int8Checkpoint
from surefoot.weights.taker import Int8Form
from tools.quantising.shards import ShardWriter

DESCRIPTION = "quant_model_description.json"
WEIGHTS = "quant_model_weights"
GROUP_SIZE = 128
"""What the description says of groups; inputs that it does not divide have smaller ones."""

_HEAD = "lm_head.weight"
_FUSED = re.compile(r"(.*\.experts\.)(gate_up|down)_proj")
_QUANTISATION = ("quantization_config", "compression_config")
_BESIDES = (
    "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "*preprocessor_config.json", "*.model", "*.jinja",
    "encoding/*.py", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""What else is copied: tokenizers, templates, licences."""


@dataclass
class Errors:
    """How far weights lie from the floats that they came from, by kind of tensor."""

    squares: dict[str, tuple[float, float]] = field(default_factory=dict)

    def note(self, name: str, weight: Int8Weight, exact: Tensor) -> None:
        """Count one weight [outputs, inputs]."""
        groups = max(weight.groups, 1)
        parts = weight.values.float().unflatten(1, (groups, -1))
        near = (parts * weight.scales.view(-1, groups, 1)).flatten(1)
        wrong, whole = self.squares.get(kind_of(name), (0.0, 0.0))
        wrong += float((near - exact).double().square().sum())
        self.squares[kind_of(name)] = wrong, whole + float(exact.double().square().sum())

    def relative(self) -> dict[str, float]:
        """Size of the difference over size of the floats."""
        found = self.squares.items()
        return {kind: (wrong / whole) ** 0.5 if whole else 0.0 for kind, (wrong, whole) in found}


@dataclass(frozen=True)
class Written:
    """What came of it.

    Attributes:
        floats: bytes of the source's files.
        bytes: of the copy's.
        errors: see Errors.
        linears: how many weights are in int8.
    """

    floats: int
    bytes: int
    errors: Errors
    linears: int


def quantise_folder(
    source: Path, target: Path, form: str, progress: Callable[[str, int, int], None]
) -> Written:
    """Write the copy.

    Args:
        source: a model folder that surefoot reads as floats.
        target: where the copy goes; empty, or not there yet.
        form: w8a8 or w4a8.
        progress: told the name of a tensor, how many are done, and how many there are.

    Raises:
        ModelError: the source cannot be read or has no floats, or the target is not empty.
    """
    _check_places(source, target)
    stored, checkpoint = FolderCheckpoint(source), open_checkpoint(source)
    try:
        if isinstance(checkpoint, Int8Checkpoint):
            raise ModelError(f"{source} is in int8 already ({checkpoint.form})")
        target.mkdir(parents=True, exist_ok=True)
        return _Copy(stored, checkpoint, target, form).write(progress, source)
    finally:
        checkpoint.close()
        stored.close()


def _check_places(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise ModelError(f"{source} is no folder; of a GGUF file no such copy can be made")
    if find_description(source) is not None:
        raise ModelError(f"{source} is a copy of ModelSlim's already")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} is there already, and not empty")


class _Copy:
    """One copy in the making."""

    def __init__(
        self, stored: FolderCheckpoint, checkpoint: Checkpoint, target: Path, form: str
    ) -> None:
        self._stored, self._checkpoint, self._target = stored, checkpoint, target
        names = family_of(checkpoint.config).int8_linears
        if names is None:
            raise ModelError("int8 is not offered for this architecture")
        self._eight, self._four = names, form == W4A8
        self._form: Int8Form = made_int4(names) if self._four else made_int8(names)
        self._homes = _homes(stored)
        self._is_packed = self._all_even()
        self._said: dict[str, object] = {
            "model_quant_type": W4A8_DYNAMIC if self._four else W8A8_DYNAMIC,
            "version": PACKED_VERSION if self._is_packed else "0",
            "group_size": GROUP_SIZE if self._four else 0,
        }
        self._errors, self._linears = Errors(), 0

    def write(self, progress: Callable[[str, int, int], None], source: Path) -> Written:
        """Write all files."""
        names = self._in_order()
        files = list(dict.fromkeys(self._file(name) for name in names))
        weight_map: dict[str, str] = {}
        size, done = 0, 0
        for number, file in enumerate(files, start=1):
            shard = ShardWriter(self._target / _shard_name(number, len(files)))
            try:
                for name in (name for name in names if self._file(name) == file):
                    progress(name, done, len(names))
                    self._add(shard, name)
                    done += 1
                weight_map |= dict.fromkeys(shard.finish(), shard.path.name)
            finally:
                shard.close()
            size += shard.bytes
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        self._dump(f"{WEIGHTS}.safetensors.index.json", index)
        self._dump(DESCRIPTION, self._said)
        config = {k: v for k, v in self._checkpoint.config.items() if k not in _QUANTISATION}
        self._dump("config.json", config)
        _copy_besides(source, self._target)
        floats = sum((source / each).stat().st_size for each in files)
        return Written(floats, size, self._errors, self._linears)

    def _in_order(self) -> list[str]:
        """Tensors in the order of the source's files; a tied head is one of them."""
        names = sorted(self._checkpoint.names(), key=lambda name: (self._file(name), name))
        if _HEAD not in names and self._table() is not None:
            names.append(_HEAD)
        return names

    def _table(self) -> str | None:
        """The embedding, which a head that is not stored is tied to."""
        tables = (n for n in self._checkpoint.names() if n.endswith(".embed_tokens.weight"))
        return min(tables, default=None)

    def _file(self, name: str) -> str:
        if name not in self._homes:
            table = self._table()
            assert table is not None, "only a tied head is nowhere stored"
            return self._file(table)
        return self._stored.file_of(self._homes[name])

    def _all_even(self) -> bool:
        """Whether all outputs in 4 bits can be packed in pairs."""
        rows = [
            self._checkpoint.shape(name)[-2] // (2 if name.endswith("gate_up_proj") else 1)
            for name in self._checkpoint.names()
            if self._eight.fullmatch(name) and FOUR_BITS.fullmatch(name)
        ]
        return all(count % 2 == 0 for count in rows)

    def _add(self, shard: ShardWriter, name: str) -> None:
        """Write one tensor of the source, or what becomes of it."""
        read = _Once(lambda: self._checkpoint.read(name if name in self._homes else self._tied()))
        stored = self._homes.get(name, name)
        if (fused := _FUSED.fullmatch(name)) is not None:
            start = stored.removesuffix(f"{fused[2]}_proj")
            for expert, whole in enumerate(read()):
                parts = {"down": whole}
                if fused[2] == "gate_up":
                    gate, up = whole.chunk(2)
                    parts = {"gate": gate, "up": up}
                for part, tensor in parts.items():
                    module = f"{start}{expert}.{part}_proj"
                    self._add_linear(shard, name, module + ".weight", tensor)
        else:
            self._add_linear(shard, name, stored, read())

    def _tied(self) -> str:
        table = self._table()
        assert table is not None, "it was looked for before"
        return table

    def _add_linear(self, shard: ShardWriter, name: str, stored: str, tensor: Tensor) -> None:
        """Write a tensor called `name`, or a part of it, under the name `stored`."""
        exact = tensor.float() if tensor.is_floating_point() else tensor
        weight = self._form(name, lambda: exact)
        if weight is None:
            shard.add(stored, tensor)
            self._said[stored] = FLOAT
            return
        if not weight.scales.isfinite().all():
            raise ModelError(f"tensor {stored!r} holds numbers that are not finite, or too large")
        four = self._four and FOUR_BITS.fullmatch(name) is not None
        self._errors.note(name, weight, exact)
        self._linears += 1
        module = stored.removesuffix(".weight")
        parts = _four_bits(weight, self._is_packed) if four else _eight_bits(weight)
        for part, value in parts.items():
            shard.add(f"{module}.{part}", value)
            self._said[f"{module}.{part}"] = W4A8_DYNAMIC if four else W8A8_DYNAMIC

    def _dump(self, name: str, content: Mapping[str, object]) -> None:
        (self._target / name).write_text(json.dumps(content, indent=1))


class _Once:
    """Reads a tensor when it is first wanted."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read
        self._tensor: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._tensor is None:
            self._tensor = self._read()
        return self._tensor


def _eight_bits(weight: Int8Weight) -> dict[str, Tensor]:
    scales = weight.scales[:, None]
    return {
        "weight": weight.values,
        "weight_scale": scales,
        "weight_offset": torch.zeros_like(scales),
    }


def _four_bits(weight: Int8Weight, is_packed: bool) -> dict[str, Tensor]:
    """Scales of groups stand alone: what they are multiplied with is 1."""
    scales = weight.scales if weight.groups else weight.scales[:, None]
    parts = weight.values.float().unflatten(1, (scales.shape[1], -1))
    ones = torch.ones(len(scales), 1)
    return {
        "weight": packed(weight.values) if is_packed else weight.values,
        "weight_scale": ones,
        "weight_offset": torch.zeros_like(ones),
        "weight_scale_second": scales,
        "weight_offset_second": torch.zeros_like(scales),
        "scale_bias": 8 * (parts.sum(2) * scales).sum(1, keepdim=True),
    }


def kind_of(name: str) -> str:
    """A tensor's name without what only counts: "mlp.experts.*.down_proj"."""
    inner = re.sub(r"^(model\.)?(language_model\.)?(layers|mtp(\.layers)?)\.\d+\.", "", name)
    inner = inner.removesuffix(".weight")
    return re.sub(r"\.\d+\.", ".*.", ("mtp: " if name.startswith("mtp.") else "") + inner)


def _homes(stored: FolderCheckpoint) -> dict[str, str]:
    """From the names that models know to those in the files."""
    if not is_deepseek_v4(stored.config):
        return {name: name for name in stored.names()}
    return {transformers_name(name) or name: name for name in stored.names()}


def _shard_name(number: int, count: int) -> str:
    return f"{WEIGHTS}-{number:05}-of-{count:05}.safetensors"


def _copy_besides(source: Path, target: Path) -> None:
    for file in _besides(source):
        place = target / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, place)


def _besides(source: Path) -> Iterator[Path]:
    for pattern in _BESIDES:
        yield from (file for file in sorted(source.glob(pattern)) if file.is_file())
