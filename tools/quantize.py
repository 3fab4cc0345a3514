"""Writes a copy of a model in int8, in the format of ModelSlim.

  python tools/quantize.py FOLDER COPY                 W8A8: a quarter of float32's bytes
  python tools/quantize.py FOLDER COPY --form w4a8     feed-forwards in 4 bits: less than that
  surefoot generate COPY                               reads it without a flag

FOLDER is any model folder that surefoot reads as floats: float32, bfloat16 or float16, and FP8 or
FP4 in blocks. Nothing is calibrated, so no text is needed: each output (or each group of up to 128
inputs of it, in 4 bits) has a scale, and codes are rounded to the nearest. COPY answers as FOLDER
does with --quantization w8a8 or w4a8, to the last bit, on every machine.

Embedding, norms, convolutions, routers and other small tensors stay as they are. A head that is
tied to the embedding is stored in int8 beside it.

At the end stands how far the weights of each kind lie from the floats: in 8 bits about 0.01 of
their size, in 4 bits about 0.1. What that means for answers, --text tells: the share of places in a
text of yours where both would choose the same token. docs/quantization.md has figures to compare.

One tensor at a time is in memory. While a file is written, as much again is needed on the disk.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tools.quantising.folder import Written

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
FORMS = ("w8a8", "w4a8")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the model in floats")
    parser.add_argument("copy", type=Path, help="where the copy goes; empty, or not there yet")
    parser.add_argument("--form", choices=FORMS, default=FORMS[0], help="default: %(default)s")
    parser.add_argument(
        "--text", type=Path, help="a text file to compare both models on; loads them one by one"
    )
    parser.add_argument(
        "--tokens", type=int, default=512, help="most tokens of the text (default: %(default)s)"
    )
    return parser


def run(options: argparse.Namespace) -> None:
    from rich.progress import Progress

    from tools.quantising.folder import quantise_folder

    with Progress() as bar:
        task = bar.add_task(options.form, total=None)

        def progress(name: str, done: int, count: int) -> None:
            bar.update(
                task, total=count, completed=done, description=f"{options.form} {name[-40:]}"
            )

        written = quantise_folder(options.folder, options.copy, options.form, progress)
        bar.update(task, description=options.form, completed=bar.tasks[0].total)
    print("\n".join(report(written)))
    if options.text is not None:
        from tools.quantising.agreement import agreement

        share, places = agreement(options.folder, options.copy, options.text, options.tokens)
        print(f"the same best token at {share:.1%} of {places} places of {options.text}")


def report(written: Written) -> list[str]:
    """What was written and how near it is, in lines."""
    mib = 1 << 20
    lines = [
        f"{written.linears} weights in int8; {written.floats / mib:.1f} MiB became "
        f"{written.bytes / mib:.1f} MiB ({written.bytes / written.floats:.0%})",
        "relative error by kind of tensor:",
    ]
    errors = sorted(written.errors.relative().items())
    return [*lines, *(f"  {error:8.4f}  {kind}" for kind, error in errors)]


if __name__ == "__main__":
    from surefoot.errors import SurefootError

    try:
        run(build_parser().parse_args())
    except (SurefootError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
