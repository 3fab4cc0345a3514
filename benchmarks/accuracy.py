"""Accuracy, not only equality: scores against known answers, without and with speculation.

python benchmarks/accuracy.py
python benchmarks/accuracy.py --model tiny-dsv4 --quantization w8a8
python benchmarks/accuracy.py --fault "fold forgotten"

recite    a model whose weights were worked out by hand recites lists that change
carry on  the trained model guesses eight tokens after every sixteenth of text that it never saw
write on  it writes at length; a token is right if transformers, given those before, chose it too

Ends with 1 if a score moves with a setting, or if greedy recital makes a mistake.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from measure import save
from transformers import AutoModelForCausalLM

from surefoot.config import QUANTIZATIONS, make_config
from surefoot.engine.models import load
from surefoot.request import Request
from surefoot.testing.accuracy import (
    Agreement,
    Logits,
    Score,
    Setting,
    Turn,
    agree,
    carry_on,
    recite,
    write_on,
)
from surefoot.testing.faults import FAULTS, planted
from surefoot.testing.reciter import write_reciter
from surefoot.weights.locate import locate

SETTINGS = (
    Setting(),
    Setting(cache=False, chunk=16),
    Setting(preempt=11),
    Setting("ngram", 4),
    Setting("ngram", 8, cache=False, preempt=5),
    Setting("mtp", 1),
    Setting("mtp", 3),
    Setting("mtp", 3, cache=False),
    Setting("mtp", 3, batch=1, chunk=16),
    Setting("mtp", 8),
    Setting("mtp", 8, preempt=5),
)
HEADING = (
    "task      temp  drafter  k  cache  batch  chunk  preempt    score  drafts kept  cached"
    "  transformers agrees, short by, logprobs apart"
)


@dataclass(frozen=True)
class Task:
    """Something to be scored at one temperature.

    Attributes:
        name: in the table.
        temperature: put into every setting.
        run: takes the task.
        least: the share that must be right.
        judge: what another library says of the tokens.
    """

    name: str
    temperature: float
    run: Callable[[Setting], Score]
    least: float = 0.0
    judge: Callable[[Sequence[Request]], Agreement] | None = None


def transformers_logits(folder: Path) -> Logits:
    """What transformers makes of the weights; the same text is computed once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @lru_cache(maxsize=128)
    @torch.inference_mode()
    def logits(tokens: tuple[int, ...]) -> torch.Tensor:
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()

    return lambda tokens: logits(tuple(tokens))


def make_tasks(options: argparse.Namespace, work: Path) -> Iterator[Task]:
    config = make_config(device="cpu")
    turns = (Turn(options.tokens), Turn(48), Turn(128, change=True), Turn(48))
    reciter = load(str(write_reciter(work)), config)
    for temperature, least in ((0.0, 1.0), (1.2, 0.0)):
        yield Task("recite", temperature, lambda setting: recite(reciter, setting, 8, turns), least)
    folder = locate(options.model, revision=None, progress=print)
    config = make_config(device="cpu", quantization=options.quantization)
    trained, logits = load(options.model, config), transformers_logits(folder)
    entries = json.loads((folder / "held_out.json").read_text())[: options.texts]
    texts = [trained.tokenizer.encode(entry["prompt"] + entry["continuation"]) for entry in entries]
    beginnings = [text[:64] for text in texts[:4]]

    def judge(requests: Sequence[Request]) -> Agreement:
        return agree(requests, logits)

    def long(setting: Setting) -> Score:
        return judge(write_on(trained, setting, beginnings, options.tokens)).score

    yield Task("carry on", 0.0, lambda setting: carry_on(trained, setting, texts), judge=judge)
    yield Task("carry on", 0.7, lambda setting: carry_on(trained, setting, texts))
    yield Task("write on", 0.0, long, judge=judge)


def report(task: Task, setting: Setting, score: Score) -> dict[str, object]:
    """Print a line and return the record of it."""
    counts = [request.speculation for request in score.requests]
    drafted = sum(count.drafted for count in counts)
    kept = sum(count.accepted for count in counts) / drafted if drafted else 0.0
    cached = sum(request.cached_tokens for request in score.requests)
    record = {
        "task": task.name,
        **asdict(setting),
        "right": score.right,
        "asked": score.asked,
        "kept": kept,
        "cached": cached,
    }
    line = (
        f"{task.name:9s} {setting.temperature:4.1f}  {setting.drafter:7s} {setting.depth:2d}  "
        f"{'yes' if setting.cache else 'no':5s}  {setting.batch:5d}  {setting.chunk:5d}  "
        f"{setting.preempt:7d}  {score.share:.5f}  {kept:11.1%}  {cached:6d}"
    )
    if task.judge is not None:
        found = task.judge(score.requests)
        line += f"  {found.score.share:.5f}, {found.shortfall:.1e}, {found.distance:.1e}"
        record |= {
            "agrees": found.score.share,
            "shortfall": found.shortfall,
            "distance": found.distance,
        }
    print(line, flush=True)
    return record


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-hybrid", help="a model with held_out.json")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the trained model")
    parser.add_argument("--tokens", type=int, default=512, help="of a long answer")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--fault", choices=sorted(FAULTS), help="plant it; nothing is saved")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    faulty = []
    print(HEADING)
    fault = nullcontext() if options.fault is None else planted(options.fault)
    with tempfile.TemporaryDirectory() as work, fault:
        for task in make_tasks(options, Path(work)):
            scores = []
            for setting in SETTINGS:
                warm = replace(setting, temperature=task.temperature)
                scores.append(task.run(warm))
                record = report(task, warm, scores[-1])
                if options.fault is None:
                    form = {"model": options.model, "quantization": options.quantization}
                    save("accuracy", {**form, **record})
            name = f"{task.name} at temperature {task.temperature}"
            if any(score != scores[0] for score in scores):
                faulty.append(name + " (moved)")
            if any(score.share < task.least for score in scores):
                faulty.append(name + " (too low)")
    print(f"scores that are not as they should be: {', '.join(faulty) or 'none'}")
    return bool(faulty)


if __name__ == "__main__":
    sys.exit(main())
