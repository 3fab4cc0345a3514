"""Which file serves which architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from surefoot.backend.protocol import Backend
from surefoot.errors import ModelError
from surefoot.model import deepseek_v4, deepseek_v4_chat, deepseek_v32, llama, qwen3_5
from surefoot.model.model import ConfigReader, Description, Model
from surefoot.text.messages import ChatFormat
from surefoot.weights.load import TensorTaker


@dataclass(frozen=True)
class Family:
    """One model file.

    Attributes:
        describe: (config, dtype, cache prefix) to what the config tells.
        load: (tensors, config, backend, cache prefix) to a model.
        draft_heads: drafters that its checkpoints may bring along.
        int8_linears: names of the tensors that W8A8 makes int8; None if it is not offered.
        chat_format: how a checkpoint, given its path, writes conversations without a template.
    """

    describe: Callable[[Mapping[str, object], str, str], Description]
    load: Callable[[TensorTaker, Mapping[str, object], Backend, str], Model]
    draft_heads: tuple[str, ...]
    int8_linears: re.Pattern[str] | None = None
    chat_format: Callable[[Path], ChatFormat] | None = None


_DENSE = Family(llama.describe, llama.LlamaModel, draft_heads=(), int8_linears=llama.INT8_LINEARS)
_LATENT = Family(
    deepseek_v4.describe,
    deepseek_v4.LatentModel,
    draft_heads=("mtp",),
    int8_linears=deepseek_v4.INT8_LINEARS,
    chat_format=deepseek_v4_chat.chat_format,
)
_CHOSEN = Family(
    deepseek_v32.describe,
    deepseek_v32.ChosenModel,
    draft_heads=("mtp",),
    int8_linears=deepseek_v32.INT8_LINEARS,
)
_HYBRID = Family(
    qwen3_5.describe,
    qwen3_5.HybridModel,
    draft_heads=("mtp",),
    int8_linears=qwen3_5.INT8_LINEARS,
)

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(llama.ARCHITECTURES, _DENSE),
    **dict.fromkeys(qwen3_5.ARCHITECTURES, _HYBRID),
    **dict.fromkeys(deepseek_v4.ARCHITECTURES, _LATENT),
    **dict.fromkeys(deepseek_v32.ARCHITECTURES, _CHOSEN),
}


def family_of(config: Mapping[str, object]) -> Family:
    """The family of a config's first architecture.

    Raises:
        ModelError: it names none, or one that is not served; the message lists those that are.
    """
    names = ConfigReader(config).strings("architectures")
    if not names:
        raise ModelError("config.json names no architecture under 'architectures'")
    if names[0] not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"architecture {names[0]!r} is not supported; known are {known}")
    return FAMILIES[names[0]]
