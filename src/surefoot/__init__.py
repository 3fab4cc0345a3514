"""An LLM inference engine in which speculation changes nothing but speed.

`from surefoot import LLM, SamplingParams` is the whole front door. Both are loaded when they are
first asked for, so that `import surefoot` and the command line start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefoot.llm import LLM
    from surefoot.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_HOME = {"LLM": "surefoot.llm", "SamplingParams": "surefoot.params"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
