"""`surefoot inspect`: what a model needs and keeps, from its config alone."""

from __future__ import annotations

from surefoot.cli.options import (
    AUTO,
    DEFAULT_MODEL,
    ENGINE_DEFAULTS,
    EngineOptions,
    JsonOutput,
    ModelName,
)
from surefoot.cli.show import Screen


def inspect(
    model: ModelName = DEFAULT_MODEL,
    *,
    engine: EngineOptions = ENGINE_DEFAULTS,
    json: JsonOutput = False,
) -> int:
    """Show what a model needs and keeps, without loading its weights.

    Only config.json is read, or the header of a .gguf file. --drafter and --draft-tokens may be
    comma lists; memory is planned for the deepest draft among them.
    """
    screen = Screen()
    configs = engine.several(AUTO, AUTO)
    # The model's side loads torch, which --help and a mistyped flag need not wait for.
    from surefoot.cli.blueprint import draw

    with screen.loading(f"reading {model}") as progress:
        blueprint = draw(model, configs, progress)
    if json:
        screen.json(blueprint.entry())
    else:
        for title, columns, rows in blueprint.tables():
            screen.table(title, columns, rows)
    return 0
