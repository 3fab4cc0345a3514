"""Draws the figures of docs/ from what the benchmarks wrote.

surefoot bench smollm2 --batch 1,4,8,16,32 --drafter none,ngram --draft-tokens 2,4,8,auto \
    --prompts benchmarks/prompts/copy_edit.jsonl --json > benchmarks/results/bench.json
python benchmarks/plot.py speed benchmarks/results/bench.json docs/speed.png

python benchmarks/context.py steps; python benchmarks/context.py choice
python benchmarks/plot.py context benchmarks/results/context.jsonl docs/context.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

TITLES = {
    "speed": "SmolLM2 135M, float32, two CPU cores, bitwise mode",
    "context": "tiny-dsv4, float32, two CPU cores, bitwise mode, no drafts",
}


def label(run: dict[str, object]) -> str:
    """Name of the line that a run belongs to."""
    if run["drafter"] == "none":
        return "no drafter"
    return f"{run['drafter']}, depth {run['draft_tokens']}"


def two_axes() -> tuple[Figure, Axes, Axes]:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    return figure, left, right


def finish(axes: Axes, ticks: list[int], what: str, text: str) -> None:
    """Powers of two to the right, what is measured upwards."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel(what)
    axes.set_ylabel(text)
    axes.grid(alpha=0.3)


def draw_speed(path: Path) -> Figure:
    """Decode speed, and speed-up, against batch and depth, from the JSON of `surefoot bench`."""
    lines: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for run in json.loads(path.read_text())["runs"]:
        point = (run["batch"], run["decode_tokens_per_s"], run["speedup"])
        lines[label(run)].append(point)
    figure, speed, gain = two_axes()
    for name, points in lines.items():
        points.sort()
        batches = [point[0] for point in points]
        style = {"color": "black", "linestyle": "--"} if name == "no drafter" else {}
        speed.plot(batches, [point[1] for point in points], marker="o", label=name, **style)
        gain.plot(batches, [point[2] for point in points], marker="o", label=name, **style)
    for axes, text in ((speed, "decode, tokens per second"), (gain, "speed-up over no drafter")):
        finish(axes, batches, "requests at once", text)
    speed.legend(fontsize="small")
    return figure


def draw_context(path: Path) -> Figure:
    """Cost of a token against its context, and of chosen entries against all, from context.py.

    The last measurement of each kind counts.
    """
    costs: dict[int, dict[int, float]] = defaultdict(dict)
    shares: dict[int, dict[int, float]] = defaultdict(dict)
    for run in map(json.loads, path.read_text().splitlines()):
        medians = {name: statistics.median(values) for name, values in run["ms"].items()}
        batch = run["batch"]
        if run["what"] == "steps":
            costs[batch] |= {int(name): value / batch for name, value in medians.items()}
        elif run["what"] == "choice":
            shares[batch][run["times"]] = medians["chosen"] / medians["all"]
    figure, cost, share = two_axes()
    for axes, lines in ((cost, costs), (share, shares)):
        for batch, points in sorted(lines.items()):
            at = sorted(points)
            axes.plot(at, [points[x] for x in at], marker="o", label=f"{batch} at once")
    cost.set_ylim(bottom=0)
    finish(cost, sorted(set().union(*costs.values())), "tokens of context", "ms per decoded token")
    share.axhline(1, color="black", linestyle="--", label="all entries")
    text = "time of a step, over that with all entries"
    finish(share, sorted(set().union(*shares.values())), "entries, for each that is chosen", text)
    for axes in (cost, share):
        axes.legend(fontsize="small")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=tuple(TITLES))
    parser.add_argument("json", type=Path)
    parser.add_argument("png", type=Path)
    parser.add_argument("--title")
    options = parser.parse_args()
    figure = {"speed": draw_speed, "context": draw_context}[options.what](options.json)
    figure.suptitle(options.title or TITLES[options.what], fontsize="medium")
    figure.savefig(options.png, dpi=110)


if __name__ == "__main__":
    main()
