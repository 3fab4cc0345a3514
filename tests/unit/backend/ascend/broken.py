"""Contracts broken on purpose, one rule at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from surefoot.backend.ascend.emulate import (
    RELAXED,
    STRICT,
    ContractError,
    EmulatedVendor,
    NotEmulatedError,
    RefusedError,
    SilentError,
)
from surefoot.backend.ascend.emulate.contract import Profile

Arguments = dict[str, Any]
VENDORS = {profile: EmulatedVendor(profile) for profile in (RELAXED, STRICT)}
Change = Mapping[str, object] | Callable[[Arguments], Mapping[str, object]]


@dataclass(frozen=True)
class Broken:
    """What is changed in a good call, and the rule that this breaks."""

    rule: str
    change: Change
    error: type[ContractError] = RefusedError
    profile: Profile = RELAXED
    label: str = ""

    def __str__(self) -> str:
        return f"{self.rule}{self.label and f' ({self.label})'}"

    def check(self, call: Callable[..., object], good: Arguments) -> None:
        """The good call passes, the broken one does not."""
        call(**good)
        change = self.change(good) if callable(self.change) else self.change
        with pytest.raises(ContractError) as caught:
            call(**{**good, **change})
        assert (type(caught.value), caught.value.rule) == (self.error, self.rule)
        text = str(caught.value)
        if self.error is not NotEmulatedError:
            assert caught.value.operator in text
        if self.error is SilentError:
            assert "the device would not notice" in text


def gaps(name: str) -> Callable[[Arguments], Arguments]:
    """A tensor with a gap behind each of its entries."""
    return lambda call: {name: call[name].repeat_interleave(2, -1)[..., ::2]}


def broken_cases(*cases: Broken) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=str)
