"""The container: what a header says, and that no damaged one does harm."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surefoot.errors import ModelError
from surefoot.weights.gguf_file import GgufFile
from tests.unit.weights.files import Arrays, write_gguf

KEYS = {
    "general.name": "tiny ü",
    "tiny.count": 7,
    "tiny.rate": 0.5,
    "tiny.flag": True,
    "tiny.words": ["a", "", "漢"],
    "tiny.numbers": [1, -2, 3],
    "tiny.fractions": [0.5, 0.25],
}
TENSORS: Arrays = {
    "first": np.arange(6, dtype=np.float32).reshape(2, 3),
    "second": np.arange(4, dtype=np.float16),
    "packed": gguf.quants.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q8_0),
}


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("g") / "t.gguf", "tiny", KEYS, TENSORS).read_bytes()


def _opened(folder: Path, content: bytes) -> GgufFile:
    path = folder / "changed.gguf"
    path.write_bytes(content)
    return GgufFile(path)


def test_metadata_comes_as_plain_values(tmp_path: Path, content: bytes) -> None:
    metadata = _opened(tmp_path, content).metadata
    assert metadata["general.architecture"] == "tiny"
    assert {key: metadata[key] for key in KEYS} == KEYS
    assert metadata["tiny.flag"] is True


def test_every_scalar_type_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "s.gguf", "tiny")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GgufFile(tmp_path / "s.gguf").metadata
    assert [metadata[key] for key in ("u8", "u16", "u32", "u64")] == [
        255,
        65535,
        2**32 - 1,
        2**64 - 1,
    ]
    assert [metadata[key] for key in ("i8", "i16", "i32", "i64")] == [
        -128,
        -32768,
        -(2**31),
        -(2**63),
    ]
    assert metadata["f32"] == np.float32(0.1)
    assert metadata["f64"] == 0.1


def test_tensors_are_placed_as_the_gguf_package_places_them(tmp_path: Path, content: bytes) -> None:
    file = _opened(tmp_path, content)
    reader = gguf.GGUFReader(tmp_path / "changed.gguf")
    assert list(file.tensors) == ["first", "second", "packed"]
    for wanted in reader.tensors:
        came = file.tensors[wanted.name]
        assert came.kind == wanted.tensor_type
        assert came.shape == tuple(wanted.shape.tolist())[::-1]
        assert (came.offset, came.size) == (wanted.data_offset, wanted.n_bytes)
        assert file.stored(wanted.name).tobytes() == wanted.data.tobytes()
    assert file.stored("packed").shape == (3, 68)


def test_closing_may_be_repeated(tmp_path: Path, content: bytes) -> None:
    file = _opened(tmp_path, content)
    file.close()
    file.close()
    assert file.metadata["tiny.count"] == 7


def test_truncation_anywhere_is_an_error(tmp_path: Path, content: bytes) -> None:
    last = _opened(tmp_path, content).tensors["packed"]
    for size in range(0, last.offset + last.size, 3):
        with pytest.raises(ModelError, match=r"changed\.gguf (is|holds)"):
            _opened(tmp_path, content[:size])


def test_a_truncated_tensor_is_named(tmp_path: Path, content: bytes) -> None:
    end = len(content)
    with pytest.raises(
        ModelError, match=rf"truncated: tensor 'packed' ends at byte \d+.*{end - 40}"
    ):
        _opened(tmp_path, content[: end - 40])


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_changed_byte_gets_past_as_another_error(
    tmp_path: Path, content: bytes, data: st.DataObject
) -> None:
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ModelError):
        file = _opened(tmp_path, bytes(changed))
        for name, tensor in file.tensors.items():
            assert file.stored(name).nbytes == tensor.size


HEAD = b"GGUF" + struct.pack("<I", 3)
KEY = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04" * 9, "is not a GGUF file"),
        (b"GG", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(32), "of GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(32), "big-endian"),
        (HEAD + struct.pack("<QQ", 0, 2**62) + KEY, "is truncated"),
        (HEAD + struct.pack("<QQ", 2**62, 0) + KEY, "is truncated"),
        (HEAD + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**63) + b"kkkkkkkk", "is truncated"),
        (HEAD + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQ", 9, 8, 2**23), "is truncated"),
        (HEAD + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQ", 9, 4, 2**23), "is truncated"),
        (HEAD + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQ", 9, 4, 2**60), "array claims"),
        (HEAD + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQ", 9, 9, 1), "nests one array"),
        (HEAD + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<I", 77), "value type 77"),
        (HEAD + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 4) + b"\xff" * 9, "is not UTF-8"),
        (HEAD + struct.pack("<QQ", 0, 2) + (KEY + struct.pack("<IB", 0, 1)) * 2, "'k' comes twice"),
    ],
)
def test_hostile_headers(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        _opened(tmp_path, content)


def _with_tensor(*dimensions: int, kind: int = 0, copies: int = 1) -> bytes:
    entry = KEY + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, 0)
    return HEAD + struct.pack("<QQ", copies, 0) + entry * copies + bytes(64)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (_with_tensor(kind=0), "has 0 dimensions"),
        (_with_tensor(1, 1, 1, 1, 1), "has 5 dimensions"),
        (_with_tensor(3, 0), r"has the empty shape \[0, 3\]"),
        (_with_tensor(4, kind=999), "is of unknown type 999"),
        (_with_tensor(33, kind=8), "rows of tensor 'k' are no multiple of 32"),
        (_with_tensor(2**62, 2**62), "is truncated: tensor 'k'"),
        (_with_tensor(1, copies=2), "tensor 'k' comes twice"),
    ],
)
def test_hostile_tensors(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        _opened(tmp_path, content)


def test_a_sound_tensor_entry_is_read(tmp_path: Path) -> None:
    assert _opened(tmp_path, _with_tensor(3, 2)).tensors["k"].shape == (2, 3)


@pytest.mark.parametrize("alignment", [0, 24, "x"])
def test_an_impossible_alignment(tmp_path: Path, alignment: int | str) -> None:
    path = tmp_path / "a.gguf"
    key = struct.pack("<Q", 17) + b"general.alignment"
    value = (
        struct.pack("<II", 4, alignment)
        if isinstance(alignment, int)
        else struct.pack("<IQ", 8, 1) + alignment.encode()
    )
    path.write_bytes(HEAD + struct.pack("<QQ", 0, 1) + key + value)
    with pytest.raises(ModelError, match="not a power of two"):
        GgufFile(path)


def test_an_unreadable_path(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        GgufFile(tmp_path / "absent.gguf")
