"""Our model and its draft head on one text, to be held against a composition of the oracle's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surefoot.backend.protocol import Backend
from surefoot.config import make_config
from surefoot.engine.models import load
from surefoot.ids import PageId, SlotId
from surefoot.model.model import DraftHead, Model
from surefoot.state.pool import Pools
from surefoot.step import Batch, Row, Step
from tests.unit.backend.cuts import Setting
from tests.unit.model.settling import make_pools


@dataclass(frozen=True)
class Ours:
    """Our model of the same weights and its head, with caches."""

    model: Model
    head: DraftHead
    backend: Backend
    pools: Pools
    tokens: Sequence[int]

    @staticmethod
    def load(folder: Path, tokens: Sequence[int]) -> Ours:
        loaded = load(str(folder), make_config(dtype="float32"))
        setting = Setting([tokens], page_tokens=8, depth=3)
        assert loaded.model.draft_head is not None
        pools = make_pools(loaded.model, loaded.backend, setting, pages=8, slots=1)
        return Ours(loaded.model, loaded.model.draft_head, loaded.backend, pools, tokens)

    def batch(self, tokens: Sequence[int], first: int, certain: int) -> Batch:
        table = [PageId(page) for page in range(1, 9)]
        row = Row(tokens, first, certain, table, SlotId(1), min(first, 1), len(tokens), first)
        return Step.of([row], 8).build(self.backend)

    @torch.inference_mode()
    def hidden(self) -> Tensor:
        """What the head reads of the text."""
        batch = self.batch(self.tokens, 0, len(self.tokens))
        return self.head.enter(self.model.forward(batch, self.pools))

    @torch.inference_mode()
    def run(
        self, tokens: Sequence[int], first: int, hidden: Tensor, deeper: bool = False
    ) -> tuple[Tensor, Tensor]:
        """States and logits of the head, in its first pass or a deeper one."""
        step = self.head.deepen if deeper else self.head.forward
        states = step(self.batch(tokens, first, 0), hidden, self.pools)
        return states, self.head.logits(states)

    @torch.inference_mode()
    def catch_up(self, tokens: Sequence[int], first: int, hidden: Tensor) -> None:
        self.head.catch_up(self.batch(tokens, first, len(tokens)), hidden, self.pools)
