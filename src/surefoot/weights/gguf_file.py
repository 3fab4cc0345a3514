"""The container format of a `.gguf` file: its metadata, and where its tensors lie.

The header is read here rather than by `gguf.GGUFReader` for two reasons: every length in it is
checked against the file before it is believed, so a damaged file cannot exhaust memory, and a
vocabulary of 100,000 strings takes a tenth of the time.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from surefoot.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_ARRAY = 1 << 24
_KEY_BYTES = 12
_TENSOR_BYTES = 24

_FORMATS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies, and how it is encoded.

    Attributes:
        kind: its encoding.
        shape: rows first, the way torch counts dimensions.
        offset: its first byte, from the beginning of the file.
        size: in bytes.
    """

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    size: int


class GgufFile:
    """A `.gguf` file mapped into memory, with a header that has been checked.

    Attributes:
        metadata: all keys; values are str, int, float, bool or lists of one of them.
        tensors: by GGUF name, in the order of the file.

    Raises:
        ModelError: it is no GGUF file, of an unknown version, damaged or truncated.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data = _mapped(path)
        cursor = _Cursor(path, self._data.data)
        keys, tensors = _read_start(cursor)
        self.metadata: Mapping[str, object] = _read_metadata(cursor, keys)
        self.tensors: Mapping[str, StoredTensor] = _read_tensors(
            cursor, tensors, _alignment(path, self.metadata)
        )

    def stored(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor as they lie in the file, uint8 of [rows..., bytes of a row]."""
        tensor = self.tensors[name]
        raw = self._data[tensor.offset : tensor.offset + tensor.size]
        return raw.reshape(*tensor.shape[:-1], -1)

    def close(self) -> None:
        """Let go of the file."""
        self._data = np.empty(0, np.uint8)


class _Cursor:
    """Reads a header from front to back and refuses to read beyond the end of the file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def damaged(self, reason: str) -> ModelError:
        return ModelError(f"{self.path} is damaged: {reason}")

    def advance(self, size: int) -> int:
        """Step over `size` bytes and return where they begin."""
        begin = self.position
        if size > len(self.data) - begin:
            raise ModelError(
                f"{self.path} is truncated: its header needs {size} bytes at {begin}, but the file "
                f"ends at {len(self.data)}; fetch it again"
            )
        self.position += size
        return begin

    def expect(self, count: int, least: int) -> None:
        """Check that `count` items of at least `least` bytes each can follow."""
        begin = self.position
        self.advance(count * least)
        self.position = begin

    def scalar(self, form: str) -> object:
        begin = self.advance(struct.calcsize(form))
        value: object = struct.unpack_from(form, self.data, begin)[0]
        return value

    def count(self, form: str = "<Q") -> int:
        """Read an unsigned number in the given form."""
        return cast(int, self.scalar(form))

    def text(self) -> str:
        size = self.count()
        begin = self.advance(size)
        try:
            return str(self.data[begin : begin + size], "utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"the string at byte {begin} is not UTF-8") from None

    def value(self, raw_type: int) -> object:
        kind = self.value_type(raw_type)
        if kind is GGUFValueType.ARRAY:
            return self.array()
        return self.text() if kind is GGUFValueType.STRING else self.scalar(_FORMATS[kind])

    def array(self) -> list[object]:
        kind = self.value_type(self.count("<I"))
        count = self.count()
        if kind is GGUFValueType.ARRAY:
            raise self.damaged("it nests one array in another")
        if count > _MAX_ARRAY:
            raise self.damaged(f"an array claims {count} items; at most {_MAX_ARRAY} are read")
        if kind is GGUFValueType.STRING:
            self.expect(count, 8)
            return [self.text() for _ in range(count)]
        form = np.dtype(_FORMATS[kind])
        begin = self.advance(count * form.itemsize)
        items: list[object] = np.frombuffer(self.data, form, count, begin).tolist()
        return items

    def value_type(self, raw: int) -> GGUFValueType:
        try:
            return GGUFValueType(raw)
        except ValueError:
            raise self.damaged(f"value type {raw} at byte {self.position} is unknown") from None


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    try:
        if path.stat().st_size == 0:
            raise ModelError(f"{path} is empty; fetch it again")
        return np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the number of keys and of tensors."""
    magic = bytes(cursor.data[:4])
    if magic != _MAGIC:
        raise ModelError(f"{cursor.path} is not a GGUF file: it begins with {magic!r}")
    cursor.advance(4)
    version = cursor.count("<I")
    if version & 0xFFFF == 0:
        raise ModelError(f"{cursor.path} is a big-endian GGUF file, which is not supported")
    if version not in _VERSIONS:
        raise ModelError(f"{cursor.path} is of GGUF version {version}; versions 2 and 3 are read")
    tensors, keys = cursor.count(), cursor.count()
    cursor.expect(keys, _KEY_BYTES)
    cursor.expect(tensors, _TENSOR_BYTES)
    return keys, tensors


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for _ in range(count):
        key = cursor.text()
        if key in metadata:
            raise cursor.damaged(f"key {key!r} comes twice")
        metadata[key] = cursor.value(cursor.count("<I"))
    return metadata


def _alignment(path: Path, metadata: Mapping[str, object]) -> int:
    value = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        raise ModelError(f"{path} is damaged: general.alignment is {value!r}, not a power of two")
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for _ in range(count):
        name = cursor.text()
        if name in found:
            raise cursor.damaged(f"tensor {name!r} comes twice")
        found[name] = _read_tensor(cursor, name)
    begin = -(-cursor.position // alignment) * alignment
    return {name: _placed(cursor, name, tensor, begin) for name, tensor in found.items()}


def _read_tensor(cursor: _Cursor, name: str) -> StoredTensor:
    """Read one entry; its offset still counts from the beginning of the data part."""
    dimensions = cursor.count("<I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.damaged(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.count() for _ in range(dimensions))[::-1]
    if 0 in shape:
        raise cursor.damaged(f"tensor {name!r} has the empty shape {list(shape)}")
    raw_kind = cursor.count("<I")
    try:
        kind = GGMLQuantizationType(raw_kind)
    except ValueError:
        raise cursor.damaged(f"tensor {name!r} is of unknown type {raw_kind}") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise cursor.damaged(f"rows of tensor {name!r} are no multiple of {block} numbers")
    return StoredTensor(kind, shape, cursor.count(), math.prod(shape) // block * block_bytes)


def _placed(cursor: _Cursor, name: str, tensor: StoredTensor, begin: int) -> StoredTensor:
    offset = begin + tensor.offset
    if offset + tensor.size > len(cursor.data):
        raise ModelError(
            f"{cursor.path} is truncated: tensor {name!r} ends at byte {offset + tensor.size}, "
            f"but the file ends at {len(cursor.data)}; fetch it again"
        )
    return replace(tensor, offset=offset)
