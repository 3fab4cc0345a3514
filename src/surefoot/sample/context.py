"""From requests to the contexts in which their next tokens are chosen."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from surefoot.ids import RequestId
from surefoot.request import Request
from surefoot.sample.processors import HistoryCounts, RowContext


class Contexts:
    """Makes row contexts; keeps token counts for requests whose penalties need them."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        """Serve a model of `vocab_size` tokens whose logits lie on `device`."""
        self._vocab_size = vocab_size
        self._device = device
        self._counts: dict[RequestId, HistoryCounts] = {}

    def after(self, request: Request, drafts: Sequence[int]) -> RowContext:
        """The context of the token that follows the request's tokens and then `drafts`."""
        known = len(request.tokens)
        reads = request.params.needs_history
        return RowContext(
            params=request.params,
            history=[*request.tokens, *drafts] if reads else (),
            prompt_length=request.prompt_length,
            end_tokens=request.end_tokens,
            bad_sequences=request.bad_sequences,
            seed=request.seed,
            position=known + len(drafts),
            counts=self._counted(request) if reads else None,
        )

    def run(self, request: Request, drafts: Sequence[int]) -> list[RowContext]:
        """Contexts of a verify row: after the known tokens, and after each draft."""
        return [self.after(request, drafts[:place]) for place in range(len(drafts) + 1)]

    def forget(self, request: RequestId) -> None:
        """Drop what is kept for a request."""
        self._counts.pop(request, None)

    def _counted(self, request: Request) -> HistoryCounts:
        counts = self._counts.get(request.id)
        if counts is None:
            counts = HistoryCounts(self._vocab_size, request.prompt_length, self._device)
            self._counts[request.id] = counts
        counts.advance(request.tokens)
        return counts
