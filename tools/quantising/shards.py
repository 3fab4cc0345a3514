"""Writes safetensors files tensor by tensor, so that no more than one of them is in memory."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class ShardWriter:
    """One file. Numbers of each width are gathered in a file of their own until the end.

    Every tensor shall lie at a multiple of its numbers' width, and there may be no gaps: so the
    widest come first. And the names and places of all of them stand in front.
    """

    def __init__(self, path: Path) -> None:
        """Write to `path` in the end; before, to files without names beside it."""
        self.path = path
        self.bytes = 0
        self._streams: dict[int, BinaryIO] = {}
        self._entries: dict[int, list[tuple[str, str, list[int], int]]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor."""
        raw = tensor.contiguous().flatten().view(torch.uint8).numpy()
        width = tensor.element_size()
        if width not in self._streams:
            nameless = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115 (see close)
            self._streams[width] = nameless
        self._streams[width].write(raw.data)
        entry = (name, _NAMES[tensor.dtype], list(tensor.shape), raw.nbytes)
        self._entries.setdefault(width, []).append(entry)
        self.bytes += raw.nbytes

    def finish(self) -> list[str]:
        """Put the file together; the names of its tensors."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        widths, at = sorted(self._streams, reverse=True), 0
        for width in widths:
            for name, dtype, shape, count in self._entries[width]:
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + count]}
                at += count
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with self.path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for width in widths:
                self._streams[width].seek(0)
                shutil.copyfileobj(self._streams[width], file, 16 << 20)
        self.close()
        return [name for name in header if name != "__metadata__"]

    def close(self) -> None:
        """Let go of what was gathered."""
        for stream in self._streams.values():
            stream.close()
