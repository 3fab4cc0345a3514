"""Draws decode speed against batch and depth from the JSON of `surefoot bench`.

surefoot bench smollm2 --batch 1,4,8,16,32 --drafter none,ngram --draft-tokens 2,4,8,auto \
    --prompts benchmarks/prompts/copy_edit.jsonl --json > benchmarks/results/bench.json
python benchmarks/plot.py benchmarks/results/bench.json docs/speed.png
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def label(run: dict[str, object]) -> str:
    """Name of the line that a run belongs to."""
    if run["drafter"] == "none":
        return "no drafter"
    return f"{run['drafter']}, depth {run['draft_tokens']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("png", type=Path)
    parser.add_argument("--title", default="SmolLM2 135M, float32, two CPU cores, bitwise mode")
    options = parser.parse_args()
    lines: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for run in json.loads(options.json.read_text())["runs"]:
        point = (run["batch"], run["decode_tokens_per_s"], run["speedup"])
        lines[label(run)].append(point)
    figure, (speed, gain) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, points in lines.items():
        points.sort()
        batches = [point[0] for point in points]
        style = {"color": "black", "linestyle": "--"} if name == "no drafter" else {}
        speed.plot(batches, [point[1] for point in points], marker="o", label=name, **style)
        gain.plot(batches, [point[2] for point in points], marker="o", label=name, **style)
    for axes, text in ((speed, "decode, tokens per second"), (gain, "speed-up over no drafter")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_xlabel("requests at once")
        axes.set_ylabel(text)
        axes.grid(alpha=0.3)
    speed.legend(fontsize="small")
    figure.suptitle(options.title, fontsize="medium")
    figure.savefig(options.png, dpi=110)


if __name__ == "__main__":
    main()
