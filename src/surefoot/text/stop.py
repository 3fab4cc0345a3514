"""Stop strings: where the first of them is complete, whatever the cut of the text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _State:
    """A beginning that one or more stop strings share, `depth` characters long."""

    depth: int
    following: dict[str, _State] = field(default_factory=dict)
    fallback: _State | None = None
    stop: str | None = None


class StopMatcher:
    """Watches a text that arrives in pieces for the first stop string to be complete.

    The stop string whose last character comes first wins; of several that end there, the longest.
    So the outcome depends on the text alone. Without `include`, text that may turn out to be the
    beginning of a stop string is held back, and nothing more; with it nothing needs to be.

    Attributes:
        consumed: characters pushed so far, up to and with the last one of the stop string.
        matched: the stop string that was found.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """Prepare to find any of `stops`.

        Args:
            stops: strings that end the text, none of them empty.
            include: whether the stop string is part of the text.
        """
        self._root = _build(stops)
        self._state = self._root
        self._include = include
        self._held = ""
        self.consumed = 0
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Add text.

        Returns:
            The text that may be shown now, and whether a stop string is complete. After that
            nothing more is taken or returned.
        """
        if self.matched is not None:
            return "", True
        read = self._read(text)
        self.consumed += read
        text = self._held + text[:read]
        if self.matched is not None:
            self._held = ""
            return (text if self._include else text[: -len(self.matched)]), True
        shown = len(text) if self._include else len(text) - self._state.depth
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """End the text and return what was held back."""
        held, self._held = self._held, ""
        self._state = self._root
        return held

    def _read(self, text: str) -> int:
        """Follow `text` until a stop string is complete; return how many characters were read."""
        if not self._root.following:
            return len(text)
        state = self._state
        for place, character in enumerate(text):
            state = _follow(state, character)
            if state.stop is not None:
                self.matched = state.stop
                return place + 1
        self._state = state
        return len(text)


def _follow(state: _State, character: str) -> _State:
    """The longest beginning of a stop string that the text ends with after `character`."""
    while character not in state.following:
        if state.fallback is None:
            return state
        state = state.fallback
    return state.following[character]


def _build(stops: Sequence[str]) -> _State:
    """The automaton of Aho and Corasick for `stops`."""
    root = _State(0)
    for stop in stops:
        state = root
        for character in stop:
            state = state.following.setdefault(character, _State(state.depth + 1))
        state.stop = stop
    # Breadth first, since a fallback is shorter than what falls back to it.
    waiting = deque(root.following.values())
    for state in root.following.values():
        state.fallback = root
    while waiting:
        state = waiting.popleft()
        assert state.fallback is not None
        state.stop = state.stop or state.fallback.stop
        for character, longer in state.following.items():
            longer.fallback = _follow(state.fallback, character)
            waiting.append(longer)
    return root
