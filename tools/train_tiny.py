"""Makes the models that come with surefoot from Python's own standard library.

Three commands, in this order, each with --help:

  prepare   reads the text, keeps 3 % of its files back, trains the tokenizer   (10 seconds)
  train     trains trunk and draft head; run it again to go on after a stop     (about an hour)
  export    writes the folder that surefoot and transformers load, measures it
            and writes the model card from what was measured                    (5 minutes)

`evaluate` measures an exported folder again. Times are for two CPU cores.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tools.train.schedule import Schedule

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PACKAGED = ROOT / "src/surefoot/packaged"
MODELS = ("tiny-hybrid", "tiny-dsv4")


def say(line: str) -> None:
    print(line, flush=True)


# The commands import what they need: torch takes seconds, and --help needs none of it.
def prepare(options: argparse.Namespace) -> None:
    from tools.train import text

    corpus = text.prepare(
        options.library or text.library_folder(),
        options.work / "text",
        seed=options.seed,
        vocabulary=options.vocabulary,
    )
    say(
        f"{len(corpus.train)} tokens to train on, {len(corpus.held_out)} files of "
        f"{corpus.held_out_bytes} bytes kept back, {corpus.bytes_per_token:.2f} bytes per token"
    )


def train(options: argparse.Namespace) -> None:
    import torch

    from tools.train import text
    from tools.train.loop import Pace, Training
    from tools.train.recipes import RECIPES

    # Products of decays underflow in a trained model, and denormals are slow.
    torch.set_flush_denormal(True)
    torch.set_num_threads(options.threads)
    recipe = RECIPES[options.model]
    schedule = choose_schedule(options, recipe.schedule)
    corpus = text.load(options.work / "text")
    training = Training(options.work / options.model, corpus, recipe.make, schedule, say)
    pace = Pace(options.compile, options.save_every, stop_after=options.stop_after)
    say("done" if training.run(pace) else "stopped as asked; run it again to go on")


def choose_schedule(options: argparse.Namespace, own: Schedule) -> Schedule:
    """The model's own schedule, but for what the command line says."""
    first = own.steps[:1] if options.steps is None else (options.steps,)
    rounds = own.steps[1:] if options.head_steps is None else options.head_steps
    return replace(
        own,
        steps=(*first, *rounds),
        batch=own.batch if options.batch is None else options.batch,
        seed=own.seed if options.seed is None else options.seed,
    )


def export(options: argparse.Namespace) -> None:
    from tools.train.export import export_folder
    from tools.train.recipes import RECIPES

    to = options.to or PACKAGED / options.model
    export_folder(options.work / options.model, options.work / "text", to, RECIPES[options.model])
    evaluate(options)


def evaluate(options: argparse.Namespace) -> None:
    import torch

    from tools.train.card import write_card
    from tools.train.evaluate import evaluate_folder

    torch.set_flush_denormal(True)
    torch.set_num_threads(options.threads)
    to = options.to or PACKAGED / options.model
    evaluate_folder(to, options.work / "text", say)
    write_card(to)
    say(f"measured.json, README.md and SHA256SUMS are written in {to}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run in (
        ("prepare", prepare),
        ("train", train),
        ("export", export),
        ("evaluate", evaluate),
    ):
        command = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.set_defaults(run=run)
        command.add_argument(
            "--work", type=Path, default=Path("build/tiny"), help="folder for text and checkpoints"
        )
        if name != "prepare":
            command.add_argument("--model", choices=MODELS, default=MODELS[0], help="which one")
            command.add_argument("--threads", type=int, default=2, help="CPU threads")
        if name in ("export", "evaluate"):
            command.add_argument(
                "--to", type=Path, help="the model's folder, if not the one that is packaged"
            )
        if name == "prepare":
            _add_prepare(command)
        if name == "train":
            _add_train(command)
    return parser


def _add_prepare(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--library", type=Path, help="the standard library to read instead of this Python's"
    )
    command.add_argument("--seed", type=int, default=0, help="of the split")
    command.add_argument("--vocabulary", type=int, default=4096, help="tokens of the tokenizer")


def _add_train(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--steps",
        type=int,
        help="steps of phase 1, trunk and head on the text, if not the model's own; may change "
        "until rates fall, at 40 %%",
    )
    command.add_argument(
        "--head-steps",
        type=int,
        nargs="+",
        help="steps of phase 2, the head alone on the trunk's distribution, if not the model's "
        "own; several numbers are rounds, and a finished run can be given a further one",
    )
    command.add_argument("--batch", type=int, help="windows per step, if not the model's own")
    command.add_argument(
        "--seed", type=int, help="of weights and order of windows, if not the model's own"
    )
    command.add_argument("--save-every", type=int, default=150, help="steps between checkpoints")
    command.add_argument(
        "--stop-after", type=int, default=0, help="stop after so many steps in all; 0: never"
    )
    command.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let torch compile the losses; needs a C++ compiler",
    )


if __name__ == "__main__":
    arguments = build_parser().parse_args()
    try:
        arguments.run(arguments)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
