"""A `.gguf` file as a checkpoint: names, row order and config as transformers has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from surefoot.errors import ModelError, WeightsError
from surefoot.weights.gguf_config import ROPE_FACTORS, Header, sampling_defaults, translate
from surefoot.weights.gguf_file import GgufFile
from surefoot.weights.names import transformers_name


class GgufCheckpoint:
    """One `.gguf` file of a dense Llama, Mistral, Qwen2 or Qwen3 model.

    Tensors are dequantised to float32 when they are read, one at a time. A tensor that such a
    model does not have keeps its GGUF name, so that it is reported as unused.

    Attributes:
        config: what config.json of the same model would say.
        generation: sampling defaults, if the file has any.

    Raises:
        ModelError: no GGUF file, damaged or truncated, one part of several, of an unsupported
            architecture or with an option that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        _refuse_parts(path, self._file.metadata)
        header = Header(
            file=str(path),
            metadata=self._file.metadata,
            shapes={name: tensor.shape for name, tensor in self._file.tensors.items()},
            rope_factors=self._rope_factors(),
        )
        self.config: Mapping[str, object] = translate(header)
        self.generation: Mapping[str, object] = sampling_defaults(self._file.metadata)
        self._stored = _renamed(path, [name for name in header.shapes if name != ROPE_FACTORS])
        self._paired = _paired_heads(header)

    def metadata(self) -> dict[str, object]:
        """All keys of the file, the tokenizer's among them; lists for arrays."""
        return dict(self._file.metadata)

    def names(self) -> Collection[str]:
        """All tensors that are stored, under transformers' names."""
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, rows first, without reading it."""
        return self._file.tensors[self._stored[name]].shape

    def read(self, name: str) -> torch.Tensor:
        """One tensor in float32, in memory of its own, rows in transformers' order.

        Raises:
            WeightsError: its encoding is not supported.
        """
        tensor = torch.from_numpy(self._numbers(self._stored[name]))
        module = name.rpartition(".")[0].rpartition(".")[2]
        if (heads := self._paired.get(module)) is not None:
            return _with_halves(name, tensor, heads)
        return tensor

    def close(self) -> None:
        """Let go of the file; metadata stays."""
        self._file.close()
        self._stored = {}

    def _numbers(self, stored_name: str) -> npt.NDArray[np.float32]:
        kind = self._file.tensors[stored_name].kind
        try:
            numbers = dequantize(self._file.stored(stored_name), kind)
        except NotImplementedError:
            raise WeightsError(
                f"tensor {stored_name!r} is stored as {kind.name}, which is not supported"
            ) from None
        return numbers if numbers.flags.writeable else numbers.copy()

    def _rope_factors(self) -> npt.NDArray[np.float32] | None:
        tensor = self._file.tensors.get(ROPE_FACTORS)
        if tensor is None:
            return None
        if tensor.kind is not GGMLQuantizationType.F32:
            raise WeightsError(f"tensor {ROPE_FACTORS!r} must be F32, not {tensor.kind.name}")
        return self._numbers(ROPE_FACTORS)


def _paired_heads(header: Header) -> dict[str, int]:
    """Head counts of the projections whose rows the file keeps in pairs."""
    if header.architecture != "llama":
        return {}
    heads = header.integer("attention.head_count")
    return {"q_proj": heads, "k_proj": header.integer("attention.head_count_kv", heads)}


def _with_halves(name: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Bring the rows of queries or keys into transformers' order.

    Rotation turns pairs of numbers. The file stores the two of a pair next to each other;
    transformers stores the first ones of all pairs of a head, then the second ones.
    """
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise WeightsError(f"tensor {name!r} has {rows} rows, which {heads} heads cannot share")
    pairs: torch.Tensor = tensor.unflatten(0, (heads, rows // heads // 2, 2))
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _renamed(path: Path, stored_names: Collection[str]) -> dict[str, str]:
    """Map transformers' names to those in the file."""
    renamed = {transformers_name(name) or name: name for name in stored_names}
    if hidden := set(stored_names) - set(renamed.values()):
        raise ModelError(f"{path} is damaged: tensor {min(hidden)!r} is there under two names")
    return renamed


def _refuse_parts(path: Path, metadata: Mapping[str, object]) -> None:
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ModelError(f"{path} is one of {parts} parts of a model; merge them into one file")
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"{path} holds {kind!r}, not a whole model")
