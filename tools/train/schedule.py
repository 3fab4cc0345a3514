"""What decides the numbers of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.train.text import Ids


@dataclass(frozen=True)
class Schedule:
    """What decides the numbers of a run; a checkpoint resumes only under one that agrees.

    Attributes:
        steps: optimiser steps of phase 1 and of each round of phase 2. Rounds count as phases 2,
            3 and so on; every one starts with fresh optimisers and rates.
        batch: windows per step.
        window: tokens per window.
        matrix_rate: Muon's learning rate in phase 1; later ones take half.
        other_rate: AdamW's.
        warmup: steps of rising rates at the start of each phase.
        hold: share of phase 1 at the full rate; after it, and in all of phase 2, it falls
            linearly to 0.
        seed: of weights and order of windows.
    """

    steps: tuple[int, ...]
    batch: int
    window: int
    matrix_rate: float = 0.02
    other_rate: float = 5e-3
    warmup: int = 20
    hold: float = 0.4
    seed: int = 0

    @staticmethod
    def of(stored: Mapping[str, Any]) -> Schedule:
        """The one that was stored as a dict, perhaps as JSON, which knows no tuples."""
        return Schedule(**{**stored, "steps": tuple(stored["steps"])})

    def scale(self, phase: int, step: int) -> float:
        """Factor of the learning rates at a step (from 0) of a phase (from 1)."""
        done = step / self.steps[phase - 1]
        hold = self.hold if phase == 1 else 0.0
        return min(1.0, (step + 1) / self.warmup) * min(1.0, (1 - done) / (1 - hold))

    def agrees(self, other: Schedule, phase: int, step: int) -> bool:
        """Whether `other` would have led to the same weights before a step (from 0) of a phase.

        The number of steps may differ while it has not yet shown in the rates.
        """
        if replace(self, steps=other.steps) != other:
            return False
        done = phase - 1
        if self.steps[:done] != other.steps[:done]:
            return False
        if step == 0 or self.steps[done : done + 1] == other.steps[done : done + 1]:
            return True
        return phase == 1 and step <= self.hold * min(self.steps[0], other.steps[0])

    def windows(self, text: Ids, phase: int, step: int) -> Tensor:
        """Token ids [batch, window] of a step: shuffled passes over the text, cut anew in each."""
        count = (len(text) - self.window) // self.window
        if count < self.batch:
            raise ValueError(
                f"the text has {len(text)} tokens, too few for batches of {self.batch} windows "
                f"of {self.window}; take more text or smaller batches"
            )
        turn, place = divmod(step, count // self.batch)
        random = np.random.default_rng([self.seed, phase, turn])
        starts = random.integers(self.window) + self.window * random.permutation(count)
        chosen = starts[place * self.batch : (place + 1) * self.batch]
        rows = [text[start : start + self.window] for start in chosen]
        return torch.from_numpy(np.stack(rows).astype(np.int64))
