"""How DeepSeek V4 writes conversations: the `encoding/encoding_dsv4.py` of its releases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from surefoot.text.dsml import DsmlFormat
from surefoot.text.messages import ChatFormat

_ENCODER = "encoding/encoding_dsv4.py"

_ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
    "unchecked.\n\n"
)
_BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: "
    "exhaustively decompose the problem into its most fundamental components, trace every causal "
    "chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple "
    "angles and are certain that no assumption remains unchecked and no error remains "
    "undiscovered.\n\n"
)

PREVIEW_EFFORTS: Mapping[str, str] = {"high": "", "max": _ABSOLUTE}
"""What the first releases begin a thinking prompt with, by the level of effort."""
EFFORTS: Mapping[str, str] = {"low": "", "high": _ABSOLUTE, "max": _BEYOND}
"""The same of the releases since July 2026."""


def chat_format(path: Path) -> ChatFormat:
    """How a checkpoint writes conversations; no release brings a template.

    They differ in the levels of effort. The release's own encoder tells which ones it has; it is
    searched for a name, never run. Where it is absent the levels are those of the preview, whose
    one text all releases share.
    """
    try:
        source = (path / _ENCODER).read_text("utf-8", errors="replace")
    except OSError:
        source = ""
    return DsmlFormat(EFFORTS if "REASONING_EFFORT_PROMPTS" in source else PREVIEW_EFFORTS)
