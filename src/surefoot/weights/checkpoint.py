"""What every kind of checkpoint offers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch


class Checkpoint(Protocol):
    """Read access to one model's tensors under transformers' names.

    Attributes:
        config: what config.json says, or the same translated from another format.
        generation: what generation_config.json says; empty when there is none.
    """

    config: Mapping[str, object]
    generation: Mapping[str, object]

    def names(self) -> Collection[str]:
        """All tensors that are stored."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one stored tensor, without reading it."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype; it may be a view of the file, so never write to it.

        Raises:
            WeightsError: it cannot be read or is of a format that is not supported.
        """

    def close(self) -> None:
        """Let go of the files; nothing can be read afterwards. May be called again."""


class EncodedCheckpoint(Checkpoint, Protocol):
    """A checkpoint that can also tell how a tensor's numbers are stored."""

    def encoding(self, name: str) -> str:
        """How one tensor is stored, in safetensors' words (`BF16`, `I8`), without reading it."""
