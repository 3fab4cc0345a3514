"""Drafters that other packages bring, found through the entry-point group of `config`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points

from surefoot.config import DRAFTER_GROUP
from surefoot.draft.drafter import Drafter
from surefoot.errors import SettingError


@dataclass(frozen=True)
class DrafterSetting:
    """What a foreign drafter is made with.

    Attributes:
        vocab_size: token ids lie below it.
        page_tokens: tokens per page.
        max_model_len: longest context in tokens.
    """

    vocab_size: int
    page_tokens: int
    max_model_len: int


def make_plugin(name: str, setting: DrafterSetting) -> Drafter:
    """Call the entry point `name`: a function from a DrafterSetting to a Drafter.

    Raises:
        SettingError: there is none, or it does not load.
    """
    for entry in entry_points(group=DRAFTER_GROUP, name=name):
        try:
            drafter: Drafter = entry.load()(setting)
        except Exception as error:  # foreign code may fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise SettingError(
                "drafter", f"the plug-in {name!r} does not start: {reason}"
            ) from error
        return drafter
    raise SettingError("drafter", f"there is no plug-in {name!r} in the group {DRAFTER_GROUP}")
