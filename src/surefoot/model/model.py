"""What the engine needs to know of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from surefoot.backend.operands import Fold
from surefoot.errors import ModelError
from surefoot.state.pool import Pools
from surefoot.state.spec import CacheSpec
from surefoot.step import Batch
from surefoot.weights.counts import NO_LINEARS, Linears


@dataclass(frozen=True)
class Description:
    """What a config tells about a model without its weights.

    Attributes:
        architecture: as the config names it.
        vocab_size: rows of the embedding.
        max_positions: longest context the model was made for, in tokens.
        parameters: how many numbers its weights are.
        layers: a word for each layer, in order: its kind of attention.
        caches: what one request keeps, for a given element type.
        draft_head: name of the draft head in the checkpoint, or None.
        draft_caches: what the draft head keeps for one request.
        hidden_shape: of one token's hidden state, as `forward` returns it.
        linears: what W8A8 makes int8; nothing in a family that does not say.
        looks_at: most positions that a token looks at, however many there are; 0 for all.
    """

    architecture: str
    vocab_size: int
    max_positions: int
    parameters: int
    layers: tuple[str, ...]
    caches: tuple[CacheSpec, ...]
    draft_head: str | None
    draft_caches: tuple[CacheSpec, ...]
    hidden_shape: tuple[int, ...]
    linears: Linears = NO_LINEARS
    looks_at: int = 0


class DraftHead(Protocol):
    """A head that guesses the token after next (multi-token prediction), used again and again.

    Entry i of its caches belongs to token i and the hidden state of token i - 1, so entries start
    at 1. `hidden` below is what `enter` or `forward` returned.
    """

    @property
    def deepens(self) -> bool:
        """Whether `deepen` is another computation than `forward`."""
        ...

    def enter(self, hidden: Tensor) -> Tensor:
        """Turn the target's hidden states [T, *hidden_shape] into what the head reads."""
        ...

    def catch_up(self, batch: Batch, hidden: Tensor, pools: Pools) -> None:
        """Write the entries of known tokens: keys and values only.

        Args:
            batch: the tokens; positions are the entries'.
            hidden: [T, ...] state of the token before each.
            pools: the head's caches.
        """
        ...

    def forward(self, batch: Batch, hidden: Tensor, pools: Pools) -> Tensor:
        """Compute entries in full and write them.

        Returns:
            [T, ...] hidden states, to be read at the next depth and by `logits`.
        """
        ...

    def deepen(self, batch: Batch, hidden: Tensor, pools: Pools) -> Tensor:
        """Do what `forward` does for one more token of each row, in a draft's later passes.

        A head may make it cheaper by what its first pass has found out. What it needs of that goes
        with the states, so it is the row's own however rows come and go.

        Args:
            batch: one token a row.
            hidden: [T, ...] what `forward` or this returned for the token before each; anything
                for padding.
            pools: the head's caches.

        Returns:
            As `forward`.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocabulary] float32 logits of hidden states that were returned."""
        ...


class Model(Protocol):
    """A loaded model: hidden states for every token of a step, logits where they are wanted."""

    @property
    def description(self) -> Description:
        """What it is and what it keeps."""
        ...

    @property
    def draft_head(self) -> DraftHead | None:
        """The head beside it, if the checkpoint has one."""
        ...

    def fold(self, folds: Sequence[Fold], pools: Pools) -> None:
        """Move checkpoints of recurrent layers on by one block, once drafted tokens stay."""
        ...

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        """Compute a step and write its cache entries.

        Returns:
            [T, *hidden_shape] hidden states before the final norm.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocabulary] float32 logits of hidden states [R, hidden]."""
        ...


class ConfigReader:
    """Typed access to a config.json; a wrong or missing entry is an error that names it."""

    def __init__(self, config: Mapping[str, object]) -> None:
        """Read from `config`."""
        self._config = config

    def __contains__(self, name: str) -> bool:
        """Whether the config has this entry, be it null."""
        return name in self._config

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "a whole number", value)
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        if (count := self.integer(name, default)) < 1:
            raise ModelError(f"config.json: {name} must be at least 1, not {count}")
        return count

    def number(self, name: str, default: float | None = None) -> float:
        """A number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; null means the default."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def mapping(self, name: str) -> Mapping[str, object]:
        """An object; {} if absent or null."""
        value = self._config.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object", value)
        return value

    def strings(self, name: str) -> Sequence[str]:
        """A list of strings; () if absent or null."""
        value = self._config.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of strings", value)
        return value

    def _get(self, name: str, default: object) -> object:
        value = self._config.get(name)
        return default if value is None else value

    @staticmethod
    def _wrong(name: str, wanted: str, value: object) -> ModelError:
        came = "is missing" if value is None else f"is {value!r}"
        return ModelError(f"config.json: {name!r} must be {wanted}, and it {came}")
