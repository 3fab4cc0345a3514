"""Training in two phases, by steps, resumable to the bit.

Phase 1 trains trunk and draft head together on the text. Phase 2 freezes the trunk and trains the
head alone to give the trunk's distribution, one, two and three tokens ahead.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train.measure import Slice, held_out_slice, measure_slice
from tools.train.network import Network
from tools.train.optimiser import Optimiser
from tools.train.schedule import Schedule
from tools.train.text import Corpus

Report = Callable[[str], None]
Loss = Callable[[Tensor], Tensor]
Function = TypeVar("Function", bound=Callable[..., object])

# Loss of phase 1: the trunk's, plus this share of the head's.
HEAD_SHARE = 0.3
# Share of what layers want learned besides the text. It moves nothing that the text moves.
SIDE_SHARE = 0.1
# Weights of the depths in phase 2.
DEPTH_WEIGHTS = (1.0, 0.7, 0.5)
SMOOTHING = 0.95


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        phase: from 1; one past the last when all are done.
        step: steps done of this phase.
        loss: smoothed loss, 0 before the first step.
        seconds: time that passed in steps, of each phase.
        trace: measurements on the fixed slice of held-out text.
    """

    phase: int = 1
    step: int = 0
    loss: float = 0.0
    seconds: list[float] = field(default_factory=list)
    trace: list[dict[str, object]] = field(default_factory=list)


@dataclass(frozen=True)
class Pace:
    """How a run goes without changing its numbers beyond rounding.

    Attributes:
        compiled: whether torch compiles the losses (faster, after a minute or two).
        save_every: steps between checkpoints.
        measure_every: steps between measurements.
        stop_after: leave, with a checkpoint, after this many steps in all; 0 for never.
    """

    compiled: bool = True
    save_every: int = 150
    measure_every: int = 300
    stop_after: int = 0


class Training:
    """One run in one folder; the newest checkpoint there is taken up."""

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        make: Callable[[], Network],
        schedule: Schedule,
        report: Report,
    ) -> None:
        """`make` gives the network, with random weights."""
        self.folder, self.corpus, self.schedule, self.report = folder, corpus, schedule, report
        torch.manual_seed(schedule.seed)
        self.network = make()
        self.progress = Progress()
        self.slice: Slice = held_out_slice(corpus.held_out, schedule.window)
        self.optimiser = self._optimiser()
        self._mark = 0, time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        if self._file.exists():
            self._load()
        new = len(schedule.steps) - len(self.progress.seconds)
        self.progress.seconds += [0.0] * new

    @property
    def _file(self) -> Path:
        return self.folder / "checkpoint.pt"

    def _optimiser(self) -> Optimiser:
        head_only = self.progress.phase > 1
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(not head_only or name.startswith("mtp."))
        rates = self.schedule.matrix_rate, self.schedule.other_rate
        return Optimiser(self.network, *(rate * (0.5 if head_only else 1.0) for rate in rates))

    def run(self, pace: Pace) -> bool:
        """Train on; true when all phases are done, false when `pace` stopped it before."""
        stop = pace.stop_after or sum(self.schedule.steps)
        while self.progress.phase <= len(self.schedule.steps):
            loss = self._loss(pace.compiled)
            self._mark = self.progress.step, time.perf_counter()
            while self.progress.step < self.schedule.steps[self.progress.phase - 1]:
                if self._done_in_all() >= stop:
                    self.save()
                    return False
                self._step(loss)
                self._look_after(pace)
            self._measure()
            self.progress = replace(self.progress, phase=self.progress.phase + 1, step=0, loss=0.0)
            self.optimiser = self._optimiser()
            self.save()
        return True

    def _done_in_all(self) -> int:
        return sum(self.schedule.steps[: self.progress.phase - 1]) + self.progress.step

    def _loss(self, compiled: bool) -> Loss:
        if self.progress.phase == 1:
            return _compiled(self._joint_loss, compiled)
        targets = _compiled(self._targets, compiled)
        distance = _compiled(self._distance, compiled)
        return lambda ids: distance(ids, *targets(ids))

    def _joint_loss(self, ids: Tensor) -> Tensor:
        network = self.network
        hidden, side = network.run(ids)
        trunk = _cross_entropy(network.logits(hidden[:, :-1]), ids[:, 1:])
        (ahead,), head_side = network.run_drafts(ids, hidden, 1)
        head = _cross_entropy(network.draft_logits(ahead[:, :-1]), ids[:, 2:])
        return trunk + HEAD_SHARE * head + SIDE_SHARE * (side + head_side)

    @torch.no_grad()
    def _targets(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.network.hidden(ids)
        return hidden, self.network.logits(hidden).log_softmax(-1)

    def _distance(self, ids: Tensor, hidden: Tensor, wanted: Tensor) -> Tensor:
        states, side = self.network.run_drafts(ids, hidden, len(DEPTH_WEIGHTS))
        total = SIDE_SHARE * side
        for depth, (weight, state) in enumerate(zip(DEPTH_WEIGHTS, states, strict=True), 1):
            target = wanted[:, depth : depth + state.shape[1]].exp()
            given = self.network.draft_logits(state).log_softmax(-1)
            total = total - weight * (target * given).sum(-1).mean()
        return total

    def _step(self, loss: Loss) -> None:
        schedule, progress = self.schedule, self.progress
        began = time.perf_counter()
        value = loss(schedule.windows(self.corpus.train, progress.phase, progress.step))
        value.backward()
        self.optimiser.step(schedule.scale(progress.phase, progress.step))
        number = value.item()
        if not math.isfinite(number):
            raise ValueError(
                f"phase {progress.phase} step {progress.step}: the loss is {number}; "
                "start again with lower learning rates"
            )
        first = progress.step == 0
        progress.loss = number if first else SMOOTHING * progress.loss + (1 - SMOOTHING) * number
        progress.step += 1
        progress.seconds[progress.phase - 1] += time.perf_counter() - began

    def _look_after(self, pace: Pace) -> None:
        step = self.progress.step
        if step % 20 == 0 or step == 1:
            self.report(self._line())
        if step % pace.measure_every == 0:
            self._measure()
        if step % pace.save_every == 0:
            self.save()

    def _line(self) -> str:
        progress, schedule = self.progress, self.schedule
        steps, now = schedule.steps[progress.phase - 1], time.perf_counter()
        since, then = self._mark
        # Since the last line only: the first step compiles, and a machine may have other work.
        seconds = (now - then) / max(progress.step - since, 1)
        self._mark = progress.step, now
        speed = schedule.batch * schedule.window / seconds
        left = (steps - progress.step) * seconds / 60
        return (
            f"phase {progress.phase}  step {progress.step}/{steps}  loss {progress.loss:.3f}  "
            f"{speed:.0f} tokens/s  {left:.1f} min left in this phase"
        )

    def _measure(self) -> None:
        found = measure_slice(self.network, self.slice, self.corpus.bytes_per_token)
        where = {"phase": self.progress.phase, "step": self.progress.step}
        self.progress.trace.append(where | found)
        self.report("held-out slice: " + "  ".join(f"{k} {v}" for k, v in found.items()))

    def save(self) -> None:
        """Write the checkpoint; one that is being written never replaces a whole one."""
        content = {
            "schedule": asdict(self.schedule),
            "sizes": asdict(self.network.sizes),
            "progress": asdict(self.progress),
            "network": self.network.state_dict(),
            "optimiser": self.optimiser.state(),
        }
        part = self._file.with_suffix(".part")
        torch.save(content, part)
        os.replace(part, self._file)
        (self.folder / "progress.json").write_text(json.dumps(asdict(self.progress), indent=1))

    def _load(self) -> None:
        content = torch.load(self._file, weights_only=True)
        stored = Schedule.of(content["schedule"])
        progress = Progress(**content["progress"])
        if content["sizes"] != asdict(self.network.sizes):
            raise ValueError(f"{self._file} holds another model: {content['sizes']}")
        if not stored.agrees(self.schedule, progress.phase, progress.step):
            raise ValueError(
                f"{self._file} was made with {stored}, not {self.schedule}; "
                "give the same options or another folder"
            )
        self.progress = progress
        self.network.load_state_dict(content["network"])
        self.optimiser = self._optimiser()
        self.optimiser.restore(content["optimiser"])
        self.report(f"resumed at phase {self.progress.phase}, step {self.progress.step}")


def _compiled(function: Function, wanted: bool) -> Function:
    return cast(Function, torch.compile(function)) if wanted else function


def _cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())
