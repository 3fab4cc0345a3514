"""`surefoot bench`: how fast, by batch, drafter and depth."""

# Annotations are not postponed: the parser would evaluate them anew at every start.
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from surefoot.cli.asks import read_asks
from surefoot.cli.flags import flag, switch, whole
from surefoot.cli.options import (
    AUTO,
    DEFAULT_MODEL,
    ENGINE_DEFAULTS,
    EngineOptions,
    JsonOutput,
    ModelName,
    check_whole,
    whole_list,
    without_drafter,
)
from surefoot.cli.prompts import PROMPT_TOKENS
from surefoot.cli.show import Screen, bytes_text
from surefoot.config import MAX_DRAFT_TOKENS, EngineConfig
from surefoot.errors import SettingError

_HEADS = (
    "batch",
    "drafter",
    "draft",
    "prompt",
    "new",
    "decode tok/s",
    "prefill tok/s",
    "ttft s",
    "accept length",
    "speedup",
)


@Parameter(name="*", group=Group("Load", sort_key=5))
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What is computed and how often."""

    batch: Annotated[str, flag("Comma list of how many requests run at once.", "1")] = "1"
    prompts: Annotated[
        Path | None, flag("JSONL of prompts, as for generate; else texts of our own.")
    ] = None
    random: Annotated[
        bool | None, switch("Random token ids as prompts; drafters cannot guess those.")
    ] = None
    prompt_tokens: Annotated[
        int | None,
        flag(
            "Cut or repeat prompts to this many tokens; those of a file stay as they are if it is "
            "not given.",
            PROMPT_TOKENS,
            convert=whole,
        ),
    ] = None
    new_tokens: Annotated[int, flag("New tokens of each request.", 64, convert=whole)] = 64
    repeats: Annotated[
        int, flag("Timed runs of each kind, taken in turns; medians count.", 3, convert=whole)
    ] = 3
    tokens: Annotated[
        int | None,
        flag(
            "As many timed runs as make this many new tokens of each kind, instead of --repeats.",
            convert=whole,
        ),
    ] = None

    def check(self) -> list[int]:
        """The batches.

        Raises:
            SettingError: a value is out of range, or two contradict each other.
        """
        check_whole("new_tokens", self.new_tokens, 2)
        check_whole("repeats", self.repeats, 1)
        for name in ("prompt_tokens", "tokens"):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, 1)
        if self.random and self.prompts is not None:
            raise SettingError("random", "contradicts --prompts; leave out one of them")
        return whole_list("batch", self.batch)

    def runs(self, batch: int) -> int:
        """Timed runs of each kind with this many requests at once."""
        if self.tokens is None:
            return self.repeats
        return -(-self.tokens // (batch * self.new_tokens))


LOAD_DEFAULTS = LoadOptions()


def bench(
    model: ModelName = DEFAULT_MODEL,
    *,
    load: LoadOptions = LOAD_DEFAULTS,
    engine: EngineOptions = ENGINE_DEFAULTS,
    json: JsonOutput = False,
) -> int:
    """Measure speed by batch, drafter and depth, against no drafter on the same prompts.

    --drafter (default none,auto) and --draft-tokens may be comma lists. Greedy, without end
    tokens, without prefix cache. All kinds are timed in turns within one process. Decode speed
    counts from the moment when every request has its first token, so prefill is left out.
    """
    screen = Screen()
    batches = load.check()
    configs = _configs(engine, batches)
    asks = None if load.prompts is None else read_asks(load.prompts)
    # The model's side loads torch, which --help and a mistyped flag need not wait for.
    from surefoot.cli.lanes import Texts, open_lanes
    from surefoot.cli.measure import Load, measure, peak_memory

    texts = Texts(asks, bool(load.random), load.prompt_tokens)
    with open_lanes(model, configs, texts, load.new_tokens, screen) as lanes:
        target = lanes[0].engine.target
        loads = [
            Load(texts.prompts(target, batch), load.new_tokens, load.runs(batch))
            for batch in batches
        ]
        runs = measure(lanes, loads, screen)
    peak = peak_memory()
    if json:
        screen.json({"runs": [asdict(run) for run in runs], "peak_memory_bytes": peak})
        return 0
    screen.table(model, _HEADS, [list(asdict(run).values()) for run in runs])
    screen.line(f"peak memory {bytes_text(peak)}")
    return 0


def _configs(engine: EngineOptions, batches: list[int]) -> list[EngineConfig]:
    """One for each drafter and depth; the first has no drafter."""
    most = max(batches)
    configs = engine.several(
        f"none,{AUTO}",
        AUTO,
        prefix_cache=False,
        max_rows=most,
        max_step_tokens=max(EngineConfig.max_step_tokens, most * (1 + MAX_DRAFT_TOKENS)),
    )
    if configs[0].max_rows < most:
        raise SettingError("batch", f"{most} is more than max_rows {configs[0].max_rows}")
    plain = without_drafter(configs[0])
    return [plain, *(config for config in configs if config.drafter != "none")]
